"""Raise an error of one rank on all ranks, so that none goes on alone."""

import math
import os
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from dshard import collectives
from dshard.collectives import ReduceOp, ShardGroup
from dshard.errors import CheckpointError, DShardError
from dshard.tensor import ShardedTensor
from dshard.tensor.meshes import groups_of, joined_group

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
