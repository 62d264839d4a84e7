"""T5, for the rows of papers that trained it, without memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


def t5_11b() -> T5:
    """The model of 11 billion parameters (Raffel et al., 2020), on meta."""
    with torch.device("meta"):
        return T5(T5Config(24, 1024, 128, 128, 65536))
