"""Models of ``dshard plan``, ``simulate`` and ``calibrate``, without memory: presets, configurations, functions."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard.cli.usage import UsageError, found_by

_SEQUENCE = 512  # of a configuration, unless its model knows fewer positions
_ROTARY_BASE = 500_000.0


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The shape of a `GPT`: sizes in tokens, layers and features."""

    block_size: int
    num_layers: int
    width: int
    num_heads: int
    vocab_size: int = 256
    tie_head: bool = False


class Attention(nn.Module):
    """Causal self-attention; (batch, time, width) in and out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mixes each position with the positions before it."""
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class MLP(nn.Module):
    """Two linear maps with a GELU between them; (batch, time, width) in and out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transforms each position by itself."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A pre-norm transformer block; (batch, time, width) in and out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Adds attention, then the MLP, to the residual stream."""
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A decoder-only transformer with learned positions.

    Args:
        config: its shape. Weights are drawn from torch's default generator, so seed that first.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.block_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.apply(self._init_weights)
        if config.tie_head:
            self.head.weight = self.tokens.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Block):  # comes after its children: the two maps into the residual stream start smaller
            for branch_end in (module.attention.out, module.mlp.down):
                nn.init.normal_(branch_end.weight, std=0.02 / math.sqrt(2 * self.config.num_layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every position.

        Args:
            tokens: int64 (batch, time), time at most `GPTConfig.block_size`.

        Returns:
            (batch, time, vocab_size).
        """
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a `Llama`: layers, features, heads, heads of keys and values, inner features, tokens known."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    inner_width: int
    vocab_size: int = 128256


class _LlamaAttention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width, self.times = config.width // config.num_heads, config.num_heads // config.num_kv_heads
        kv_width = config.width // config.num_heads * config.num_kv_heads
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k, self.v = (nn.Linear(config.width, kv_width, bias=False) for _ in range(2))
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Mixes each position with those before it; (batch, time, width) in and out."""
        heads = (each(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for each in (self.q, self.k, self.v))
        q, k, v = heads  # as many as this rank has, where layers are cut
        q, k = _turned(q, angles), _turned(k, angles)
        k, v = (each.repeat_interleave(self.times, dim=1) for each in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """Halves of features, turned by an angle for each position; (batch, heads, time, width) in and out."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class _LlamaBlock(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.attention = _LlamaAttention(config)
        self.gate, self.up = (nn.Linear(config.width, config.inner_width, bias=False) for _ in range(2))
        self.down = nn.Linear(config.inner_width, config.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Adds attention, then the MLP."""
        x = x + self.attention(self.norm_1(x), angles)
        normed = self.norm_2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """A decoder-only transformer.

    Args:
        config: its shape.

    Attributes:
        tp_plan: how its layers may be cut, in the words of Hugging Face.
    """

    tp_plan: Mapping[str, str] = MappingProxyType(
        {
            "tokens": "embedding_rowwise",
            **{f"blocks.*.attention.{name}": "colwise" for name in ("q", "k", "v")},
            **{f"blocks.*.{name}": "colwise" for name in ("gate", "up")},
            **{f"blocks.*.{name}": "rowwise" for name in ("attention.out", "down")},
            "head": "colwise_gather_output",
        }
    )

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.num_heads
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(_LlamaBlock(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every position; int64 (batch, time) in, (batch, time, vocab_size) out."""
        rates = _ROTARY_BASE ** -(torch.arange(0, self.head_width, 2, device=tokens.device) / self.head_width)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), rates)
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x))


@dataclass(frozen=True, slots=True)
class Preset:
    """A model by name.

    Args:
        build: Makes it for a length of sequence; on meta, when called under it.
        sequence: Its usual length, in tokens.
        source: Where its shape is from.
    """

    build: Callable[[int], nn.Module]
    sequence: int
    source: str


def _gpt(layers: int, width: int, heads: int, source: str, *, vocab: int, sequence: int, tie: bool = False) -> Preset:
    def build(length: int) -> nn.Module:
        return GPT(GPTConfig(length, layers, width, heads, vocab, tie))

    return Preset(build, sequence, source)


def _llama(layers: int, width: int, heads: int, inner: int) -> Preset:
    config = LlamaConfig(layers, width, heads, 8, inner)
    return Preset(lambda _: Llama(config), 8192, "Grattafiori et al., 2024")


_GPT2 = "Radford et al., 2019"
_GPT3 = "Brown et al., 2020"
_MINGPT = "minGPT's model table"
_FSDP = "the announcement and the paper of PyTorch FSDP"

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "gpt-nano": _gpt(3, 48, 3, _MINGPT, vocab=50257, sequence=1024),
        "gpt-micro": _gpt(4, 128, 4, _MINGPT, vocab=50257, sequence=1024),
        "gpt-mini": _gpt(6, 192, 6, _MINGPT, vocab=50257, sequence=1024),
        "gpt2": _gpt(12, 768, 12, _GPT2, vocab=50257, sequence=1024, tie=True),
        "gpt2-medium": _gpt(24, 1024, 16, _GPT2, vocab=50257, sequence=1024, tie=True),
        "gpt2-large": _gpt(36, 1280, 20, _GPT2, vocab=50257, sequence=1024, tie=True),
        "gpt2-xl": _gpt(48, 1600, 25, _GPT2, vocab=50257, sequence=1024, tie=True),
        "gpt3-175b": _gpt(96, 12288, 96, f"{_GPT3}; vocabulary of {_FSDP}", vocab=50000, sequence=2048),
        "gpt-1t": _gpt(128, 25600, 160, _FSDP, vocab=50000, sequence=2048),
        "llama3-8b": _llama(32, 4096, 32, 14336),
        "llama3-70b": _llama(80, 8192, 64, 28672),
        "llama3-405b": _llama(126, 16384, 128, 53248),
    }
)


def meta_model(preset: Preset, sequence: int) -> nn.Module:
    """The model of a preset, without memory."""
    with torch.device("meta"):
        return preset.build(sequence)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A model on meta, and a sample of its input for one rank.

    Attributes:
        name: as it was asked for.
        model: without memory.
        sample: of its input.
        num_params: elements of all parameters.
        num_tokens: per sample; 0 where nobody knows.
    """

    name: str
    model: nn.Module
    sample: Any
    num_params: int
    num_tokens: int


def build_model(name: str, *, batch: int | None, sequence: int | None, is_checkpointed: bool) -> Sampled:
    """Builds a model without memory.

    Args:
        name: a preset, the path of a ``config.json`` or of its folder, or ``module:function``; the function returns a
            model and a sample input.
        batch: samples per rank; None for 1. The sample of a function has its own.
        sequence: tokens per sample; None for what is usual for the model.
        is_checkpointed: whether blocks compute their forward again in backward.

    Raises:
        UsageError: there is no such model, it cannot be built, or it has no parameters.
    """
    num_tokens = 0
    if name in PRESETS:
        preset = PRESETS[name]
        num_tokens = sequence or preset.sequence
        model, sample = meta_model(preset, num_tokens), _tokens(batch or 1, num_tokens)
    elif Path(name).is_dir() or name.endswith(".json"):
        model, sample = _hugging_face(Path(name), batch or 1, sequence)
        num_tokens = sample["input_ids"].shape[1]
    elif ":" in name and sequence is not None:
        raise UsageError(
            f"--sequence is for presets and configurations, but {name} makes its own sample. Leave it out."
        )
    elif ":" in name:
        model, sample = _function(name)
    else:
        raise UsageError(
            f"MODEL must be one of {', '.join(PRESETS)}, a config.json of Hugging Face or its folder, or "
            f"module:function, but it is {name!r}. Pass one of these."
        )
    num_params = sum(param.numel() for param in model.parameters())
    if not num_params:
        raise UsageError(f"MODEL must have parameters, but {name} has none. Pass a model that has.")
    from dshard.testing.verifying.programs import checkpoint_blocks

    if is_checkpointed and not checkpoint_blocks(model):
        raise UsageError(f"--checkpoint needs blocks in a ModuleList, but {name} has none. Leave it out.")
    return Sampled(name, model, sample, num_params, num_tokens)


def _tokens(batch: int, length: int) -> Tensor:
    return torch.empty(batch, length, dtype=torch.int64, device="meta")


def _hugging_face(path: Path, batch: int, sequence: int | None) -> tuple[nn.Module, Any]:
    """A model of a configuration, without its weights."""
    path = path / "config.json" if path.is_dir() else path
    try:
        if not path.is_file():
            raise OSError("it is no file")
        record = json.loads(path.read_bytes())  # with the Infinity that some have
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"MODEL must be a configuration as JSON, but {path} cannot be read: {error}.") from error
    if not isinstance(record, dict) or "model_type" not in record:
        raise UsageError(
            f"MODEL must be a configuration of Hugging Face, but {path} has no model_type. Pass one that has."
        )
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(
            "a configuration of Hugging Face needs transformers, but it is not installed. Run: pip install "
            "'dshard[interop]'."
        )
    import transformers

    kind = record.pop("model_type")
    try:
        config = transformers.AutoConfig.for_model(kind, **record)
        is_pair = getattr(config, "is_encoder_decoder", False)
        auto = transformers.AutoModelForSeq2SeqLM if is_pair else transformers.AutoModelForCausalLM
        config.use_cache = False
        with torch.device("meta"):
            model = auto.from_config(config)
        tokens = _tokens(batch, sequence or min(_SEQUENCE, getattr(config, "max_position_embeddings", _SEQUENCE)))
    except Exception as error:  # whatever a file's values lead to in another library
        raise UsageError(f"MODEL must be a language model, but {path} ({kind}) cannot be built: {error}.") from error
    return model, {"input_ids": tokens, "labels": tokens, **({"decoder_input_ids": tokens} if is_pair else {})}


def _function(name: str) -> tuple[nn.Module, Any]:
    """What a function returns: a model and a sample input; it is called under meta."""
    build = found_by("MODEL", name)
    with torch.device("meta"):
        made = build()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise UsageError(
            f"MODEL must be a function that returns a model and a sample input, but {name} returns "
            f"{type(made).__name__}. Return (model, sample)."
        )
    return made
