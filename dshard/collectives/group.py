"""The ranks that share a sharded tensor, and flat exchanges between them, chosen by backend."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Generic, TypeVar

import torch
from torch import Tensor

from dshard.collectives import _c10d
from dshard.collectives._c10d import ProcessGroup, ReduceOp, Work
from dshard.errors import DivergenceError

__all__ = ["Handle", "ShardGroup"]

T = TypeVar("T")
_OWN_FOLDERS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


class Handle(Generic[T]):
    """A collective in flight; `wait` ends it, once, and gives its result.

    Args:
        label: What it is for, in the words of an error message.
        works: The backend's own handles.
        finish: Called once after all of `works` ended; makes the result.
    """

    __slots__ = ("_finish", "_result", "_works", "label")

    def __init__(self, label: str, works: Sequence[Work], finish: Callable[[], T]) -> None:
        self.label = label
        self._works: Sequence[Work] | None = works
        self._finish: Callable[[], T] | None = finish
        self._result: T | None = None

    def __del__(self) -> None:
        """End what was started: an abandoned message would pair with the next one of its peer."""
        for work in self._works or ():
            if work is not None:
                with contextlib.suppress(RuntimeError):  # the group may be gone by now
                    work.wait()

    def wait(self) -> T:
        """Wait for the peers, at most for the process group's timeout.

        Raises:
            DivergenceError: A peer did not take part in time, or took part with something else.
        """
        if self._works is not None:
            try:
                for work in self._works:
                    if work is not None:
                        work.wait()
            except RuntimeError as error:
                raise DivergenceError(
                    f"{self.label}{_where()}: all ranks must take part in the same collectives in the same order, but "
                    f"waiting for the peers failed: {str(error).splitlines()[0]}. Look at what the other ranks ran: an "
                    "exception there, a branch taken on one rank alone, or a parameter read on one rank alone."
                ) from error
            self._works = None
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result  # type: ignore[return-value]


def _where() -> str:
    """The line of the caller's own program, for a message."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OWN_FOLDERS) and "<" not in file:
            return f", used in {file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class ShardGroup:
    """A process group together with the algorithms that are right for its backend.

    On gloo every exchange goes directly from rank to rank, and sums are taken in rank order: that is
    faster than gloo's own all-gather and reduce-scatter (`benchmarks/collectives.py`), and gives the same bits whatever
    the schedule. Every other backend runs its own collectives.

    Args:
        group: The process group.
        device: Device of the tensors that will be exchanged.
    """

    __slots__ = ("backend", "device_type", "is_direct", "num_ranks", "process_group", "rank")

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.process_group = group
        self.rank = _c10d.rank_in(group)
        self.num_ranks = _c10d.size_of(group)
        self.device_type = device.type
        self.backend = _c10d.backend_of(group, device)
        self.is_direct = self.backend == "gloo"

    def __deepcopy__(self, memo: dict[int, object]) -> "ShardGroup":
        return self  # a process group is a resource, not a value

    @property
    def peers(self) -> list[int]:
        """The other ranks, nearest successor first, so that no rank is everybody's first."""
        return [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks)]

    def exchange(self, rows_out: Tensor, rows_in: Tensor) -> list[Work]:
        """Start to send row `r` of `rows_out` to rank `r` and to receive row `r` of `rows_in` from it, for every peer.

        Args:
            rows_out: Contiguous, shape (num_ranks, row) to send different rows, or (row,) to send one to all.
            rows_in: Contiguous, shape (num_ranks, row). Its own row is left alone.
        """
        works = []
        for peer in self.peers:
            works.append(_c10d.receive(rows_in[peer], peer, self.process_group))
            works.append(_c10d.send(rows_out if rows_out.dim() == 1 else rows_out[peer], peer, self.process_group))
        return works

    def all_gather(self, rows: Tensor) -> list[Work]:
        """Start to fill `rows`, shape (num_ranks, row), of which this rank has filled its own row."""
        if self.num_ranks == 1:
            return []
        if self.is_direct:
            return self.exchange(rows[self.rank], rows)
        return [_c10d.all_gather_flat(rows.view(-1), rows[self.rank], self.process_group)]

    def reduce_scatter(self, rows: Tensor, *, mean: bool) -> tuple[list[Work], Callable[[], Tensor]]:
        """Start to reduce row `r` of `rows`, shape (num_ranks, row), to rank `r`.

        Returns:
            The backend's handles, and what gives this rank's row, shape (row,), in memory of its own, once they ended.
        """
        if self.num_ranks == 1:
            return [], lambda: rows[0]
        if self.is_direct:
            received = torch.empty_like(rows)
            works = self.exchange(rows, received)
            return works, lambda: _reduce_rows(rows, received, own=self.rank, mean=mean)
        out = rows.new_empty(rows.shape[1])
        wire_rows, wire_out = (torch.view_as_real(t) if t.is_complex() else t for t in (rows, out))
        native_mean = mean and self.backend == "nccl"
        op = ReduceOp.MEAN if native_mean else ReduceOp.SUM
        work = _c10d.reduce_scatter_flat(wire_out.reshape(-1), wire_rows.reshape(-1), op, self.process_group)
        divisor = self.num_ranks if mean and not native_mean else 1
        return [work], lambda: out if divisor == 1 else out.div_(divisor)

    def all_reduce(self, tensor: Tensor, op: ReduceOp) -> list[Work]:
        """Start the backend's own all-reduce, in place."""
        if self.num_ranks == 1:
            return []
        return [_c10d.all_reduce_flat(tensor, op, self.process_group)]

    def broadcast(self, tensor: Tensor, src: int) -> list[Work]:
        """Start a broadcast from rank `src` of the group, in place."""
        if self.num_ranks == 1:
            return []
        return [_c10d.broadcast_flat(tensor, src, self.process_group)]


def _reduce_rows(rows: Tensor, received: Tensor, *, own: int, mean: bool) -> Tensor:
    """Add one row of each rank, rank 0 first; 16-bit floats are added in fp32."""
    parts = [rows[r] if r == own else received[r] for r in range(rows.shape[0])]
    wide = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
    total = torch.add(parts[0].to(wide), parts[1])
    for part in parts[2:]:
        total.add_(part)
    if mean:
        total.div_(len(parts))
    return total.to(rows.dtype)
