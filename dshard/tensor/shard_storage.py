"""The memory of a shard, which may still be in flight."""

import os
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dshard.collectives import is_storage_held
from dshard.interpreter import is_referred_to
from dshard.layout import ShardLayout
from dshard.tensor.stepping import is_stepping
from dshard.tensor.user_collectives import watch_shard

_MOVES = threading.RLock()  # of shards from one memory to another, while a thread may come for one


def _renew_lock() -> None:
    """In a forked process the thread that held it is gone."""
    global _MOVES  # noqa: PLW0603
    _MOVES = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class Home(Protocol):
    """Memory in which shards lie that others may read.

    Args:
        thread: That which gathered last, and may be writing.
    """

    thread: int

    def is_quiet(self) -> bool:
        """Whether nobody reads now, nor before this rank lets them."""

    def make_quiet(self) -> bool:
        """Wait for a while until nobody reads; gives whether it came to that."""


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class ShardStorage:
    """Holds one shard; shared by a ShardedTensor and its detached aliases.

    Args:
        tensor: The shard, or None while it is in flight.
        layout: How the full tensor is cut. A temporary that is written with this rank's own data becomes whole.
        _pending: Called with this storage at the first use; must leave a tensor in it.
        is_shared: Whether it belongs to a parameter, a gradient or an optimizer's state, to which all ranks write the
            same values; else to a temporary, which a rank may fill with data of its own.
    """

    tensor: Tensor | None
    layout: ShardLayout
    _pending: "Callable[[ShardStorage], None] | None" = None
    is_shared: bool = field(default=False, kw_only=True)
    standin: Tensor | None = field(default=None, init=False)  # the shard as an optimizer sees it, while it is held here
    is_retired: bool = field(default=False, init=False)  # the shard is elsewhere now
    is_reduced: bool = field(default=False, init=False)  # it is a gradient that all ranks have added up, on its way
    tag: int = field(default=0, init=False)
    num_writes: int = field(default=0, init=False)
    home: Home | None = field(default=None, init=False)  # where the shard lies, if others may read it there
    is_exposed: bool = field(default=False, init=False)  # somebody was given it who may write without being counted
    before_write: Callable[[], None] | None = field(default=None, init=False)  # waits for a gather that reads the shard
    _awaited: "tuple[ShardStorage, ...]" = field(default=(), init=False)

    @property
    def is_pending(self) -> bool:
        """Whether the shard still awaits a collective or an addition."""
        return self._pending is not None

    def note_write(self) -> None:
        """The shard was written to, by all ranks: gathered copies are stale, and the next gather compares the count.

        A step of an optimizer counts once for all of its writes, when it ends: how many there are depends on its path.
        """
        if not is_stepping():
            self.num_writes += 1
        torch.autograd.graph.increment_version(self.resolve())

    def note_collective(self) -> None:
        """A collective of the program's own has written to the shard: gathered copies are stale.

        How it was written before does not count any more: the ranks may be equal again that were not.
        """
        self.tag = self.num_writes = 0
        torch.autograd.graph.increment_version(self.resolve())

    @property
    def signature(self) -> tuple[int, int]:
        """What ranks compare at a gather: what was written, and how often."""
        return self.tag, self.num_writes

    def sign(self, *facts: object) -> None:
        """Take part in the tag what the shard was written with, for ranks to compare at the next gather.

        Args:
            facts: Numbers and indices, and tags of other storages; nothing is signed where all are empty or zero.
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

    def writable(self) -> Tensor:
        """The shard, to be written to now: elsewhere from here on, if somebody may read it where it lies."""
        shard = self.resolve()
        self._await_reader()
        if self.home is not None and not self.home.is_quiet() and not self.home.make_quiet():
            self.leave_home()
        return shard

    def exposed(self) -> Tensor:
        """The shard, for somebody who may write to it at any time, and will not ask.

        In another thread than that which may be writing, and moves it: a tensor of its own there, to be read.
        """
        shard = self.resolve()
        self._await_reader()
        watch_shard(self)
        with _MOVES:
            if self.home is not None and self.home.thread != threading.get_ident():
                return shard.detach()
            self.is_exposed = True
            if self.home is not None:
                self.leave_home()
        return shard

    def _await_reader(self) -> None:
        """Come behind what reads the shard on a device, where that is told."""
        wait, self.before_write = self.before_write, None
        if wait is not None:
            wait()

    def readable(self) -> Tensor:
        """The shard, to be read at once, in any thread."""
        shard = self.resolve()
        with _MOVES:  # who has it by now keeps it from being moved
            if self.home is None or self.home.thread == threading.get_ident():
                return shard
            return shard.detach()

    def come_home(self, memory: Callable[[Tensor], Tensor], home: Home) -> bool:
        """Lie in memory that others may read, unless somebody holds the shard; gives whether it does.

        Args:
            memory: Puts values there, and gives it.
            home: Of that memory.
        """
        with _MOVES:
            if self.is_exposed or self.is_held(own_refs=0, storage_refs=1):
                return False
            self.resolve().data, self.home, self.standin = memory(self.resolve()), home, None
        return True

    def leave_home(self) -> None:
        """Lie in memory of this rank's own again."""
        shard = self.resolve()
        with _MOVES, torch.inference_mode(mode=False):  # whose tensors have no version
            shard.data = shard.detach().clone()
            self.home = self.standin = None

    def is_held(self, *, own_refs: int, storage_refs: int) -> bool:
        """Whether somebody else refers to the shard or its memory, who would not follow it to another place.

        Args:
            own_refs: References to the tensor that the caller knows of, besides the storage's.
            storage_refs: References to its memory that the caller knows of.
        """
        tensor, self.standin = self.resolve(), None
        return (
            is_referred_to(tensor, own_refs + 1)  # by the storage
            or is_storage_held(tensor, num_tensors=storage_refs)
        )

    def deliver(self, tensor: Tensor) -> None:
        """Put the shard that was awaited, or another one, in place."""
        self.tensor, self.standin, self.home = tensor, None, None
        if not self._awaited:
            self._pending = None

    def retire(self, why: Exception) -> None:
        """Let go of the shard, which is elsewhere now; every later use raises."""

        def refuse(storage: "ShardStorage") -> None:
            raise why

        self.tensor = self.standin = self.home = None
        self._pending, self._awaited = refuse, ()
        self.is_retired = True

    def awaits(self, other: "ShardStorage") -> bool:
        """Whether the shard of `other` is this one, or will be added to it."""
        return other is self or any(other is storage for storage in self._awaited)

    def add_later(self, other: "ShardStorage") -> None:
        """Add a shard that is in flight, once one of the two is used."""
        before = self._pending

        def add(storage: ShardStorage) -> None:
            added = other.resolve()  # ahead of all else: if it raises, nothing has happened
            if before is not None:
                before(storage)
            assert storage.tensor is not None
            storage.writable().add_(added)
            torch.autograd.graph.increment_version(storage.tensor)

        self._pending = add
        self._awaited = (*self._awaited, other)
