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
        header_works: Handles to wait for ahead of `works`.
        check: Called between the two; raises if the peers mean something else, and then nobody waits for `works`.
    """

    __slots__ = ("_check", "_error", "_finish", "_header_works", "_result", "_works", "label")

    def __init__(
        self,
        label: str,
        works: Sequence[Work],
        finish: Callable[[], T],
        *,
        header_works: Sequence[Work] = (),
        check: Callable[[], None] | None = None,
    ) -> None:
        self.label = label
        self._works: Sequence[Work] | None = works
        self._header_works, self._check = header_works, check
        self._finish: Callable[[], T] | None = finish
        self._result: T | None = None
        self._error: DivergenceError | None = None

    def __del__(self) -> None:
        """End what was started: an abandoned message would pair with a later one of its peer."""
        if self._works is not None:
            with contextlib.suppress(RuntimeError, DivergenceError):  # the group may be gone by now
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
            except RuntimeError as error:
                self._error = DivergenceError(
                    f"{self.label}{_where()}: all ranks must take part in the same collectives in the same order, but "
                    f"waiting for the peers failed: {str(error).splitlines()[0]}. Look at what the other ranks ran: an "
                    "exception there, a branch taken on one rank alone, or a parameter read on one rank alone."
                )
                raise self._error from error
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result  # type: ignore[return-value]

    def _await(self) -> None:
        works, self._works = self._works or (), None
        header_works, self._header_works = self._header_works, ()
        check, self._check = self._check, None
        for work in header_works:
            work.wait()
        if check is not None:
            check()
        for work in works:
            if work is not None:
                work.wait()


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

    On gloo messages go directly from rank to rank, and sums are taken in rank order: that is faster than gloo's own
    all-gather and reduce-scatter (`dshard bench collectives`), and gives the same bits whatever the schedule. Every
    other backend runs its own collectives.

    Args:
        group: The process group.
        device: Device of the tensors that will be exchanged.
    """

    __slots__ = ("backend", "device_type", "is_direct", "name", "num_ranks", "process_group", "rank")

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.process_group = group
        self.name = _c10d.name_of(group)
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

    def all_gather(self, rows: Tensor) -> list[Work]:
        """Start the backend's own all-gather into `rows`, shape (num_ranks, row), whose own row is filled."""
        return [_c10d.all_gather_flat(rows.view(-1), rows[self.rank], self.process_group)]

    def reduce_scatter(self, rows: Tensor, out: Tensor, op: ReduceOp) -> list[Work]:
        """Start the backend's own reduce-scatter of `rows`, shape (num_ranks, row), into `out`, shape (row,)."""
        wire_rows, wire_out = (torch.view_as_real(t) if t.is_complex() else t for t in (rows, out))
        return [_c10d.reduce_scatter_flat(wire_out.reshape(-1), wire_rows.reshape(-1), op, self.process_group)]

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
