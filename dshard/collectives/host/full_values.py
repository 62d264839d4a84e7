"""The full values of a bucket, once for all ranks of a host.

They lie in a file of memory without a name, which every rank maps twice: shared, to write its own part, and privately,
to read. A gather then moves nothing. It says that this rank's part is in place, hears the same of the others, and hands
out what is mapped for reading. From then until `end` this rank reads; each rank tells the others how far it has read,
and nobody writes to a part that somebody reads. docs/design/0008-shared-memory.md has the rules.
"""

import ctypes
import logging
import mmap
import os
import resource
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from dshard.collectives.all_gather import Gathered, record_gather
from dshard.collectives.divergence import Kind
from dshard.collectives.exchange import Exchange, gather_few, shares_memory, transport_of
from dshard.collectives.group import Handle, ShardGroup
from dshard.collectives.host.arena import LIBC, NO_ADDRESS, Mapped, make_file, map_memory, open_file, own_pid
from dshard.collectives.host.rings import ThroughMemory, limit_s_of, poll
from dshard.collectives.memory import PATIENCE_S, Buffer, Patience
from dshard.collectives.plan import GatherPlan, Places, shard_of
from dshard.collectives.watchdog import failure

log = logging.getLogger("dshard")

_PAGE = mmap.PAGESIZE
_WORDS_AT, _CACHE_LINE = 64, 64  # where the words of the ranks begin; those of one rank begin a cache line of their own
_MAYMOVE, _FIXED = 1, 2  # MREMAP_
_MAKING, _MAPPING = 0x6D616400, 0x6D617000  # in the place of what stands for writes, ahead of the first gather
_MOST_FILES = 0.5  # of those that a process may have open


def _part_from_file(mapped: Mapped, num_bytes: int) -> None:
    """Put a private copy in the place of a mapping: who refers to it keeps the values of this moment.

    Args:
        mapped: The mapping.
        num_bytes: How many count, from the beginning.
    """
    size, copy = ctypes.c_size_t(num_bytes), map_memory(num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.memmove(copy, mapped.address, num_bytes)
    moved = LIBC.mremap(ctypes.c_void_p(copy), size, size, _MAYMOVE | _FIXED, ctypes.c_void_p(mapped.address))
    if moved != mapped.address:
        raise OSError(ctypes.get_errno(), "mremap failed")


class _Window:
    """What is read of the file: full tensors, of which somebody may keep some.

    Args:
        fd: The file.
        num_bytes: Its size.
        plan: Of the bucket.
        start: Where the values begin.
    """

    def __init__(self, fd: int, num_bytes: int, plan: GatherPlan, start: int) -> None:
        self._map, self._start = Mapped(fd, num_bytes, is_private=True), start
        self._num_bytes = start + sum(plan.regions[: len(plan.bucket.layouts)]) * plan.dtype.itemsize
        self._buffer = Buffer(self._map.tensor(start, plan.total_numel * plan.dtype.itemsize))
        self.places: Places = self._buffer.cut(plan.places)
        self._versions = self._written()

    def _written(self) -> list[int]:
        return [full._version for full in self.places.fulls]

    def close(self) -> bool:
        """Nobody is to read here any more; gives whether it is as it was, and may be read from again."""
        if self._buffer.is_held():
            _part_from_file(self._map, -(-self._num_bytes // _PAGE) * _PAGE)
            return False
        return self._versions == self._written()  # what was written to is no longer the file's


class Storage(Protocol):
    """The memory of a shard, which may lie here."""

    home: Any  # where it lies, if others may read it there
    is_exposed: bool  # whether somebody was given it who may write without being counted

    def resolve(self) -> Tensor:
        """The shard."""

    def is_held(self, *, own_refs: int, storage_refs: int) -> bool:
        """Whether somebody refers to the shard who would not follow it to another place."""

    def leave_home(self) -> None:
        """Lie in memory of this rank's own again."""

    def come_home(self, memory: Callable[[Tensor], Tensor], home: Any) -> bool:
        """Lie in memory that others may read, unless somebody holds the shard; gives whether it does."""


class HostCopy:
    """The full values of a bucket in memory that all ranks of a group map.

    Each gather has a number on each rank, its own count. Beside the header of a gather it tells the peers its number,
    and they note in their words of the file which number of it they have read to the end.

    Args:
        fd: The file, which this closes.
        num_bytes: Its size.
        plan: How the bucket is gathered.
        group: The ranks.
    """

    def __init__(self, fd: int, num_bytes: int, plan: GatherPlan, group: ShardGroup) -> None:
        self.plan, self._group, self._pid = plan, group, own_pid()
        transport = transport_of(group)
        assert isinstance(transport, ThroughMemory), "ranks that share memory reach each other through it"
        self._transport = transport
        self._fd, self._num_bytes = fd, num_bytes
        weakref.finalize(self, os.close, fd).atexit = False  # ahead of all that may fail
        self._shared = Mapped(fd, num_bytes)
        self._start = _start_of(group.num_ranks)
        self._words = self._shared.view(0, self._start).cast("I")
        self._window: _Window | None = _Window(fd, num_bytes, plan, self._start)
        layouts, item = plan.bucket.layouts, plan.dtype.itemsize
        values = self._shared.tensor(self._start, plan.total_numel * item).view(plan.dtype)
        self._parts: list[Tensor | None] = []  # of this rank, as they lie; none where there is nothing to write
        for layout, stride, offset in zip(layouts, plan.strides, plan.offsets, strict=True):
            full = torch.as_strided(values, layout.shape, stride, offset)
            writes = layout.local_numel(group.rank) > 0 and (layout.dim is not None or group.rank == 0)
            self._parts.append(shard_of(full, layout, group.rank) if writes else None)
        self._seen: list[tuple[weakref.ref[Tensor], int] | None] = [None] * len(layouts)  # what is in place
        self._late: dict[int, Tensor] = {}  # what is put in place when all have read what was there before
        self.thread = threading.get_ident()  # that gathered last
        self._number = 0  # of the last gather
        self._heard = dict.fromkeys(group.peers, 0)  # the peers' numbers of it
        self._is_read = False  # whether this rank reads
        self._patience = Patience(PATIENCE_S)
        self._unsure: list[int] = []  # places of shards that may have been written to without a trace in their versions
        self._storages: list[weakref.ref[Storage]] = []  # of the shards, by place
        self._occupants: dict[int, weakref.ref[Storage]] = {}  # by place, whose shard lies there

    def _word(self, rank: int, which: int) -> int:
        return (_WORDS_AT + rank * _bytes_of_words(self._group.num_ranks)) // 4 + which

    def is_quiet(self) -> bool:
        """Whether nobody reads, nor will before this rank begins the next gather: then its part may be written to."""
        if self._is_read or own_pid() != self._pid:  # a forked process writes to memory of its own
            return False
        own, number = 1 + self._group.rank, self._number & 0xFFFFFFFF
        return all(self._words[self._word(peer, own)] == number for peer in self._group.peers)

    def make_quiet(self) -> bool:
        """Wait for a while until nobody reads; gives whether it came to that.

        A peer may be at something else, or wait for this rank: then it is not waited for.
        """
        if self._is_read or own_pid() != self._pid:
            return False
        return self._patience.wait(self.is_quiet, lambda: self._transport.is_awaited(unread=False))

    def may_hold(self, index: int, shard: Tensor) -> bool:
        """Whether a shard can lie here for good: as it lies where it is now."""
        part, is_whole = self._parts[index], self.plan.bucket.layouts[index].dim is None
        if part is None or is_whole or part.shape != shard.shape or part.dtype != shard.dtype:
            return False
        if type(shard) is not Tensor or shard.is_inference():
            return False
        return part.stride() == shard.stride() and part.is_contiguous()

    def lies_at(self, index: int, shard: Tensor) -> bool:
        """Whether a shard lies at its place here."""
        part = self._parts[index]
        return part is not None and part.data_ptr() == shard.data_ptr()

    def bytes_beside(self) -> int:
        """Bytes of this rank's part in which none of its shards lies."""
        storages = [ref() for ref in self._storages] or [None] * len(self._parts)
        away = [i for i, each in enumerate(storages) if each is None or not self.lies_at(i, each.resolve())]
        return sum(part.nbytes for part in (self._parts[i] for i in away) if part is not None)

    def arrange(self, storages: Sequence["Storage"], *, is_cast: bool) -> None:
        """Have those shards lie where they are read that nobody holds; and find those that somebody may write to.

        Args:
            storages: Of the shards, one per tensor of the bucket.
            is_cast: Whether the bucket has another dtype than they, so that none of them can lie here.
        """
        self._storages = [weakref.ref(storage) for storage in storages]
        self._unsure = [index for index, storage in enumerate(storages) if storage.is_exposed]
        for storage in (storages[index] for index in self._unsure):
            storage.is_exposed = storage.is_held(own_refs=0, storage_refs=1)
            if storage.is_exposed and storage.home is not None:
                storage.leave_home()
        if is_cast:
            return
        are_here = [self.lies_at(index, storage.resolve()) for index, storage in enumerate(storages)]
        staying = {id(storage) for storage, is_here in zip(storages, are_here, strict=True) if is_here}
        away = [index for index, is_here in enumerate(are_here) if not is_here]
        for index in away:  # what is to be written there must be nobody else's
            occupant = self._occupants.pop(index, None)
            for each in (storages[index], occupant() if occupant is not None else None):
                if each is not None and each.home is self and id(each) not in staying:
                    each.leave_home()
        movable = [i for i in away if id(storages[i]) not in staying and self.may_hold(i, storages[i].resolve())]
        if movable and self.make_quiet():
            for index in movable:
                storage = storages[index]
                if storage.home is not self and storage.come_home(partial(self.memory_for, index), self):
                    self._occupants[index] = weakref.ref(storage)

    def gather(self, shards: Sequence[Tensor], *, label: str, tag: int = 0) -> Handle[Gathered]:
        """Gather the full tensors: as `all_gather`, by its headers alone.

        Args:
            shards: This rank's shards; those that do not lie here are copied.
            label: As in `all_gather`.
            tag: As in `all_gather`.

        Returns:
            A handle whose result is the full tensors, to be read until `end`.

        Communicates:
            A header of 64 bytes to each peer.
        """
        record_gather(self.plan, self._group, label)
        number = self.begin(shards)
        exchange = Exchange(self._group, Kind.GATHER, label, tag, self.plan.key, word=number)
        exchange.start()

        def finish() -> Gathered:
            try:
                return Gathered(self.read(exchange.words))
            except RuntimeError as error:
                raise failure(f"the gather of '{label}'", error, self._group.process_group) from error

        return Handle(f"all-gather of '{label}'", [exchange], finish, group=self._group, leave=exchange.leave)

    def memory_for(self, index: int, shard: Tensor) -> Tensor:
        """Memory for a shard that may lie here, with its values; this must be quiet.

        Who writes to it from then on must ask first.
        """
        part = self._parts[index]
        assert part is not None
        offset = self._start + int(part.storage_offset()) * part.itemsize
        memory = self._shared.tensor(offset, part.nbytes).view(part.dtype).view(part.shape)
        return memory.copy_(shard)

    def _must_copy(self, index: int, shard: Tensor) -> bool:
        part, seen = self._parts[index], self._seen[index] if index not in self._unsure else None
        if part is None or (seen is not None and seen[0]() is shard and seen[1] == shard._version):
            return False
        return not self.lies_at(index, shard)

    @property
    def is_late(self) -> bool:
        """Whether shards are to be put in place when the peers were heard."""
        return bool(self._late)

    def begin(self, shards: Sequence[Tensor]) -> int:
        """Put this rank's shards in place; gives the number to send beside the header of the gather.

        Where that `is_late` they must not change before `read`, which must come at once.

        Args:
            shards: One per tensor of the bucket.
        """
        stale = {index: shard for index, shard in enumerate(shards) if self._must_copy(index, shard)}
        self._late = stale if stale and not self.make_quiet() else {}
        self._seen = [(weakref.ref(shard), shard._version) for shard in shards]
        for index in self._late:
            self._seen[index] = None  # as long as it is not there: an exception may end the step
        self.thread = threading.get_ident()
        if not self._late:
            self._put(stale)
        self._number += 1
        self._is_read = True
        return self._number * 2 + self.is_late

    def _put(self, shards: dict[int, Tensor]) -> None:
        parts = [part for part in (self._parts[index] for index in shards) if part is not None]
        if parts:
            torch._foreach_copy_(parts, list(shards.values()))

    def read(self, numbers: dict[int, int]) -> list[Tensor]:
        """The full tensors, once all peers were heard, with the numbers that they sent beside their headers."""
        if self._late:  # whoever is at this gather has read all before it
            late, self._late = self._late, {}
            self._put(late)
            for index, shard in late.items():
                self._seen[index] = weakref.ref(shard), shard._version
            self._words[self._word(self._group.rank, 0)] = self._number & 0xFFFFFFFF
        for peer, word in numbers.items():
            self._heard[peer] = word // 2
            if word % 2:
                self._await_late(peer, word // 2 & 0xFFFFFFFF)
        if self._window is None:
            self._window = _Window(self._fd, self._num_bytes, self.plan, self._start)
        return self._window.places.fulls

    def _await_late(self, peer: int, number: int) -> None:
        """Wait until a peer has put its part in place, too."""
        at = self._word(peer, 0)

        def is_there() -> bool:
            if self._words[at] == number:
                return True
            why = self._transport.why_ended(peer)
            if why and self._words[at] != number:  # nor was it put in place ahead of that
                raise RuntimeError(why)
            return False

        poll(is_there, limit_s_of(self._group.process_group), "for its part of a gather")

    def end(self) -> None:
        """This rank reads no more; who keeps a full tensor all the same has it as it is now."""
        self._late = {}
        if own_pid() != self._pid or not self._is_read:
            return
        if self._window is not None and not self._window.close():
            self._window = None
        self._is_read = False
        for peer, number in self._heard.items():
            self._words[self._word(self._group.rank, 1 + peer)] = number & 0xFFFFFFFF


def _bytes_of_words(num_ranks: int) -> int:
    """Of the words of one rank: which of its gathers has come late last, and how far it has read those of each rank."""
    return -(-4 * (1 + num_ranks) // _CACHE_LINE) * _CACHE_LINE


def _start_of(num_ranks: int) -> int:
    """Where values begin, behind a number that tells files apart, and the words of all ranks."""
    return -(-(_WORDS_AT + num_ranks * _bytes_of_words(num_ranks)) // _PAGE) * _PAGE


class HostValues:
    """The full values of a unit's buckets, each once for all ranks of this host: what units ask for."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, HostCopy | None]] = {}  # by id of a bucket, which is kept
        self._made: list[HostCopy] = []  # of these

    def of(
        self,
        bucket: object,
        plan: GatherPlan,
        group: ShardGroup,
        storages: Sequence[Storage],
        *,
        label: str,
        is_cast: bool,
        may_share: bool,
    ) -> HostCopy | None:
        """The values of a bucket, ready to be gathered; None where each rank gathers a copy of its own.

        Args:
            bucket: What they are of.
            plan: How it is gathered.
            group: The ranks.
            storages: Of this rank's shards; those that can are moved there.
            label: Of the unit.
            is_cast: Whether they are gathered in another dtype.
            may_share: Whether there is one full value at a time, that travels as it is.

        Communicates:
            The first time for a bucket, the making of that memory; all ranks must call this alike.
        """
        if id(bucket) not in self._known:
            if not may_share or not shares_memory(group):
                return None
            self._known[id(bucket)] = bucket, make_host_copy(plan, group, label=label)
            self._note_made()
        made = self._known[id(bucket)][1]
        if made is not None:
            made.arrange(storages, is_cast=is_cast)
        return made

    def keep(self, buckets: Sequence[object]) -> None:
        """Forget all buckets but these; shards that lie in the memory of others keep it."""
        current = set(map(id, buckets))
        self._known = {key: known for key, known in self._known.items() if key in current}
        self._note_made()

    def _note_made(self) -> None:
        self._made = [made for _, made in self._known.values() if made is not None]

    def __bool__(self) -> bool:
        """Whether there are any; alike on all ranks."""
        return bool(self._made)

    def are_all(self, buckets: Sequence[object]) -> bool:
        """Whether each of these buckets is once per host."""
        return bool(buckets) and all(self._known.get(id(each), (None, None))[1] is not None for each in buckets)

    def end(self) -> None:
        """This rank reads no more."""
        for made in self._made:
            made.end()

    @property
    def are_late(self) -> bool:
        """Whether shards of this rank are still to be put in place, in a gather that is under way."""
        return any(made.is_late for made in self._made)

    @property
    def bytes_beside(self) -> int:
        """Bytes of this rank's parts in which no shard lies."""
        return sum(made.bytes_beside() for made in self._made)


def make_host_copy(plan: GatherPlan, group: ShardGroup, *, label: str) -> HostCopy | None:
    """Memory for the full values of a bucket that all ranks of a group map; None, on all of them, where one cannot.

    Raises:
        DivergenceError: As a gather.

    Communicates:
        Two messages between each two ranks, of 40 and of 8 bytes.
    """
    start = _start_of(group.num_ranks)
    num_bytes = -(-(start + plan.total_numel * plan.dtype.itemsize) // _PAGE) * _PAGE
    fd, why, address = -1, "", NO_ADDRESS
    made: HostCopy | None = None
    if group.rank == 0:
        try:
            fd, address = make_file("dshard full", num_bytes)
            _few(fd)
        except OSError as error:
            why, address = f"shared memory cannot be made ({error})", NO_ADDRESS

    def of_all_ranks(numbers: Sequence[int], tag: int) -> list[list[int]]:
        own, name = torch.tensor(numbers, device="cpu"), f"all-gather of '{label}'"
        return gather_few(own, group, Tensor.tolist, kind=Kind.GATHER, label=label, tag=tag, name=name).wait()

    address = tuple(of_all_ranks(address, _MAKING)[0])
    try:
        if group.rank:
            fd = _few(open_file(address, num_bytes))
        if not why:
            made = HostCopy(fd, num_bytes, plan, group)
    except (OSError, ValueError) as error:
        why = f"the memory of rank 0 cannot be mapped ({error})"
    all_can = all(can for (can,) in of_all_ranks([int(not why)], _MAPPING))
    if why:
        log.warning(f"{label}: gathered by copies from other ranks' memory all the same: {why}.")
    return made if all_can else None


def _few(fd: int) -> int:
    """A file that was opened, if the program has enough others left to open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and fd > _MOST_FILES * limit:
        os.close(fd)
        raise OSError(f"half of the {limit} files that this process may open are")
    return fd
