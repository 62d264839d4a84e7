"""Models of ``dshard plan``, ``simulate`` and ``calibrate``, without memory: presets, configurations, functions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard.cli.usage import UsageError, make
from dshard.testing.training import checkpoint_blocks

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


class Block(nn.Module):
    """A pre-norm transformer block; (batch, time, width) in and out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.width)
        up = nn.Linear(config.width, 4 * config.width, bias=False)
        down = nn.Linear(4 * config.width, config.width, bias=False)
        self.mlp = nn.Sequential(OrderedDict(up=up, gelu=nn.GELU(), down=down))

    def forward(self, x: Tensor) -> Tensor:
        """Adds attention, then the MLP, to the residual stream."""
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A decoder-only transformer with learned positions.

    Args:
        config: its shape.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.block_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tie_head:
            self.head.weight = self.tokens.weight

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
    """The shape of a `Llama`: layers, features, heads, heads of keys and values, inner features, tokens known.

    Its positions are not learned, so `block_size` is just the usual length of a sequence.
    """

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    inner_width: int
    vocab_size: int = 128256
    block_size: int = 8192


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


PRESETS: Mapping[str, GPTConfig | LlamaConfig] = MappingProxyType(
    {
        # minGPT's table of models
        "gpt-nano": GPTConfig(1024, 3, 48, 3, 50257),
        "gpt-micro": GPTConfig(1024, 4, 128, 4, 50257),
        "gpt-mini": GPTConfig(1024, 6, 192, 6, 50257),
        # Radford et al., 2019
        "gpt2": GPTConfig(1024, 12, 768, 12, 50257, tie_head=True),
        "gpt2-medium": GPTConfig(1024, 24, 1024, 16, 50257, tie_head=True),
        "gpt2-large": GPTConfig(1024, 36, 1280, 20, 50257, tie_head=True),
        "gpt2-xl": GPTConfig(1024, 48, 1600, 25, 50257, tie_head=True),
        # Brown et al., 2020, with the vocabulary of PyTorch FSDP's announcement; and the larger model of its paper
        "gpt3-175b": GPTConfig(2048, 96, 12288, 96, 50000),
        "gpt-1t": GPTConfig(2048, 128, 25600, 160, 50000),
        # Grattafiori et al., 2024
        "llama3-8b": LlamaConfig(32, 4096, 32, 8, 14336),
        "llama3-70b": LlamaConfig(80, 8192, 64, 8, 28672),
        "llama3-405b": LlamaConfig(126, 16384, 128, 8, 53248),
    }
)


def preset(name: str, sequence: int | None = None) -> nn.Module:
    """The model of a preset, for sequences of its usual length or of another one; without memory under meta."""
    config = PRESETS[name]
    if isinstance(config, LlamaConfig):
        return Llama(config)
    return GPT(config if sequence is None else replace(config, block_size=sequence))


@dataclass(frozen=True, slots=True)
class Sampled:
    """A model on meta, and a sample of its input for one rank.

    Attributes:
        model: without memory.
        sample: of its input.
        num_tokens: per sample; 0 where nobody knows.
    """

    model: nn.Module
    sample: Any
    num_tokens: int = 0


def build_model(name: str, *, batch: int | None, sequence: int | None, is_checkpointed: bool) -> Sampled:
    """Builds a model without memory.

    Args:
        name: a preset, the path of a ``config.json`` or of its folder, or ``module:function``, a factory as for
            ``dshard verify``.
        batch: samples per rank; None for 1. The sample of a function has its own.
        sequence: tokens per sample; None for what is usual for the model.
        is_checkpointed: whether blocks compute their forward again in backward.

    Raises:
        UsageError: there is no such model, or it cannot be built.
    """
    if name in PRESETS:
        length = sequence or PRESETS[name].block_size
        with torch.device("meta"):
            found = Sampled(preset(name, length), _tokens(batch or 1, length), length)
    elif Path(name).is_dir() or name.endswith(".json"):
        found = _hugging_face(Path(name), batch or 1, sequence)
    elif ":" in name and sequence is not None:
        raise UsageError(
            f"--sequence is for presets and configurations, but {name} makes its own sample. Leave it out."
        )
    elif ":" in name:
        made = make("MODEL", name, on_meta=True)
        sample = made["sample"]
        found = Sampled(made["model"], sample(0, 0) if callable(sample) else sample)
    else:
        raise UsageError(
            f"MODEL must be one of {', '.join(PRESETS)}, a config.json of Hugging Face or its folder, or "
            f"module:function, but it is {name!r}. Pass one of these."
        )
    if is_checkpointed and not checkpoint_blocks(found.model):
        raise UsageError(f"--checkpoint needs blocks in a ModuleList, but {name} has none. Leave it out.")
    return found


def _tokens(batch: int, length: int) -> Tensor:
    return torch.empty(batch, length, dtype=torch.int64, device="meta")


def _hugging_face(path: Path, batch: int, sequence: int | None) -> Sampled:
    """A model of a configuration, without its weights."""
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"MODEL must be a configuration as JSON, but {path} is no file. Pass the path of one.")
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "a configuration of Hugging Face needs transformers, but it is not installed. Run: pip install "
            "'dshard[interop]'."
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        is_pair = getattr(config, "is_encoder_decoder", False)
        auto = transformers.AutoModelForSeq2SeqLM if is_pair else transformers.AutoModelForCausalLM
        config.use_cache = False
        with torch.device("meta"):
            model = auto.from_config(config)
        length = sequence or min(_SEQUENCE, getattr(config, "max_position_embeddings", _SEQUENCE))
        tokens = _tokens(batch, length)
    except Exception as error:  # whatever a file's values lead to in another library
        raise UsageError(
            f"MODEL must be a language model's configuration as JSON, but {path} cannot be built: {error}."
        ) from error
    inputs = ("input_ids", "labels", *(("decoder_input_ids",) if is_pair else ()))
    return Sampled(model, dict.fromkeys(inputs, tokens), length)
