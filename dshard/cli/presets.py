"""Models that the planner knows by name, built without memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dshard.cli.gpt import GPT, GPTConfig
from dshard.cli.llama import Llama, LlamaConfig


def checkpoint_blocks(model: nn.Module) -> int:
    """Have each element of a model's outermost lists keep its inputs alone, and compute its forward again in backward.

    The names of parameters stay: a plan is for the model as its user has it.

    Returns:
        How many there are.
    """
    num = 0
    for child in model.children():
        if not isinstance(child, nn.ModuleList):
            num += checkpoint_blocks(child)
            continue
        for block in dict.fromkeys(child):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
            num += 1
    return num


@dataclass(frozen=True, slots=True)
class T5Config:
    """The shape of a `T5`: layers of each half, features, heads, features per head, inner features, tokens known."""

    num_layers: int
    width: int
    num_heads: int
    head_width: int
    inner_width: int
    vocab_size: int = 32128


class _T5Attention(nn.Module):
    """Attention without scaling, whose scores are written to memory, as in the T5 of its time."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        inner = config.num_heads * config.head_width
        self.norm = nn.RMSNorm(config.width)
        self.q, self.k, self.v = (nn.Linear(config.width, inner, bias=False) for _ in range(3))
        self.out = nn.Linear(inner, config.width, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Adds what positions of `memory`, or of `x` itself, tell."""
        normed = self.norm(x)
        source = normed if memory is None else memory
        q, k, v = (
            each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for each in (self.q(normed), self.k(source), self.v(source))
        )
        weights = F.softmax((q @ k.transpose(-1, -2)).float(), dim=-1).to(x.dtype)
        return x + self.out((weights @ v).transpose(1, 2).flatten(-2))


class _T5Block(nn.Module):
    def __init__(self, config: T5Config, *, is_decoder: bool) -> None:
        super().__init__()
        self.attention = _T5Attention(config)
        self.cross = _T5Attention(config) if is_decoder else None
        self.norm = nn.RMSNorm(config.width)
        self.up = nn.Linear(config.width, config.inner_width, bias=False)
        self.down = nn.Linear(config.inner_width, config.width, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.attention(x)
        if self.cross is not None:
            x = self.cross(x, memory)
        return x + self.down(F.relu(self.up(self.norm(x))))


class T5(nn.Module):
    """An encoder and a decoder of T5, without relative positions: they cost next to nothing."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.shared = nn.Embedding(config.vocab_size, config.width)
        self.encoder = nn.ModuleList(_T5Block(config, is_decoder=False) for _ in range(config.num_layers))
        self.decoder = nn.ModuleList(_T5Block(config, is_decoder=True) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of as many tokens as were read; int64 (batch, time) in, (batch, time, vocab_size) out."""
        memory = self.shared(tokens)
        for block in self.encoder:
            memory = block(memory)
        x = self.shared(tokens)
        for block in self.decoder:
            x = block(x, memory)
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


def _t5(layers: int, width: int, heads: int, head_width: int, inner: int) -> Preset:
    config = T5Config(layers, width, heads, head_width, inner)
    return Preset(lambda _: T5(config), 512, "Raffel et al., 2020")


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
        "t5-large": _t5(24, 1024, 16, 64, 4096),
        "t5-3b": _t5(24, 1024, 32, 128, 16384),
        "t5-11b": _t5(24, 1024, 128, 128, 65536),
        "llama3-8b": _llama(32, 4096, 32, 14336),
        "llama3-70b": _llama(80, 8192, 64, 28672),
        "llama3-405b": _llama(126, 16384, 128, 53248),
    }
)


def meta_model(preset: Preset, sequence: int) -> nn.Module:
    """The model of a preset, without memory."""
    with torch.device("meta"):
        return preset.build(sequence)
