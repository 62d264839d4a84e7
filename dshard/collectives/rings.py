"""What one rank says to another one of its host, through shared memory: headers, and where values lie."""

import gc
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from torch import Tensor

from dshard.collectives.arena import Arena, Mapped
from dshard.collectives.futex import Peer, Word
from dshard.layout import HEADER_BYTES

_NUM_RECORDS = 256  # that are not read yet
_NUM_FLAGS = 1 << 14  # of values that are not read yet: a byte each
_PAUSE_S = 0.001  # between two looks for room
_RECORD_BYTES = 128
# It begins with how many records were written; then how many read, whether it is closed, whether it is abandoned, and
# whether the reader waits for more than there was at the count behind it.
_READ, _CLOSED, _ABANDONED, _WAITS, _WAITS_AT = slice(8, 12), 16, 17, 18, slice(20, 24)
_FLAGS, _START = 64, 64 + _NUM_FLAGS
_OFFER = struct.Struct("<QQQI")  # where values lie, how many bytes, a number that tells messages apart, which flag
RING_BYTES = _START + _NUM_RECORDS * _RECORD_BYTES


class Offer:
    """Values of a peer that lie in its memory, until this rank says that it has read them.

    Args:
        memory: The peer's.
        offset: Where they lie; where there are none, a number that the peer tells beside its header.
        num_bytes: How many.
        channel: Tells messages apart.
        done: The byte in which to say so; none where there are no values.
    """

    __slots__ = ("_done", "_memory", "_pid", "channel", "num_bytes", "offset")

    def __init__(self, memory: Mapped, offset: int, num_bytes: int, channel: int, done: memoryview | None) -> None:
        self._memory, self.offset, self.num_bytes, self.channel = memory, offset, num_bytes, channel
        self._done = done
        self._pid = os.getpid()

    def values(self) -> Tensor:
        """The bytes, uint8; to be read, and not to be kept."""
        return self._memory.tensor(self.offset, self.num_bytes)

    def release(self) -> None:
        """They have been read, or nobody wants them."""
        if self._done is not None and os.getpid() == self._pid:  # else of a forked process, which has no such memory
            self._done[0], self._done = 1, None


class Ring:
    """Records from one rank to another; it lies in the memory of the one that writes.

    Args:
        memory: That of the writer.
        offset: Where it lies.
        peer: The process at the other end.
    """

    def __init__(self, memory: Mapped, offset: int, peer: Peer) -> None:
        self._memory, self.peer = memory, peer
        self._view = memory.view(offset, RING_BYTES)
        self._flags = self._view[_FLAGS:_START]  # set by the one that reads when it needs the values no more
        self._tail = Word(self._view[:4], memory.address + offset)
        self._read = self._view[_READ].cast("I")
        self._waits_at = self._view[_WAITS_AT].cast("I")
        self._count = 0  # of the records that this side has written, or awaits

    def _record(self, number: int) -> memoryview:
        start = _START + number % _NUM_RECORDS * _RECORD_BYTES
        return self._view[start : start + _RECORD_BYTES]

    def _check(self) -> None:
        """Raise where the other end is gone."""
        if self.peer.has_ended():
            raise RuntimeError(f"connection closed by peer: process {self.peer.pid} has ended")


class OutRing(Ring):
    """The end that writes.

    Args:
        arena: Of this process.
        place: The ring's memory, and where it lies.
        peer: The process that reads.
    """

    def __init__(self, arena: Arena, place: tuple[Tensor, int], peer: Peer) -> None:
        super().__init__(arena, place[1], peer)
        self._held = place[0]
        self._unread: dict[int, Callable[[], object] | None] = {}  # by flag
        self._free: list[int] = []  # flags that were used, and are not now
        self._num_used = 0  # at some time, from the first one on

    def write(
        self,
        header: bytes,
        offer: tuple[int, int, int],
        on_read: Callable[[], object] | None,
        *,
        limit_s: float | None,
    ) -> None:
        """Say something.

        Args:
            header: Of HEADER_BYTES.
            offer: Where values lie, how many bytes, and their channel; bytes may be none.
            on_read: Called some time after the peer has read them.
            limit_s: How long to wait for room.
        """
        self.collect()
        if self._is_full():
            self._make_room(limit_s)
        flag, has_values = 0, offer[1] > 0
        if has_values:
            flag = self._free.pop() if self._free else self._num_used
            self._unread[flag], self._num_used = on_read, max(self._num_used, flag + 1)
        record = self._record(self._count)
        record[:HEADER_BYTES] = header
        _OFFER.pack_into(record, HEADER_BYTES, *offer, flag)
        self._count += 1
        self._tail.publish(self._count)
        if not has_values and on_read is not None:
            on_read()

    def _is_full(self) -> bool:
        return (self._count - self._read[0]) & 0xFFFFFFFF >= _NUM_RECORDS or len(self._unread) >= _NUM_FLAGS

    def _make_room(self, limit_s: float | None) -> None:
        until = None if limit_s is None else time.monotonic() + limit_s
        gc.collect()  # what nobody waits for any more may hold up the peer, which does the same
        while self._is_full():
            self._check()
            if until is not None and time.monotonic() > until:
                raise RuntimeError(f"{_timed_out(limit_s)} for process {self.peer.pid} to read what it was sent")
            time.sleep(_PAUSE_S)
            pump_all()
            self.collect()

    def collect(self) -> None:
        """Take back what the peer has read, in whatever order it did."""
        flags = bytes(self._flags[: self._num_used])
        at = flags.find(1)
        while at >= 0:
            if self._flags[at]:  # else taken back within a call below
                self._flags[at] = 0
                on_read = self._unread.pop(at)
                self._free.append(at)
                if on_read is not None:
                    on_read()
            at = flags.find(1, at + 1)

    def is_awaited(self) -> bool:
        """Whether the peer waits for the next record here."""
        return bool(self._view[_WAITS]) and self._waits_at[0] == self._count & 0xFFFFFFFF

    def is_unread(self) -> bool:
        """Whether the peer has not read all values yet."""
        return bool(self._unread)

    def close(self) -> None:
        """Nothing more will be said; what was is kept until the peer has read it, or will not."""
        self._view[_CLOSED] = 1
        self._tail.publish(self._count)

    def is_abandoned(self) -> bool:
        """Whether the peer reads no more."""
        return bool(self._view[_ABANDONED]) or self.peer.has_ended()


class InRing(Ring):
    """The end that reads.

    Args:
        memory: That of the writer.
        offset: Where it lies.
        peer: The process that writes.
    """

    def __init__(self, memory: Mapped, offset: int, peer: Peer) -> None:
        super().__init__(memory, offset, peer)
        self._num_read = 0
        self._lock = threading.Lock()  # another thread may wait in another group
        _LISTENING.add(self)
        self._records: dict[int, tuple[bytes, Offer]] = {}  # that were read, and not asked for yet

    def listen(self) -> "Listening":
        """Be ready for the next record."""
        self._count += 1
        return Listening(self, self._count)

    def pump(self) -> None:
        """Read what is there, so that the peer can go on."""
        with self._lock:
            while not self._is_behind(self._num_read + 1):
                record = self._record(self._num_read)
                offset, num_bytes, channel, flag = _OFFER.unpack_from(record, HEADER_BYTES)
                done = self._flags[flag : flag + 1] if num_bytes else None
                offer = Offer(self._memory, offset, num_bytes, channel, done)
                self._num_read += 1
                self._records[self._num_read] = bytes(record[:HEADER_BYTES]), offer
                self._read[0] = self._num_read & 0xFFFFFFFF

    def has(self, number: int) -> bool:
        """Whether a record is there that was not taken."""
        self.pump()
        return number in self._records

    def take(self, number: int, limit_s: float | None) -> tuple[bytes, Offer]:
        """Wait for a record: a header, and where values lie.

        Raises:
            RuntimeError: The peer has ended or closed its end, or did not say anything in time.
        """
        while number not in self._records:
            seen = self._tail.value
            self.pump()
            if number in self._records:
                break
            self._check_for(number)
            if not self._wait(seen, limit_s, number):
                raise RuntimeError(f"{_timed_out(limit_s)} for process {self.peer.pid}")
        return self._records.pop(number)

    def _wait(self, seen: int, limit_s: float | None, number: int) -> bool:
        """Wait for more records than were seen, and let the writer know."""
        self._waits_at[0], self._view[_WAITS] = seen, 1
        try:
            return self._tail.wait_while(seen, limit_s, partial(self._look, number))
        finally:
            self._view[_WAITS] = 0

    def close(self) -> None:
        """Nothing more will be read."""
        self._view[_ABANDONED] = 1

    def _is_behind(self, number: int) -> bool:
        """Whether a record is not there yet."""
        return ((self._tail.value - number) & 0xFFFFFFFF) >= 1 << 31

    def _check_for(self, number: int) -> None:
        """Raise where a record is not there, and will not come."""
        is_closed, has_ended = self._view[_CLOSED], self.peer.has_ended()
        if self._is_behind(number) and (is_closed or has_ended):
            what = "has ended" if has_ended else "has closed the process group"
            raise RuntimeError(f"connection closed by peer: process {self.peer.pid} {what}")

    def _look(self, number: int) -> None:
        """`_check_for`, while waiting: peers may wait for room in other rings."""
        pump_all()
        self._check_for(number)


_LISTENING: "weakref.WeakSet[InRing]" = weakref.WeakSet()


def pump_all() -> None:
    """Read what is there in all rings: whoever waits in one must not hold up a peer that waits for room in another."""
    for ring in list(_LISTENING):
        ring.pump()


def _timed_out(limit_s: float | None) -> str:
    return f"Timed out waiting {round((limit_s or 0) * 1000)}ms"


class Listening:
    """A record that is to come.

    Args:
        ring: Where.
        number: Its place there, from 1 on.
    """

    __slots__ = ("_number", "_ring", "header", "offer")

    def __init__(self, ring: InRing, number: int) -> None:
        self._ring, self._number = ring, number
        self.header, self.offer = b"", None  # type: bytes, Offer | None

    @property
    def is_here(self) -> bool:
        """Whether `wait` need not wait."""
        return self.offer is not None or self._ring.has(self._number)

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait for it, at most as long."""
        limit_s = limit.total_seconds() if limit is not None else None
        self.header, self.offer = self._ring.take(self._number, limit_s)


def fresh_ring(arena: Arena) -> tuple[Tensor, int]:
    """Memory for a ring, and where it lies."""
    memory, offset = arena.take(RING_BYTES)
    memory[:_START].zero_()
    return memory, offset
