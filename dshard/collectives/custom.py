"""Ranks whose collectives are the user's own: torch's `AllGather` and `ReduceScatter` objects, a group of its own."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dshard.collectives import _c10d
from dshard.collectives._c10d import ProcessGroup, ReduceOp, Work
from dshard.collectives.group import ShardGroup
from dshard.collectives.memory import Buffer, BufferPool
from dshard.collectives.stalls import making


@dataclass(frozen=True, slots=True)
class Comms:
    """What takes the place of the backend's collectives; None for those.

    Args:
        all_gather: Called as torch's `AllGather` is: `(output, input, group, async_op)`, after `allocate(size, ...)`.
        reduce_scatter: As torch's `ReduceScatter`: `(output, input, group, op, async_op)`.
        separates: Whether reductions run in a process group of their own, beside gathers.
    """

    all_gather: Any = None
    reduce_scatter: Any = None
    separates: bool = False


class _CustomGroup(ShardGroup):
    """A ShardGroup with other collectives; flat ones, on every backend."""

    def __init__(self, base: ShardGroup, comms: Comms, reduce_group: ProcessGroup) -> None:
        super().__init__(base.process_group, torch.device(base.device_type), base.replicas)
        self.is_direct = False
        self._comms, self.reduce_group = comms, reduce_group

    def rows_for_gather(
        self, numel: int, dtype: torch.dtype, device: torch.device, pool: BufferPool
    ) -> tuple[Tensor, Buffer | None]:
        if self._comms.all_gather is None:
            return super().rows_for_gather(numel, dtype, device, pool)
        flat: Tensor = self._comms.all_gather.allocate((self.num_ranks * numel,), dtype=dtype, device=device)
        return flat.view(self.num_ranks, numel), None

    def all_gather(self, rows: Tensor, row: Tensor) -> list[Work]:
        comm = self._comms.all_gather
        if comm is None:
            return super().all_gather(rows, row)
        return [comm(rows.view(-1), row, self.process_group, async_op=True)]

    def reduce_scatter(self, rows: Tensor, out: Tensor, op: ReduceOp) -> list[Work]:
        comm = self._comms.reduce_scatter
        if comm is None:
            return super().reduce_scatter(rows, out, op)
        memory: Tensor = comm.allocate((rows.numel(),), dtype=rows.dtype, device=rows.device)
        return [comm(out, memory.copy_(rows.view(-1)), self.reduce_group, op.value, async_op=True)]


def with_comms(group: ShardGroup, comms: Comms) -> ShardGroup:
    """A group whose collectives are those of `comms`; itself where they change nothing.

    Communicates:
        With `separates`, the first time for a process group, the making of another one; all ranks must do so alike.
    """
    if comms == Comms():
        return group
    reduce_group = group.process_group
    if comms.separates:
        with making("making of a group for reductions", group.process_group):
            reduce_group = _c10d.twin_of_group(group.process_group)
    return _CustomGroup(group, comms, reduce_group)
