"""The ranks that share a sharded tensor, and flat exchanges between them, chosen by backend."""

import contextlib
import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dshard.collectives import _c10d, flight
from dshard.collectives._c10d import ProcessGroup, ReduceOp, Work
from dshard.collectives.comm_memory import CommMemory
from dshard.collectives.flight import users_line
from dshard.collectives.host.arena import Arena
from dshard.collectives.memory import Buffer, BufferPool
from dshard.collectives.trace import start_wait
from dshard.collectives.watchdog import begin_wait, end_wait, failure, making, watch_end
from dshard.errors import DivergenceError

T = TypeVar("T")
_ON_EVERY_BACKEND = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Handle(Generic[T]):
    """A collective in flight; `wait` ends it, once, and gives its result.

    Args:
        label: What it is for, in the words of an error message.
        works: The backend's own handles, or an exchange between ranks.
        finish: Called once after all of them ended; makes the result.
        group: The ranks that are waited for.
        leave: Of an exchange: waits for it as what nobody may want any more, and gives whether all came.
    """

    __slots__ = ("_error", "_finish", "_group", "_leave", "_place", "_result", "_works", "label")

    def __init__(
        self,
        label: str,
        works: Sequence[Work],
        finish: Callable[[], T],
        *,
        group: "ShardGroup | None" = None,
        leave: Callable[[], bool] | None = None,
    ) -> None:
        self.label, self._group = label, group.process_group if group is not None else None
        self._works: Sequence[Work] | None = works
        self._leave = leave
        self._finish: Callable[[], T] | None = finish
        self._result: T | None = None
        self._error: DivergenceError | None = None
        self._place = flight.place_of(group.process_group) if group is not None else 0

    def __del__(self) -> None:
        """End what was started: a collective that nobody waited for would pair with a later one of its peer.

        An exchange is kept by those that follow it, until its messages have arrived.
        """
        if (
            self._works and self._leave is None and not sys.is_finalizing()
        ):  # a process that ends takes its messages along
            # The group may be gone by now, or torch.compile trace something.
            with contextlib.suppress(RuntimeError, DivergenceError), _disable_current_modes():
                self._await()

    def wait(self) -> T:
        """Wait for the peers, at most for the process group's timeout.

        Raises:
            DivergenceError: A peer did not take part in time, or took part with something else.
        """
        if self._error is not None:
            raise self._error
        if self._works is not None:
            try:
                self._await()
            except DivergenceError as error:
                self._error = error
                raise
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                if self._group is None:
                    raise
                line = users_line(sys._getframe())
                self._error = failure(f"{self.label}{f', used in {line}' if line else ''}", error, self._group)
                raise self._error from error
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result  # type: ignore[return-value]

    def discard(self) -> T | None:
        """`wait` for what nobody wants any more; None, and no error, where the peers are elsewhere by now."""
        with contextlib.suppress(DivergenceError, RuntimeError):
            if self._works is None or self._leave is None or self._leave():
                return self.wait()
        self._works = self._leave = None
        return None

    def _await(self) -> None:
        works, self._works, self._leave = self._works, None, None
        if not works:
            return
        waiting = start_wait()
        is_well = False
        begin_wait(self.label, self._group, self._place)
        try:
            for work in works:
                if work is not None:
                    work.wait()
            is_well = True
        finally:
            end_wait(self.label, self._group, is_well=is_well)
            if waiting is not None:
                waiting.end()


def _with_index(device: torch.device) -> torch.device:
    """A device by its number: the current one of its kind, if it has none."""
    if device.type in ("cpu", "meta") or device.index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


@dataclass(frozen=True, slots=True)
class Comms:
    """What takes the place of the backend's collectives; None for those.

    Args:
        all_gather: Called as torch's `AllGather` is: `(output, input, group, async_op)`, after `allocate(size, ...)`.
        reduce_scatter: As torch's `ReduceScatter`: `(output, input, group, op, async_op)`.
        separates: Whether reductions run in a process group of their own, beside gathers.
        memory: Where buffers lie, unless an object above allocates them.
        sums: Whether a mean is a sum that is divided, also where the backend has means.
    """

    all_gather: Any = None
    reduce_scatter: Any = None
    separates: bool = False
    memory: CommMemory | None = None
    sums: bool = False


class ShardGroup:
    """A process group together with the algorithms that are right for its backend.

    On gloo messages go directly from rank to rank, and sums are taken in a fixed order: that is faster than gloo's own
    all-gather and reduce-scatter (`python -m benchmarks collectives`), and gives the same bits whatever the schedule.
    Every other backend runs its own collectives.

    Args:
        group: The process group.
        device: Device of the tensors that will be exchanged.
        replicas: The ranks that hold the same shard as this one, where the shards exist more than once.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, replicas: "ShardGroup | None" = None) -> None:
        self.process_group = self.reduce_group = group  # the latter for reduce-scatters
        self.replicas = replicas
        self.name: str = group.group_name
        self.rank = group.rank()
        self.num_ranks = group.size()
        self.device_type, self.device = device.type, _with_index(device)
        self.backend = _c10d.backend_of(group, device)
        self.is_direct = self.backend == "gloo"
        self.comms = Comms()
        self.has_means = self.backend in _c10d.WITH_MEANS
        if self.num_ranks > 1:
            watch_end()  # ahead of the first message: whoever got it may have to find out what became of this rank

    @classmethod
    def alone(cls, group: "ShardGroup") -> "ShardGroup":
        """This rank by itself, with the ranks of `group` as its replicas: for what each of them holds whole."""
        self = copy.copy(group)
        self.rank, self.num_ranks, self.replicas = 0, 1, group if group.num_ranks > 1 else group.replicas
        self.name = f"{group.name}, whole"
        return self

    @classmethod
    def of_mesh(cls, group: ProcessGroup, device: torch.device, replicas: "ShardGroup | None" = None) -> "ShardGroup":
        """That of a dim of a mesh, which from now on has the user's timeout."""
        _c10d.take_timeout(group)
        return cls(group, device, replicas)

    def __deepcopy__(self, memo: dict[int, object]) -> "ShardGroup":
        return self  # a process group is a resource, not a value

    def neighbours(self, num_ranks: int) -> "ShardGroup":
        """Groups of `num_ranks` ranks each, the last of what is left: the one that this rank is in; made once.

        Communicates:
            The first time, as the making of a process group does; all ranks must call this alike.
        """
        key = "neighbours", self.name, num_ranks, self.is_direct
        return _c10d.kept_for(self.process_group, key, lambda: self._make_neighbours(num_ranks))

    def _make_neighbours(self, num_ranks: int) -> "ShardGroup":
        with making(f"making of groups of {num_ranks} ranks", self.process_group):
            neighbours = _c10d.part_of_group(self.process_group, num_ranks)
        part = ShardGroup(neighbours, torch.device(self.device_type))
        part.is_direct = self.is_direct
        return part

    def apart(self, num_ranks: int) -> tuple[ProcessGroup, ProcessGroup]:
        """The replicas of what `num_ranks` neighbours share, and those neighbours.

        Communicates:
            The making of process groups; all ranks must call this alike.
        """
        group = self.process_group
        with making(f"making of groups of {num_ranks} ranks and their replicas", group):
            return _c10d.replicas_in_group(group, num_ranks), _c10d.part_of_group(group, num_ranks)

    @property
    def sends_rows(self) -> bool:
        """Whether a rank sends all of its shards in one row: by the backend's own all-gather."""
        return self.num_ranks > 1 and not self.is_direct

    @property
    def full_name(self) -> str:
        """Tells groups apart, those of other replicas too."""
        return self.name if self.replicas is None else f"{self.name} x {self.replicas.name}"

    @property
    def world_size(self) -> int:
        """Ranks that train together: those that share the tensor, of all replicas."""
        return self.num_ranks * (self.replicas.world_size if self.replicas is not None else 1)

    @property
    def world_rank(self) -> int:
        """This rank's number among them, replica by replica."""
        return self.rank + self.num_ranks * (self.replicas.world_rank if self.replicas is not None else 0)

    @property
    def peers(self) -> list[int]:
        """The other ranks, nearest successor first, so that no rank is everybody's first."""
        return [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks)]

    def rows_for_gather(
        self, numel: int, dtype: torch.dtype, device: torch.device, pool: BufferPool, make: Callable[[Tensor], T]
    ) -> tuple[Buffer | None, T]:
        """Memory for an all-gather of rows, of `numel` elements: what is the pool's of it, and what `make` gives."""
        comm, memory, total = self.comms.all_gather, self.comms.memory, self.num_ranks * numel
        if comm is not None:
            return None, make(comm.allocate((total,), dtype=dtype, device=device))
        if memory is not None:
            return None, make(memory.allocate(total, dtype, device, self.process_group))
        buffer = pool.take(total * dtype.itemsize, device, make=make)
        return buffer, buffer.cut(make)

    def rows_for_reduce(
        self, numel: int, dtype: torch.dtype, device: torch.device, pool: BufferPool, arena: Arena | None
    ) -> tuple[Tensor, Buffer | None]:
        """Memory for the rows of a reduce-scatter, shape (num_ranks, numel), and what is the pool's of it.

        It lies in an arena if one is given.
        """
        memory = self._memory_for_reduce
        if memory is not None:
            rows = memory.allocate(self.num_ranks * numel, dtype, device, self.reduce_group)
            return rows.view(self.num_ranks, numel), None
        buffer = pool.take(self.num_ranks * numel * dtype.itemsize, device, arena)
        return buffer.memory.view(dtype).view(self.num_ranks, numel), buffer

    @property
    def _memory_for_reduce(self) -> CommMemory | None:
        """Where buffers of reduce-scatters lie; None for memory of a pool, from which a custom one copies."""
        return self.comms.memory if self.comms.reduce_scatter is None else None

    def all_gather(self, rows: Tensor, row: Tensor) -> list[Work]:
        """Start the backend's own all-gather of `row`, shape (row,), into `rows`, shape (num_ranks * row,)."""
        if self.comms.all_gather is not None:
            return [self.comms.all_gather(rows, row, self.process_group, async_op=True)]
        if self.comms.memory is not None:
            self.comms.memory.register(rows, self.process_group)
        if rows.dtype not in _ON_EVERY_BACKEND:
            rows, row = rows.view(torch.uint8), row.view(torch.uint8)
        return [_c10d.all_gather_flat(rows, row, self.process_group)]

    def out_for_reduce(self, rows: Tensor) -> Tensor:
        """Memory for what a reduce-scatter of rows, shape (num_ranks, row), gives this rank: shape (row,)."""
        memory = self._memory_for_reduce
        if memory is None:
            return rows.new_empty(rows.shape[1])
        return memory.allocate(rows.shape[1], rows.dtype, rows.device, self.reduce_group)

    def reduce_scatter(self, rows: Tensor, out: Tensor, op: ReduceOp) -> list[Work]:
        """Start the backend's own reduce-scatter of `rows`, shape (num_ranks, row), into `out`, shape (row,)."""
        comm, memory = self.comms.reduce_scatter, self._memory_for_reduce
        if comm is not None:  # rows wait elsewhere for their gradients: it may allocate the same memory each time
            own: Tensor = comm.allocate((rows.numel(),), dtype=rows.dtype, device=rows.device)
            return [comm(out, own.copy_(rows.view(-1)), self.reduce_group, op.value, async_op=True)]
        if memory is not None:
            memory.register(rows, self.reduce_group)
            memory.register(out, self.reduce_group)
        wire_rows, wire_out = (torch.view_as_real(t) if t.is_complex() else t for t in (rows, out))
        return [_c10d.reduce_scatter_flat(wire_out.reshape(-1), wire_rows.reshape(-1), op, self.reduce_group)]


def with_comms(group: ShardGroup, comms: Comms) -> ShardGroup:
    """A group whose collectives are those of `comms`; itself where they change nothing.

    Communicates:
        With `separates`, the first time for a process group, the making of another one; all ranks must do so alike.
    """
    if comms == Comms():
        return group
    custom = copy.copy(group)
    if comms.memory is not None and (
        group.num_ranks == 1 or comms.memory.why_missing(group.process_group, group.device)
    ):
        comms = replace(comms, memory=None)
    custom.comms = comms
    custom.is_direct = group.is_direct and comms.all_gather is comms.reduce_scatter is None and not comms.separates
    custom.has_means = group.has_means and not comms.sums
    if group.replicas is not None and comms.sums:
        custom.replicas = with_comms(group.replicas, Comms(sums=True))
    if comms.separates:
        with making("making of a group for reductions", group.process_group):
            custom.reduce_group = _c10d.twin_of_group(group.process_group)
    return custom
