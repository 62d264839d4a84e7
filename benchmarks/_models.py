"""The model that the benchmarks train, and the ways to shard it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

import dshard


@dataclass(frozen=True)
class Size:
    """Of a GPT."""

    vocab: int = 2048
    width: int = 512
    layers: int = 8
    heads: int = 8


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, tokens, width) to the same."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Token ids to logits."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Shape (batch, tokens) to (batch, tokens, vocab)."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


KINDS = ["unsharded", "DDP", "FSDP2", "dshard", "FSDP2, no reshard", "dshard, no reshard"]


def build(kind: str, size: Size) -> nn.Module:
    """The model, sharded or not."""
    torch.manual_seed(0)
    model = GPT(size)
    if kind == "DDP":
        return DistributedDataParallel(model)
    if kind == "dshard, root alone":
        return dshard.fully_shard(model)
    shard = {"dshard": dshard.fully_shard, "FSDP2": torch_fully_shard}.get(kind.split(",")[0])
    if shard is not None:
        reshard = "no reshard" not in kind
        for block in model.blocks:
            shard(block, reshard_after_forward=reshard)
        shard(model, reshard_after_forward=reshard)
    return model


def step_of(kind: str, size: Size, batch: int, tokens: int) -> Callable[[], Any]:
    """One forward, backward and AdamW step."""
    model = build(kind, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, size.vocab, (batch, tokens + 1))

    def step() -> None:
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def overheads(rows: dict[str, dict[str, float]]) -> dict[str, float]:
    """What dshard adds to the unsharded step, over what FSDP2 adds."""
    base = rows["unsharded"]["median_ms"]
    return {
        suffix: (rows["dshard" + suffix]["median_ms"] - base) / (rows["FSDP2" + suffix]["median_ms"] - base)
        for suffix in ("", ", no reshard")
    }
