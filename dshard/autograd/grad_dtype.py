"""Reduced gradients under mixed precision: autograd wants them in the dtype of compute, `.grad` holds the parameter's.

A hook of a leaf must return a tensor of the dtype that it was given. So what the hook returns says that it has that
dtype, and `.grad` gets what it stands for once autograd has put it there.
"""

from typing import Any

import torch

from dshard.tensor import ShardedTensor
from dshard.tensor.shard_storage import ShardStorage


def standing_for(grad: ShardedTensor, dtype: torch.dtype, *, is_seen: bool) -> ShardedTensor:
    """A reduced gradient as autograd is to get it.

    Args:
        grad: In the dtype of its parameter; it may be in flight.
        dtype: That autograd asks for.
        is_seen: Whether programs get to see it: as the result of `autograd.grad`, in a hook of theirs. Its values are
            rounded to `dtype` then; else it shares the memory of `grad`.
    """
    storage = grad.shard_storage
    if is_seen:
        storage = ShardStorage(
            None, storage.layout, lambda own: own.deliver(grad.shard_storage.resolve().to(dtype)), is_shared=True
        )
    out = grad.like(storage, dtype=dtype)
    out.is_added_up = grad.is_added_up
    if not is_seen:
        out.stands_for = grad
    return out


def keep_own_dtype(param: Any) -> None:
    """A parameter's `.grad` in the parameter's dtype, after autograd has put one there."""
    grad = param.grad
    if isinstance(grad, ShardedTensor) and grad.storage_dtype != param.storage_dtype:
        known = grad.stands_for
        if known is not None and known.shard_storage is grad.shard_storage:
            param.grad = known
        else:
            with torch.no_grad():
                param.grad = grad.like(grad.shard_storage.resolve().to(param.storage_dtype))
                param.grad.shard_storage.is_shared = True
