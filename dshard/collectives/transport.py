"""How the ranks of a process group reach one another: by gloo's messages, or through memory where all are on one host.

What is said, and what follows from it, is the same (`lines.py`, `exchange.py`). All ranks of a group find out together,
ahead of their first collective, whether they share a host, by trying: each writes to its memory and looks for what the
others have written to theirs. `DSHARD_TRANSPORT=messages` has them exchange messages all the same.
"""

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from dshard.collectives import _c10d
from dshard.collectives._c10d import ProcessGroup
from dshard.collectives.arena import Arena, Mapped, map_others, own_arena
from dshard.collectives.futex import Peer, why_not
from dshard.collectives.group import ShardGroup
from dshard.collectives.memory import BufferPool
from dshard.collectives.messages import ByMessages
from dshard.collectives.rings import InRing, OutRing, fresh_ring
from dshard.collectives.stalls import begin_wait, end_wait
from dshard.errors import ArgumentError

log = logging.getLogger("dshard")

_HELLO, _VERDICT = _c10d.HEADERS + 1, _c10d.HEADERS + 2  # tags
_VARIABLE = "DSHARD_TRANSPORT"


class Values(Protocol):
    """What came with a header: values of a peer, or where they lie."""

    channel: int  # tells messages apart
    num_bytes: int
    offset: int  # where there are none, a number that the peer tells beside its header

    def values(self) -> Tensor:
        """The bytes, uint8; to be read, and not to be kept."""

    def release(self) -> None:
        """They have been read, or nobody wants them."""


class Coming(Protocol):
    """A header that is to come."""

    @property
    def header(self) -> bytes:
        """Once it is there."""

    @property
    def offer(self) -> Values | None:
        """Once it is there, the values that belong to it, unless they come as messages of their own."""

    @property
    def is_here(self) -> bool:
        """Whether it is known that `wait` need not wait."""

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait for it."""


class Transport(Protocol):
    """The ways between this rank and its peers in one process group."""

    pool: BufferPool  # of memory in the arena

    @property
    def arena(self) -> Arena | None:
        """Where values are put to be sent, if that is how."""

    @property
    def inline_bytes(self) -> int:
        """How many bytes of values may be sent with a header."""

    def say(self, header: bytes, peer: int, values: Any = None) -> Any:
        """Start to send a header; gives what to wait for, if there is anything.

        Args:
            header: Of HEADER_BYTES.
            peer: Who gets it.
            values: What goes with it: `Sent`, or `Packed`, by what kind of transport it is.
        """

    def listen(self, peer: int) -> Coming:
        """Be ready for the next header of a peer."""

    def collect(self) -> None:
        """Take back memory that peers have read."""

    def is_awaited(self, *, unread: bool = True) -> bool:
        """Whether a peer waits for this rank, and so does nothing before that goes on.

        Args:
            unread: Look at those alone that have still to read values.
        """

    @property
    def processes(self) -> dict[int, Peer]:
        """The processes of the peers on this host, by rank."""


class Sent:
    """Values in shared memory.

    Args:
        offset: Where they lie.
        num_bytes: How many.
        channel: A number that tells messages apart.
        on_read: Called some time after the peer has read them.
    """

    __slots__ = ("channel", "num_bytes", "offset", "on_read")

    def __init__(self, offset: int, num_bytes: int, channel: int, on_read: Callable[[], object] | None) -> None:
        self.offset, self.num_bytes, self.channel, self.on_read = offset, num_bytes, channel, on_read


class ThroughMemory:
    """Headers are records in shared memory, and tell where values lie.

    Args:
        group: The process group.
        arena: Of this process.
        rings: By the rank of each peer, the rings to it and from it.
    """

    inline_bytes = 0

    def __init__(self, group: ProcessGroup, arena: Arena, rings: dict[int, tuple[OutRing, InRing]]) -> None:
        self.arena, self.pool, self._rings = arena, BufferPool(), rings
        self._limit = _c10d.timeout_of(group)
        weakref.finalize(group, _close, os.getpid(), list(rings.values())).atexit = False

    def say(self, header: bytes, peer: int, values: Sent | None = None) -> Any:
        """Write a header for a peer."""
        offer = (values.offset, values.num_bytes, values.channel) if values is not None else (0, 0, 0)
        limit_s = self._limit.total_seconds() if self._limit is not None else None
        on_read = values.on_read if values is not None else None
        self._rings[peer][0].write(header, offer, on_read, limit_s=limit_s)

    def listen(self, peer: int) -> Coming:
        """Be ready for the next header of a peer."""
        return self._rings[peer][1].listen()

    def collect(self) -> None:
        """Take back memory that peers have read."""
        for out, _ in self._rings.values():
            out.collect()

    def is_awaited(self, *, unread: bool = True) -> bool:
        """Whether a peer waits for this rank; of those that have still to read values, or of all."""
        return any(out.is_awaited() for out, _ in self._rings.values() if not unread or out.is_unread())

    @property
    def processes(self) -> dict[int, Peer]:
        """The processes of the peers, by rank."""
        return {rank: out.peer for rank, (out, _) in self._rings.items()}


_CLOSED: list[OutRing] = []  # whose peers may still read what was said


def _close(pid: int, rings: Sequence[tuple[OutRing, InRing]]) -> None:
    """The process group is gone; in a forked process that means nothing."""
    if os.getpid() != pid:
        return
    _CLOSED[:] = [ring for ring in _CLOSED if not ring.is_abandoned()]
    for out, back in rings:
        out.close()
        back.close()
        _CLOSED.append(out)


def transport_of(group: ShardGroup) -> Transport:
    """The way between the ranks of a process group; they find it together, the first time.

    Raises:
        RuntimeError: As gloo does where a peer does not come.

    Communicates:
        The first time, two messages of 80 bytes to each peer.
    """
    return _c10d.kept_for(group.process_group, "transport", lambda: _find(group))


def _find(group: ShardGroup) -> Transport:
    wanted = os.environ.get(_VARIABLE, "memory")
    if wanted == "messages":
        return ByMessages(group.process_group)
    if wanted != "memory":
        raise ArgumentError(
            f"{_VARIABLE} must be 'messages' or 'memory', but it is {wanted!r}. Set it on all ranks alike."
        )
    label = f"first collective of a process group (with {_VARIABLE} as on this rank)"
    begin_wait(label, group.process_group)
    is_well = False
    try:
        found = _agreed(group.process_group, group.device_type)
        is_well = True
        return found
    finally:
        end_wait(label, group.process_group, is_well=is_well)


def _agreed(group: ProcessGroup, device_type: str) -> Transport:
    """Memory if all ranks have seen that of all others, else messages."""
    rank, num_ranks = _c10d.rank_in(group), _c10d.size_of(group)
    peers = [peer for peer in range(num_ranks) if peer != rank]
    why = "" if device_type == "cpu" else "its tensors are not on the CPU"
    why = why or why_not()
    arena: Arena | None = None
    own: dict[int, tuple[Tensor, int]] = {}
    try:
        arena = own_arena() if not why else None
        own = {peer: fresh_ring(arena) for peer in peers} if arena is not None else {}
    except (OSError, ValueError, MemoryError) as error:
        why, arena = f"shared memory cannot be made ({error})", None
    hellos = {peer: _hello(arena, own[peer][1] if own else 0) for peer in peers}
    heard = _swap(group, hellos, _HELLO)
    rings: dict[int, tuple[OutRing, InRing]] = {}
    if arena is not None:
        try:
            for peer in peers:
                rings[peer] = _rings(arena, own[peer], heard[peer])
        except (OSError, ValueError) as error:
            why = f"rank {peer}'s memory cannot be read ({error})"
    verdict = torch.tensor([int(not why)], device="cpu")
    verdicts = _swap(group, dict.fromkeys(peers, verdict), _VERDICT)
    if not why and all(bool(each.item()) for each in verdicts.values()):
        assert arena is not None
        return ThroughMemory(group, arena, rings)
    if why and device_type == "cpu":
        level = logging.WARNING if _VARIABLE in os.environ else logging.INFO
        log.log(level, f"The ranks of {_c10d.name_of(group)} exchange messages, not through shared memory: {why}.")
    return ByMessages(group)


def _hello(arena: Arena | None, ring: int) -> Tensor:
    """Where a peer finds this rank's memory, and the ring to it."""
    if arena is None:
        return torch.zeros(10, dtype=torch.int64, device="cpu")
    nonce = torch.frombuffer(bytearray(arena.nonce), dtype=torch.int64)
    facts = torch.tensor([1, arena.pid, arena.fd, arena.num_bytes, ring, 0, 0, 0], device="cpu")
    return torch.cat([facts, nonce])


def _rings(arena: Arena, own: tuple[Tensor, int], hello: Tensor) -> tuple[OutRing, InRing]:
    """The rings to a peer and from it."""
    can, pid, fd, num_bytes, offset, *_ = hello.tolist()
    if not can:
        raise ValueError("it shares none")
    nonce = bytes(hello[8:].view(torch.uint8).tolist())
    theirs: Mapped = arena if nonce == arena.nonce else map_others(pid, fd, nonce, num_bytes)
    peer = Peer(pid)
    return OutRing(arena, own, peer), InRing(theirs, offset, peer)


def _swap(group: ProcessGroup, sent: dict[int, Tensor], tag: int) -> dict[int, Tensor]:
    """Send each peer a few numbers, and get theirs."""
    heard = {peer: torch.empty_like(each) for peer, each in sent.items()}
    works = [_c10d.receive(row, peer, tag, group) for peer, row in heard.items()]
    works += [_c10d.send(row, peer, tag, group) for peer, row in sent.items()]
    for work in works:
        work.wait(*_c10d.limit_of(group))
    return heard
