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
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dshard.collectives import _c10d
from dshard.collectives._c10d import ProcessGroup
from dshard.collectives.host.arena import LIBC, NO_ADDRESS, Arena, Mapped, map_others, own_arena, own_pid
from dshard.collectives.memory import PAUSES_S, BufferPool
from dshard.layout import HEADER_BYTES

log = logging.getLogger("dshard")

_HELLO, _VERDICT = _c10d.HEADERS + 1, _c10d.HEADERS + 2  # tags

_FUTEX = 202  # number of the system call on x86-64
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1
_SPINS = 40  # looks ahead of the kernel's wait: some microseconds, for a peer may need this core
_SLICE = (ctypes.c_long * 2)(0, 50_000_000)  # seconds and nanoseconds between two looks at whether the peer lives


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
_RECORD_BYTES = 128
# It begins with how many records were written; then how many read, whether it is closed, whether it is abandoned, and
# whether the reader waits for more than there was at the count behind it.
_READ, _CLOSED, _ABANDONED, _WAITS, _WAITS_AT = slice(8, 12), 16, 17, 18, slice(20, 24)
_FLAGS, _START = 64, 64 + _NUM_FLAGS
_OFFER = struct.Struct("<QQQI")  # where values lie, how many bytes, a number that tells messages apart, which flag
RING_BYTES = _START + _NUM_RECORDS * _RECORD_BYTES


class Offer:
    """Values of a peer that lie in its memory, until this rank marks them as read; or in a message.

    Args:
        read: Gives the bytes, uint8; to be read, and not to be kept.
        offset: Where they lie in shared memory; where there are none, a number that the peer sends beside its header.
        num_bytes: How many.
        channel: Tells messages apart.
        done: The byte that marks them as read; None where there are no values.
    """

    __slots__ = ("_done", "_pid", "channel", "num_bytes", "offset", "read")

    def __init__(
        self, read: Callable[[], Tensor], offset: int, num_bytes: int, channel: int, done: memoryview | None
    ) -> None:
        self.read, self.offset, self.num_bytes, self.channel = read, offset, num_bytes, channel
        self._done, self._pid = done, own_pid()

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
        self._tail = self._view[:4].cast("I")  # how many records were written: what the reader sleeps for
        self._tail_address = ctypes.c_void_p(memory.address + offset)
        self._read = self._view[_READ].cast("I")
        self._waits_at = self._view[_WAITS_AT].cast("I")
        self._count = 0  # of the records that this side has written, or read

    def _record(self, number: int) -> memoryview:
        start = _START + number % _NUM_RECORDS * _RECORD_BYTES
        return self._view[start : start + _RECORD_BYTES]


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
        self._publish()
        if not num_bytes and on_read is not None:
            on_read()

    def _publish(self) -> None:
        """Let the reader know how many records were written, and wake it."""
        self._tail[0] = self._count & 0xFFFFFFFF
        LIBC.syscall(_FUTEX, self._tail_address, _WAKE, _ALL, None, None, 0)

    def _is_full(self) -> bool:
        return (self._count - self._read[0]) & 0xFFFFFFFF >= _NUM_RECORDS or len(self._unread) >= _NUM_FLAGS

    def _make_room(self, limit_s: float | None) -> None:
        gc.collect()  # what nobody waits for any more may hold up the peer, which does the same

        def has_room() -> bool:
            if self.peer.has_ended():
                raise RuntimeError(f"connection closed by peer: process {self.peer.pid} has ended")
            self.collect()
            return not self._is_full()

        poll(has_room, limit_s, f"for process {self.peer.pid} to read what it was sent")

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
        """Send nothing more; what was sent is kept until the peer has read it, or will not."""
        self._view[_CLOSED] = 1
        self._publish()

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
            while self._tail[0] != self._count & 0xFFFFFFFF:
                record = self._record(self._count)
                offset, num_bytes, channel, flag = _OFFER.unpack_from(record, HEADER_BYTES)
                done = self._flags[flag : flag + 1] if num_bytes else None
                read = partial(self._memory.tensor, offset, num_bytes)
                self._records.append((bytes(record[:HEADER_BYTES]), Offer(read, offset, num_bytes, channel, done)))
                self._count += 1
                self._read[0] = self._count & 0xFFFFFFFF

    @property
    def _is_here(self) -> bool:
        """Whether a record that was not taken is there."""
        self.pump()
        return bool(self._records)

    def wait(self, group: ProcessGroup) -> tuple[bytes, Offer]:
        """Wait for the next record, at most as long as a process group does: a header, and where values lie.

        Raises:
            RuntimeError: The peer has ended or closed its end, or sent nothing in time.
        """
        limit_s = began_s = None
        while True:
            seen = self._tail[0]  # ahead of the look, so that nothing that comes behind it is slept over
            if self._is_here:
                return self._records.popleft()
            if any(self._tail[0] != seen for _ in range(_SPINS)):
                continue
            if began_s is None:
                began_s, limit_s = time.monotonic(), limit_s_of(group)
            why = self.why_ended()
            if why and not self._is_here:
                raise RuntimeError(why)
            if limit_s is not None and time.monotonic() - began_s > limit_s:
                raise _timed_out(limit_s, f"for process {self.peer.pid}")
            self._sleep_while(seen)

    def _sleep_while(self, seen: int) -> None:
        """Sleep until there are other records than `seen`, for a while; then read those of all rings."""
        self._waits_at[0], self._view[_WAITS] = seen, 1  # lets the writer know
        try:
            LIBC.syscall(_FUTEX, self._tail_address, _WAIT, seen, ctypes.byref(_SLICE), None, 0)
        finally:
            self._view[_WAITS] = 0
        if self._tail[0] == seen:
            pump_all()

    def close(self) -> None:
        """Nothing more will be read."""
        self._view[_ABANDONED] = 1

    def why_ended(self) -> str:
        """Why the other end sends nothing more; empty while it may."""
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


def poll(is_over: Callable[[], bool], limit_s: float | None, what: str) -> None:
    """Look until something is over, at most for so long; meanwhile peers that wait for room here get some."""
    began_s, pause_s = time.monotonic(), 0.0
    while not is_over():
        if limit_s is not None and time.monotonic() - began_s > limit_s:
            raise _timed_out(limit_s, what)
        time.sleep(pause_s)
        pump_all()
        pause_s = min(pause_s + PAUSES_S[0], PAUSES_S[1])


def limit_s_of(group: ProcessGroup) -> float | None:
    """Seconds for which a process group waits; None for no limit."""
    limit = _c10d.timeout_of(group)
    return limit.total_seconds() if limit is not None else None


def _timed_out(limit_s: float, what: str) -> RuntimeError:
    return RuntimeError(f"Timed out waiting {round(limit_s * 1000)}ms {what}")


class ThroughMemory:
    """Sends and receives headers as records in shared memory, which have the places of values.

    Args:
        group: The process group.
        arena: Of this process.
        rings: By the rank of each peer, the rings to it and from it.
    """

    inline_bytes = 0  # of values that may be sent with a header

    def __init__(self, group: ProcessGroup, arena: Arena, rings: dict[int, tuple[OutRing, InRing]]) -> None:
        self.arena, self.pool, self._rings = arena, BufferPool(), rings
        self._limit_s = limit_s_of(group)
        weakref.finalize(group, _close, own_pid(), list(rings.values())).atexit = False

    def send(self, header: bytes, peer: int, values: Sent) -> None:
        """Write a header for a peer."""
        self._rings[peer][0].write(header, values, limit_s=self._limit_s)

    def receive(self, peer: int) -> InRing:
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


_GONE: list[OutRing] = []  # whose peers may still read what was sent


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
    why = ("" if device_type == "cpu" else "its tensors are not on the CPU") or why_not()
    arena: Arena | None = None
    address, offset = NO_ADDRESS, 0
    if not why:
        try:
            own = own_arena()
            memory, offset = own.take(group.size() * RING_BYTES)  # the ring to each rank, one behind the other
            memory.view(group.size(), RING_BYTES)[:, :_START].zero_()
            arena, address = own, own.file_address
        except (OSError, ValueError, MemoryError) as error:
            why = f"shared memory cannot be made ({error})"
    received = _swap(group, [*address, offset], _HELLO)
    rings: dict[int, tuple[OutRing, InRing]] = {}
    if arena is not None:
        try:
            for peer, (*their_address, their_offset) in received.items():
                theirs = map_others(tuple(their_address)) if tuple(their_address) != address else arena
                process = Peer(their_address[0])
                to_peer = OutRing(arena, (memory, offset + peer * RING_BYTES), process)
                rings[peer] = to_peer, InRing(theirs, their_offset + group.rank() * RING_BYTES, process)
        except (OSError, ValueError) as error:
            why = f"rank {peer}'s memory cannot be read ({error})"
    verdicts = _swap(group, [int(not why)], _VERDICT)
    if arena is not None and not why and all(can for (can,) in verdicts.values()):
        return ThroughMemory(group, arena, rings)
    if why and device_type == "cpu":
        log.log(level, f"The ranks of {group.group_name} exchange messages, not through shared memory: {why}.")
    return None


def _swap(group: ProcessGroup, numbers: Sequence[int], tag: int) -> dict[int, list[int]]:
    """Send every peer a few numbers, and get theirs."""
    own = torch.tensor(numbers, device="cpu")
    received = {peer: torch.empty_like(own) for peer in range(group.size()) if peer != group.rank()}
    works = [_c10d.receive(row, peer, tag, group) for peer, row in received.items()]
    works += [_c10d.send(own, peer, tag, group) for peer in received]
    for work in works:
        work.wait(*_c10d.limit_of(group))
    return {peer: row.tolist() for peer, row in received.items()}
