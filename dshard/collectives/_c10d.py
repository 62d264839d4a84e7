"""The one file that names `torch.distributed`'s collective functions, whose names differ between releases."""

import enum
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ProcessGroup = dist.ProcessGroup
Work = Any  # torch's Work; None where the backend finished at once


class ReduceOp(enum.Enum):
    """How values of several ranks become one."""

    SUM = enum.auto()
    MEAN = enum.auto()  # the backend's own, which not every backend has
    MAX = enum.auto()
    MIN = enum.auto()


_OPS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MEAN: dist.ReduceOp.AVG,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.MIN: dist.ReduceOp.MIN,
}

HEADERS = 0x44530000  # tags that keep our point-to-point messages apart from the user's; payloads lie below

# torch 2.13 renames the flat collectives and warns at the old names; 2.11 has the old names alone.
_all_gather_flat: Callable[..., Work] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat: Callable[..., Work] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def is_initialized() -> bool:
    """Whether a default process group exists."""
    return bool(dist.is_available() and dist.is_initialized())


def default_backend() -> str:
    """Name of the default process group's backend."""
    return str(dist.get_backend()).lower()


def world_size() -> int:
    """Number of ranks of the default process group."""
    return int(dist.get_world_size())


def backend_of(group: ProcessGroup, device: torch.device) -> str:
    """Name of the backend that `group` uses for tensors on `device`, for example 'gloo' or 'nccl'."""
    name = str(dist.get_backend(group)).lower()
    if "," not in name and ":" not in name:
        return name
    by_device = dict(part.split(":") for part in name.split(","))
    return by_device.get(device.type, name)


def rank_in(group: ProcessGroup) -> int:
    """This process's rank within `group`."""
    return int(dist.get_rank(group))


def size_of(group: ProcessGroup) -> int:
    """Number of ranks of `group`."""
    return int(dist.get_world_size(group))


def name_of(group: ProcessGroup) -> str:
    """A name that tells the groups of this process apart."""
    return str(group.group_name)


def send(tensor: Tensor, peer: int, tag: int, group: ProcessGroup) -> Work:
    """Start to send `tensor` to rank `peer` of `group`."""
    return group.send([tensor], peer, tag)


def receive(tensor: Tensor, peer: int, tag: int, group: ProcessGroup) -> Work:
    """Start to receive into `tensor` from rank `peer` of `group`."""
    return group.recv([tensor], peer, tag)


def all_gather_flat(out: Tensor, segment: Tensor, group: ProcessGroup) -> Work:
    """Start the backend's own all-gather of equal segments into `out`."""
    return _all_gather_flat(out, segment, group=group, async_op=True)


def reduce_scatter_flat(out: Tensor, buffer: Tensor, op: ReduceOp, group: ProcessGroup) -> Work:
    """Start the backend's own reduce-scatter of `buffer` into `out`."""
    return _reduce_scatter_flat(out, buffer, op=_OPS[op], group=group, async_op=True)


def all_reduce_flat(tensor: Tensor, op: ReduceOp, group: ProcessGroup) -> Work:
    """Start the backend's own all-reduce of `tensor`, in place."""
    return dist.all_reduce(tensor, op=_OPS[op], group=group, async_op=True)


def broadcast_flat(tensor: Tensor, src: int, group: ProcessGroup) -> Work:
    """Start a broadcast of `tensor` from rank `src` of `group`, in place."""
    return dist.broadcast(tensor, group=group, group_src=src, async_op=True)
