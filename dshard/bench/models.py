"""The GPT that the benchmarks train, and the ways to shard it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

import dshard
from dshard.bench.common import Reader, Step, Summary
from dshard.bench.waits import watched


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a GPT: tokens it knows, features, blocks, attention heads."""

    vocab: int = 2048
    width: int = 512
    layers: int = 8
    heads: int = 8


class Block(nn.Module):
    """A pre-norm transformer block; (batch, tokens, width) in and out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Adds attention, then the MLP, to the residual stream."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Token ids (batch, tokens) to logits (batch, tokens, vocab)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


KINDS = ("unsharded", "DDP", "FSDP2", "dshard", "FSDP2, no reshard", "dshard, no reshard")
ROOT_ALONE = "dshard, root alone"
MESSAGES = ", by messages"  # at the end of a kind: by `DSHARD_TRANSPORT=messages`, as between hosts
COMPILED = ", compiled"  # at the end of a kind: each block, by inductor
_SHARD: dict[str, Any] = {"dshard": dshard.fully_shard, "FSDP2": torch_fully_shard}


def mesh_of(device: torch.device) -> DeviceMesh:
    """All ranks, with tensors on `device`'s type: said, for both libraries would else take a GPU that is there."""
    return init_device_mesh(device.type, (dist.get_world_size(),))


def messaging_mesh() -> DeviceMesh:
    """The same for the CPU, of a new process group whose ranks exchange messages."""
    before = os.environ.get("DSHARD_TRANSPORT")
    os.environ["DSHARD_TRANSPORT"] = "messages"
    try:
        group: Any = dist.new_group()
        dshard.fully_shard(nn.Linear(1, 1), mesh=DeviceMesh.from_group(group, "cpu"))  # so the way is found
        return DeviceMesh.from_group(group, "cpu")
    finally:
        os.environ.pop("DSHARD_TRANSPORT")
        os.environ.update({"DSHARD_TRANSPORT": before} if before is not None else {})


def shard(
    kind: str,
    model: nn.Module,
    device: torch.device,
    *,
    policy: MixedPrecisionPolicy | None = None,
    inner: Callable[[Any], Sequence[nn.Module]] = lambda _: (),
) -> nn.Module:
    """Shard a model whose blocks are in ``model.blocks``, in the way that `kind` says; plain kinds are left alone.

    Args:
        kind: Of `KINDS`, or made of one.
        model: Changed in place, but by DDP, which wraps it.
        device: Of the mesh.
        policy: Dtypes to compute and to reduce in.
        inner: Modules of a block that are units of their own.
    """
    if kind == "DDP":
        return DistributedDataParallel(model)
    library = _SHARD.get(kind.split(",")[0])
    if library is None:
        return model
    mesh = messaging_mesh() if kind.endswith(MESSAGES) else mesh_of(device)
    options: dict[str, Any] = {"mesh": mesh}
    if policy is not None:
        options["mp_policy"] = policy
    if kind == ROOT_ALONE:
        return library(model, **options)
    options["reshard_after_forward"] = "no reshard" not in kind
    assert isinstance(model.blocks, nn.ModuleList)
    for block in model.blocks:
        for module in (*inner(block), block):
            library(module, **options)
    return library(model, **options)


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> Callable[[], None]:
    """One forward, backward and optimizer step on ids of shape (batch, tokens + 1)."""

    def step() -> None:
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def step_of(kind: str, size: Size, batch: int, tokens: int, *, policy: MixedPrecisionPolicy | None = None) -> Step:
    """An AdamW training step of a freshly built GPT on CPU, which tells its exposed time where that is known."""
    torch.manual_seed(0)
    plain = GPT(size)
    if kind.endswith(COMPILED):
        for block in plain.blocks:
            block.compile()
    if policy is not None and kind.startswith("unsharded"):
        plain.to(policy.param_dtype)
    model = shard(kind, plain, torch.device("cpu"), policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, size.vocab, (batch, tokens + 1))
    bare = training_step(model, optimizer, ids)

    def step() -> Reader:
        return watched(kind, model, bare)

    return step


def overheads(rows: dict[str, Summary]) -> dict[str, float]:
    """What dshard adds to the unsharded step, over what FSDP2 adds; by the suffix of dshard's kind."""

    def added(kind: str) -> float:
        return (rows[kind]["median_ms"] or 0.0) - (rows["unsharded"]["median_ms"] or 0.0)

    pairs = [(way + own, way) for way in ("", ", no reshard") for own in ("", MESSAGES) if f"dshard{way}{own}" in rows]
    return {suffix: added(f"dshard{suffix}") / added(f"FSDP2{way}") for suffix, way in pairs}
