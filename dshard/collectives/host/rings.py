"""How the ranks of one host reach each other through shared memory: headers, and where values lie.

Each two ranks of a group have a ring of records in each direction, in the memory of the rank that writes. A rank that
waits for a record sleeps in the kernel. All ranks of a group find out together whether they share a host, by trying:
each writes to its memory and looks for what the others have written to theirs.
"""

import ctypes
import gc
import logging
import os
import platform
import select
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dshard.collectives import _c10d
from dshard.collectives._c10d import ProcessGroup
from dshard.collectives.host.arena import LIBC, NO_ADDRESS, Arena, Mapped, map_others, own_arena, own_pid
from dshard.collectives.memory import BufferPool
from dshard.layout import HEADER_BYTES

log = logging.getLogger("dshard")

_HELLO, _VERDICT = _c10d.HEADERS + 1, _c10d.HEADERS + 2  # tags

_FUTEX = 202  # number of the system call on x86-64
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1
_SLICE_S = 0.05  # between two looks at whether the peer lives
_SPINS = 40  # looks ahead of the kernel's wait: some microseconds, for a peer may need this core


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def why_not() -> str:
    """Why this machine cannot wait so; empty where it can.

    What one process writes to memory another one sees in the same order on x86-64 alone; elsewhere it would take
    barriers, which Python has none of.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"it needs Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "this Python has no memfd_create or pidfd_open"
    return ""


class Word:
    """32 bits of shared memory that one process counts up, and others wait for.

    Args:
        view: The memory: of 4 bytes, aligned.
        address: Where it lies.
    """

    __slots__ = ("_address", "_view")

    def __init__(self, view: memoryview, address: int) -> None:
        self._view, self._address = view.cast("I"), address

    @property
    def value(self) -> int:
        """What it is now."""
        return int(self._view[0])

    def publish(self, value: int) -> None:
        """Set it, and wake all who wait."""
        self._view[0] = value & 0xFFFFFFFF
        LIBC.syscall(_FUTEX, ctypes.c_void_p(self._address), _WAKE, _ALL, None, None, 0)

    def wait_while(self, value: int, limit_s: float | None, check: Callable[[], None]) -> bool:
        """Wait until it is something else; gives whether it came to that within the limit.

        Args:
            value: What it is.
            limit_s: Seconds; None for no limit.
            check: Called from time to time; may raise.
        """
        value &= 0xFFFFFFFF
        for _ in range(_SPINS):
            if self._view[0] != value:
                return True
        until = None if limit_s is None else time.monotonic() + limit_s
        a_slice = _Time(0, int(_SLICE_S * 1e9))
        while self._view[0] == value:
            LIBC.syscall(_FUTEX, ctypes.c_void_p(self._address), _WAIT, value, ctypes.byref(a_slice), None, 0)
            if self._view[0] != value:
                break
            check()
            if until is not None and time.monotonic() > until:
                return False
        return True


class Peer:
    """A process of this host, and whether it lives.

    Args:
        pid: Its number.
    """

    __slots__ = ("_poll", "fd", "pid")

    def __init__(self, pid: int) -> None:
        self.pid, self.fd = pid, os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def has_ended(self) -> bool:
        """Whether the process is gone, or a zombie."""
        return bool(self._poll.poll(0))

    def __del__(self) -> None:
        os.close(self.fd)


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


class _Memory(Protocol):
    """What values lie in."""

    def tensor(self, offset: int, num_bytes: int) -> Tensor:
        """Some of it, uint8."""


class Offer:
    """Values of a peer that lie in its memory, until this rank says that it has read them; or in a message.

    Args:
        memory: The peer's, or the message's.
        offset: Where they lie in shared memory; where there are none, a number that the peer tells beside its header.
        num_bytes: How many.
        channel: Tells messages apart.
        done: The byte in which to say so; none where there are no values.
    """

    __slots__ = ("_done", "_memory", "_pid", "channel", "num_bytes", "offset")

    def __init__(self, memory: _Memory, offset: int, num_bytes: int, channel: int, done: memoryview | None) -> None:
        self._memory, self.offset, self.num_bytes, self.channel = memory, offset, num_bytes, channel
        self._done = done
        self._pid = own_pid()

    def values(self) -> Tensor:
        """The bytes, uint8; to be read, and not to be kept."""
        return self._memory.tensor(self.offset, self.num_bytes)

    def release(self) -> None:
        """They have been read, or nobody wants them."""
        # A forked process shares that memory, and must not speak for this one.
        if self._done is not None and own_pid() == self._pid:
            self._done[0], self._done = 1, None


class Sent(NamedTuple):
    """Values that go with a header.

    Args:
        offset: Where they lie in shared memory; where there are none, a number that is sent beside the header.
        num_bytes: How many.
        channel: A number that tells messages apart.
        on_read: Called some time after the peer has read them.
        inline: The values themselves, where they are sent in a message.
    """

    offset: int = 0
    num_bytes: int = 0
    channel: int = 0
    on_read: Callable[[], object] | None = None
    inline: bytes | bytearray = b""


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
        self._count = 0  # of the records that this side has written, or read

    def _record(self, number: int) -> memoryview:
        start = _START + number % _NUM_RECORDS * _RECORD_BYTES
        return self._view[start : start + _RECORD_BYTES]

    def check_alive(self) -> None:
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
        self._pid = own_pid()

    def write(self, header: bytes, values: Sent, *, limit_s: float | None) -> None:
        """Say something, and where its values lie, if it has some; wait for room for at most `limit_s` seconds."""
        self.collect()
        if self._is_full():
            self._make_room(limit_s)
        offset, num_bytes, channel, on_read, _ = values
        flag = 0
        if num_bytes:
            flag = self._free.pop() if self._free else self._num_used
            self._unread[flag], self._num_used = on_read, max(self._num_used, flag + 1)
        record = self._record(self._count)
        record[:HEADER_BYTES] = header
        _OFFER.pack_into(record, HEADER_BYTES, offset, num_bytes, channel, flag)
        self._count += 1
        self._tail.publish(self._count)
        if not num_bytes and on_read is not None:
            on_read()

    def _is_full(self) -> bool:
        return (self._count - self._read[0]) & 0xFFFFFFFF >= _NUM_RECORDS or len(self._unread) >= _NUM_FLAGS

    def _make_room(self, limit_s: float | None) -> None:
        until = None if limit_s is None else time.monotonic() + limit_s
        gc.collect()  # what nobody waits for any more may hold up the peer, which does the same
        while self._is_full():
            self.check_alive()
            if until is not None and time.monotonic() > until:
                raise RuntimeError(f"{_timed_out(limit_s)} for process {self.peer.pid} to read what it was sent")
            time.sleep(_PAUSE_S)
            pump_all()
            self.collect()

    def collect(self) -> None:
        """Take back what the peer has read, in whatever order it did; nothing in a forked process."""
        if own_pid() != self._pid:
            return
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
        self._lock = threading.Lock()  # another thread may wait in another group
        self._records: deque[tuple[bytes, Offer]] = deque()  # that were read, and not taken yet
        _LISTENING.add(self)

    def pump(self) -> None:
        """Read what is there, so that the peer can go on."""
        with self._lock:
            while self._has_more():
                record = self._record(self._count)
                offset, num_bytes, channel, flag = _OFFER.unpack_from(record, HEADER_BYTES)
                done = self._flags[flag : flag + 1] if num_bytes else None
                self._records.append(
                    (bytes(record[:HEADER_BYTES]), Offer(self._memory, offset, num_bytes, channel, done))
                )
                self._count += 1
                self._read[0] = self._count & 0xFFFFFFFF

    def _has_more(self) -> bool:
        return self._tail.value != self._count & 0xFFFFFFFF

    @property
    def is_here(self) -> bool:
        """Whether `wait` need not wait."""
        self.pump()
        return bool(self._records)

    def wait(self, limit: timedelta | None = None) -> tuple[bytes, Offer]:
        """Wait for the next record, at most as long: a header, and where values lie.

        Raises:
            RuntimeError: The peer has ended or closed its end, or did not say anything in time.
        """
        limit_s = limit.total_seconds() if limit is not None else None
        while not self._records:
            seen = self._tail.value
            if self.is_here:
                break
            self._check_more()
            self._waits_at[0], self._view[_WAITS] = seen, 1  # lets the writer know
            try:
                has_come = self._tail.wait_while(seen, limit_s, self._look)
            finally:
                self._view[_WAITS] = 0
            if not has_come:
                raise RuntimeError(f"{_timed_out(limit_s)} for process {self.peer.pid}")
        return self._records.popleft()

    def close(self) -> None:
        """Nothing more will be read."""
        self._view[_ABANDONED] = 1

    def _look(self) -> None:
        """`_check_more`, while waiting: peers may wait for room in other rings."""
        pump_all()
        self._check_more()

    def _check_more(self) -> None:
        """Raise where nothing more will come."""
        why = self.why_ended()
        if why and not self.is_here:
            raise RuntimeError(why)

    def why_ended(self) -> str:
        """Why the other end says no more than it has said; empty while it may."""
        is_closed, has_ended = self._view[_CLOSED], self.peer.has_ended()
        if not (is_closed or has_ended):
            return ""
        what = "has ended" if has_ended else "has closed the process group, or has lost another rank"
        return f"connection closed by peer: process {self.peer.pid} {what}"


_LISTENING: "weakref.WeakSet[InRing]" = weakref.WeakSet()


def pump_all() -> None:
    """Read what is there in all rings: whoever waits in one must not hold up a peer that waits for room in another."""
    for ring in list(_LISTENING):
        ring.pump()


def _timed_out(limit_s: float | None) -> str:
    return f"Timed out waiting {round((limit_s or 0) * 1000)}ms"


class ThroughMemory:
    """Headers are records in shared memory, and say where values lie.

    Args:
        group: The process group.
        arena: Of this process.
        rings: By the rank of each peer, the rings to it and from it.
    """

    inline_bytes = 0  # of values that may be sent with a header

    def __init__(self, group: ProcessGroup, arena: Arena, rings: dict[int, tuple[OutRing, InRing]]) -> None:
        self.arena, self.pool, self._rings = arena, BufferPool(), rings
        self.pid = own_pid()
        limit = _c10d.timeout_of(group)
        self._limit_s = limit.total_seconds() if limit is not None else None
        weakref.finalize(group, _close, own_pid(), list(rings.values())).atexit = False

    def say(self, header: bytes, peer: int, values: Sent) -> None:
        """Write a header for a peer."""
        self._rings[peer][0].write(header, values, limit_s=self._limit_s)

    def listen(self, peer: int) -> InRing:
        """Where the next header of a peer comes."""
        return self._rings[peer][1]

    def close(self) -> None:
        """Let every peer that waits for a header of this rank raise: none will come."""
        for out, _ in self._rings.values():
            out.close()

    def collect(self) -> None:
        """Take back memory that peers have read."""
        for out, _ in self._rings.values():
            out.collect()

    def is_awaited(self, *, unread: bool = True) -> bool:
        """Whether a peer waits for this rank; of those that have still to read values, or of all."""
        return any(out.is_awaited() for out, _ in self._rings.values() if not unread or out.is_unread())

    def why_ended(self, peer: int) -> str:
        """Why a peer comes to no more collectives; empty while it may."""
        return self._rings[peer][1].why_ended()


_GONE: list[OutRing] = []  # whose peers may still read what was said


def _close(pid: int, rings: Sequence[tuple[OutRing, InRing]]) -> None:
    """The process group is gone; in a forked process that means nothing."""
    if own_pid() != pid:
        return
    _GONE[:] = [ring for ring in _GONE if not ring.is_abandoned()]
    for out, back in rings:
        out.collect()  # what peers have read need not stay with it
        out.close()
        back.close()
        _GONE.append(out)


def connect(group: ProcessGroup, device_type: str, *, level: int) -> ThroughMemory | None:
    """Have the ranks of a group reach each other through memory, if each sees that of all others; else None.

    Args:
        group: The ranks; all must call this.
        device_type: Of the tensors that they exchange.
        level: Of the logger's line that says why not.

    Communicates:
        Two messages to each peer, of 48 and of 8 bytes.
    """
    peers = [peer for peer in range(group.size()) if peer != group.rank()]
    why = ("" if device_type == "cpu" else "its tensors are not on the CPU") or why_not()
    arena: Arena | None = None
    own: dict[int, tuple[Tensor, int]] = {}
    if not why:
        try:
            arena = own_arena()
            own = {peer: _fresh_ring(arena) for peer in peers}
        except (OSError, ValueError, MemoryError) as error:
            why, arena, own = f"shared memory cannot be made ({error})", None, {}
    address = NO_ADDRESS if arena is None else arena.file_address
    hellos = {peer: torch.tensor([*address, own[peer][1] if own else 0], device="cpu") for peer in peers}
    heard = _swap(group, hellos, _HELLO)
    rings: dict[int, tuple[OutRing, InRing]] = {}
    if arena is not None:
        try:
            for peer in peers:
                rings[peer] = _rings_with(arena, own[peer], heard[peer])
        except (OSError, ValueError) as error:
            why = f"rank {peer}'s memory cannot be read ({error})"
    verdicts = _swap(group, dict.fromkeys(peers, torch.tensor([int(not why)], device="cpu")), _VERDICT)
    if arena is not None and not why and all(bool(each.item()) for each in verdicts.values()):
        return ThroughMemory(group, arena, rings)
    if why and device_type == "cpu":
        log.log(level, f"The ranks of {group.group_name} exchange messages, not through shared memory: {why}.")
    return None


def _fresh_ring(arena: Arena) -> tuple[Tensor, int]:
    """Memory for a ring, and where it lies."""
    memory, offset = arena.take(RING_BYTES)
    memory[:_START].zero_()
    return memory, offset


def _rings_with(arena: Arena, own: tuple[Tensor, int], hello: Tensor) -> tuple[OutRing, InRing]:
    """The rings to a peer and from it."""
    *numbers, offset = hello.tolist()
    address = tuple(numbers)
    theirs: Mapped = arena if address == arena.file_address else map_others(address)
    peer = Peer(address[0])
    return OutRing(arena, own, peer), InRing(theirs, offset, peer)


def _swap(group: ProcessGroup, sent: dict[int, Tensor], tag: int) -> dict[int, Tensor]:
    """Send each peer a few numbers, and get theirs."""
    heard = {peer: torch.empty_like(each) for peer, each in sent.items()}
    works = [_c10d.receive(row, peer, tag, group) for peer, row in heard.items()]
    works += [_c10d.send(row, peer, tag, group) for peer, row in sent.items()]
    for work in works:
        work.wait(*_c10d.limit_of(group))
    return heard
