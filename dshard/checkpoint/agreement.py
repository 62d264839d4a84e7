"""Raise an error of one rank on all ranks, so that none goes on alone."""

import math
import os
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from dshard import collectives
from dshard.agreement import agree, checksum, of_all_ranks
from dshard.collectives import ReduceOp, ShardGroup, tag_of
from dshard.errors import CheckpointError, DivergenceError, DShardError
from dshard.tensor import ShardedTensor
from dshard.tensor.meshes import groups_of, joined_group
from dshard.tensor.subclass_shards import exact_values

_MAX_TEXT_BYTES = 2048  # of an error that travels to the other ranks
_LABEL = "checkpoint"
T = TypeVar("T")


class FollowingError(CheckpointError):
    """What a rank meets because another one has failed; `together` raises the error of that one in its place."""


def group_of(model: nn.Module) -> ShardGroup:
    """Return the ranks that share a model: those of the parameter that lies on most ranks.

    Raises:
        CheckpointError: It has none.
    """
    params = [p for p in model.parameters() if isinstance(p, ShardedTensor)]
    if params:
        widest = max(params, key=lambda p: math.prod(group.world_size for group in groups_of(p)))
        return joined_group(widest)
    raise CheckpointError("checkpoint: needs a sharded model, but it has no sharded parameter. Call fully_shard first.")


def check_written_alike(model: nn.Module, group: ShardGroup) -> None:
    """Raise on every rank where some have written to a parameter and others have not: shards would be of two steps.

    Replicas that differ in their writes but hold equal values, as after a broadcast, may be saved.

    Raises:
        DivergenceError: Names the parameter, and how often each rank has written to it.

    Communicates:
        An all-reduce of 16 bytes per parameter; where some differ, up to four more for each of these.
    """
    params = {name: p for name, p in model.named_parameters() if isinstance(p, ShardedTensor)}
    tags = torch.tensor([tag_of(p.shard_storage.signature) for p in params.values()], device=group.device_type)
    same = agree(tags, group, _LABEL).tolist()
    for name in [name for name, is_same in zip(params, same, strict=True) if not is_same]:
        param = params[name]
        is_right = torch.tensor([_replicas_are_equal(param)], dtype=torch.int64, device=group.device_type)
        if collectives.all_reduce([is_right], group, ReduceOp.MIN, label=_LABEL, everywhere=True).wait()[0]:
            continue
        counts = ", ".join(of_all_ranks(str(param.shard_storage.num_writes), group))
        raise DivergenceError(
            f"{name}: all ranks must have written alike to a parameter that is saved, but by rank they have written "
            f"{counts} times. One has skipped an optimizer.step(), or written by itself, most likely. Do it everywhere."
        )


def _replicas_are_equal(param: ShardedTensor) -> bool:
    """Whether a parameter has replicas, all of which hold the same values, with shards that were written to alike."""
    shard_group, storage = param.shard_group, param.shard_storage
    copies = shard_group if storage.layout.dim is None else shard_group.replicas
    if copies is None:
        return False
    total = checksum(exact_values(storage.resolve(), param.name)).view(1).to(copies.device_type)
    is_equal = bool(agree(total, copies, _LABEL))
    if storage.layout.dim is None:
        return is_equal
    tag = torch.tensor([tag_of(storage.signature)], device=shard_group.device_type)
    most, least = (
        collectives.all_reduce([tag], shard_group, op, label=_LABEL).wait()[0] for op in (ReduceOp.MAX, ReduceOp.MIN)
    )
    return is_equal and bool(most == least)


def together(group: ShardGroup, action: Callable[[], T], what: str) -> T:
    """Run an action on every rank and return its result; raise on every rank if it failed on one.

    Args:
        group: The ranks.
        action: What to run.
        what: What should have happened, for an error that is none of ours.

    Raises:
        CheckpointError: It failed on some rank. On every rank alike, with the error of the first such rank where it
            has none of its own, or one that follows from another's.

    Communicates:
        An all-reduce of 8 bytes; where there is an error, one of its text.
    """
    error: Exception | None = None
    try:
        found = action()
    except DShardError as caught:
        error = caught
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = CheckpointError(_text(caught, what))
        error.__cause__ = caught
    own = torch.tensor([group.world_size if error is None else group.world_rank], device=group.device_type)
    first = int(collectives.all_reduce([own], group, ReduceOp.MIN, label=_LABEL, everywhere=True).wait()[0].item())
    if first < group.world_size:
        text = str(error).encode(errors="replace")[:_MAX_TEXT_BYTES] if group.world_rank == first else b""
        received = _only_text(group, text).decode(errors="replace")
        if error is None or (isinstance(error, FollowingError) and group.world_rank != first):
            raise CheckpointError(f"{received} (Rank {first}.)")
        raise error
    return found


def share(group: ShardGroup, text: str) -> str:
    """Return the first rank's text on every rank; the other ranks pass an empty one.

    Communicates:
        An all-reduce of 2 KiB.
    """
    return os.fsdecode(_only_text(group, os.fsencode(text)))


def _only_text(group: ShardGroup, text: bytes) -> bytes:
    """Return on every rank the bytes that one rank passes; the other ranks pass none."""
    sent = torch.tensor(list(text.ljust(_MAX_TEXT_BYTES, b"\0")), dtype=torch.uint8, device=group.device_type)
    received = collectives.all_reduce([sent], group, ReduceOp.MAX, label=_LABEL, everywhere=True).wait()[0]
    return bytes(received.tolist()).rstrip(b"\0")


def _text(error: Exception, what: str) -> str:
    way = "Look at the traceback of the rank that raised it"
    if isinstance(error, OSError):
        way = "Check the path, its permissions and the space left"
    return f"{what}, but {type(error).__name__}: {str(error).rstrip('.')}. {way}."
