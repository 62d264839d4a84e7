"""A decoder of the Llama kind, for plans and simulations: rotary positions, shared keys and values, a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_BASE = 500_000.0


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a `Llama`: layers, features, heads, heads of keys and values, inner features, tokens known."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    inner_width: int
    vocab_size: int = 128256


class _Attention(nn.Module):
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


class _Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.attention = _Attention(config)
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
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every position; int64 (batch, time) in, (batch, time, vocab_size) out."""
        rates = _BASE ** -(torch.arange(0, self.head_width, 2, device=tokens.device) / self.head_width)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), rates)
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x))
