"""A Llama-like model: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of a `Llama`; those by default make 1.1 billion parameters.

    Attributes:
        vocab: Tokens it knows.
        width: Features.
        layers: Blocks.
        heads: Query heads, a divisor of the width.
        kv_heads: Key and value heads, a divisor of the query heads.
        hidden: Features within an MLP.
        theta: Base of the rotary frequencies.
        checkpointing: Whether a block's activations are computed again in backward.
    """

    vocab: int = 32000
    width: int = 2048
    layers: int = 22
    heads: int = 32
    kv_heads: int = 4
    hidden: int = 5632
    theta: float = 10000.0
    checkpointing: bool = False


def _rotations(head_width: int, num_tokens: int, theta: float, device: torch.device) -> Tensor:
    """Cosines and sines, shape (2, tokens, head width / 2), fp32."""
    frequencies = theta ** -(torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(num_tokens, device=device, dtype=torch.float32), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def _rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Turn pairs of features by their positions' angles; (batch, heads, tokens, head width) in and out."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rotations
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention whose keys and values serve several query heads; (batch, tokens, width) in and out."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        head_width = config.width // config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.kv_heads * head_width, bias=False)
        self.value = nn.Linear(config.width, config.kv_heads * head_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        """Mixes each position with those before it."""
        batch, tokens, width = x.shape
        q = _rotate(self.query(x).view(batch, tokens, self.heads, -1).transpose(1, 2), rotations)
        k = _rotate(self.key(x).view(batch, tokens, self.kv_heads, -1).transpose(1, 2), rotations)
        v = self.value(x).view(batch, tokens, self.kv_heads, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """Attention, then a gated MLP, each behind a norm and added to the stream; (batch, tokens, width) in and out."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(config.width), Attention(config)
        self.norm2 = nn.RMSNorm(config.width)
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        """Adds both to the stream."""
        x = x + self.attention(self.norm1(x), rotations)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Token ids (batch, tokens) to logits (batch, tokens, vocab)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        config = self.config
        rotations = _rotations(config.width // config.heads, ids.shape[1], config.theta, ids.device)
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, rotations, use_reentrant=False) if config.checkpointing else block(x, rotations)
        return self.head(self.norm(x))
