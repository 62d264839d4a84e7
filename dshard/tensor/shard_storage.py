"""The memory of a shard, which may still be in flight."""

import sys
import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from dshard.collectives import is_storage_held
from dshard.layout import ShardLayout

__all__ = ["BURST", "OPERANDS", "ShardStorage"]


# The operation whose operands are being gathered, if one is. Nobody writes to a shard meanwhile.
BURST: list[object | None] = [None]
OPERANDS: list[tuple[object, ...]] = [()]  # its arguments


class ShardStorage:
    """Holds one shard; shared by a ShardedTensor and its detached aliases.

    Args:
        tensor: The shard, or None while it is in flight.
        layout: How the full tensor is cut. A temporary that is written with this rank's own data becomes whole.
        pending: Called with the cell at the first use; must leave a tensor in it.
        is_shared: Whether it belongs to a parameter, a gradient or an optimizer's state, to which all ranks write the
            same values; else to a temporary, which a rank may fill with data of its own.
    """

    __slots__ = (
        "__weakref__",
        "_awaited",
        "_pending",
        "is_reduced",
        "is_retired",
        "is_shared",
        "layout",
        "num_writes",
        "standin",
        "tag",
        "tensor",
    )

    def __init__(
        self,
        tensor: Tensor | None,
        layout: ShardLayout,
        pending: Callable[["ShardStorage"], None] | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        self.tensor = tensor
        self.standin: Tensor | None = None  # the shard as an optimizer sees it, while the cell holds that shard
        self.layout = layout
        self.is_shared = is_shared
        self.is_retired = False  # the shard is elsewhere now
        self.is_reduced = False  # it is a gradient, or a sum of some, that all ranks have added up, on its way
        self.tag = 0
        self.num_writes = 0
        self._pending = pending
        self._awaited: tuple[ShardStorage, ...] = ()

    @property
    def is_pending(self) -> bool:
        """Whether the shard still awaits a collective or an addition."""
        return self._pending is not None

    def note_write(self) -> None:
        """The shard was written to, by all ranks: gathered copies are stale, and the next gather compares the count."""
        self.num_writes += 1
        torch.autograd.graph.increment_version(self.resolve())

    @property
    def signature(self) -> tuple[int, int]:
        """What ranks compare at a gather: what was written, and how often."""
        return self.tag, self.num_writes

    def sign(self, *facts: object) -> None:
        """Take part in the tag what the shard was written with, for ranks to compare at the next gather.

        Args:
            facts: Numbers and indices, and tags of other cells; nothing is signed where all are empty or zero.
        """
        if any(facts):
            self.tag = zlib.crc32(repr((self.tag, facts)).encode())

    @property
    def version(self) -> int:
        """Counts the writes to the shard, ours and those to `to_local()` by others; some of ours twice."""
        return int(self.resolve()._version) + self.num_writes

    def resolve(self) -> Tensor:
        """The shard, after waiting for what it awaits."""
        if self._pending is not None:
            pending, awaited = self._pending, self._awaited
            self._pending, self._awaited = None, ()
            try:
                pending(self)
            except BaseException:
                self._pending, self._awaited = pending, awaited
                raise
        assert self.tensor is not None, "a pending shard was not delivered"
        return self.tensor

    def is_held(self, *, own_refs: int, storage_refs: int) -> bool:
        """Whether somebody else refers to the shard or its memory, who would not follow it to another place.

        Args:
            own_refs: References to the tensor that the caller knows of, besides the cell's.
            storage_refs: References to its memory that the caller knows of.
        """
        tensor, self.standin = self.resolve(), None
        return (
            sys.getrefcount(tensor) > own_refs + 3  # the cell, this name, the call
            or tensor._use_count() > 1  # type: ignore[attr-defined]
            or is_storage_held(tensor, num_tensors=storage_refs)
        )

    def deliver(self, tensor: Tensor) -> None:
        """Put the shard that was awaited, or another one, in place."""
        self.tensor, self.standin = tensor, None
        if not self._awaited:
            self._pending = None

    def retire(self, why: Exception) -> None:
        """Let go of the shard, which is elsewhere now; every later use raises."""

        def refuse(cell: "ShardStorage") -> None:
            raise why

        self.tensor = self.standin = None
        self._pending, self._awaited = refuse, ()
        self.is_retired = True

    def awaits(self, other: "ShardStorage") -> bool:
        """Whether the shard of `other` is this one, or will be added to it."""
        return other is self or any(other is cell for cell in self._awaited)

    def add_later(self, other: "ShardStorage") -> None:
        """Add a shard that is in flight, once one of the two is used."""
        before = self._pending

        def add(cell: ShardStorage) -> None:
            added = other.resolve()  # ahead of all else: if it raises, nothing has happened
            if before is not None:
                before(cell)
            assert cell.tensor is not None
            cell.tensor.add_(added)
            torch.autograd.graph.increment_version(cell.tensor)

        self._pending = add
        self._awaited = (*self._awaited, other)
