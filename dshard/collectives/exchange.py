"""Collectives on gloo: messages straight from rank to rank, behind a header, or through memory within a host.

What is said, and what follows from it, is the same either way (`divergence.py`). `DSHARD_TRANSPORT=messages` has ranks
of one host exchange messages all the same.
"""

import contextlib
import logging
import os
import struct
import sys
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import NoReturn, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dshard.collectives import _c10d
from dshard.collectives._c10d import ProcessGroup, Work
from dshard.collectives.divergence import Kind, check_headers, count_start, header, num_failures, without_writes
from dshard.collectives.group import Handle, ShardGroup
from dshard.collectives.host.arena import Arena, own_pid
from dshard.collectives.host.rings import InRing, Offer, Sent, ThroughMemory, connect
from dshard.collectives.memory import Buffer, BufferPool, Readers
from dshard.collectives.trace import waited_for_peer
from dshard.collectives.watchdog import begin_wait, end_wait, failure, is_symptom, watch_channels
from dshard.errors import ArgumentError, DivergenceError, StateError
from dshard.layout import HEADER_BYTES, INLINE_BYTES

T = TypeVar("T")
_VARIABLE = "DSHARD_TRANSPORT"
_ALIGN_BYTES = 16  # of each tensor among those that lie one behind the other
_SIZES = struct.Struct("<II")  # behind the header of a message: a number of its values, and how many bytes there are
_VALUES_AT = HEADER_BYTES + 16
_LAST = bytes(HEADER_BYTES)  # what a rank that has lost a peer sends instead of its next header, and then nothing more
_ROWS_BYTES = 1 << 20  # for one message of each peer


class _Bytes(bytearray):
    """The memory of a message."""

    def tensor(self, offset: int, num_bytes: int) -> Tensor:
        """Some of it, uint8."""
        return torch.frombuffer(self, dtype=torch.uint8, offset=offset, count=num_bytes)


class _Message:
    """A header that comes as a message, and values that may come with it.

    Args:
        peer: Who sends it.
        most_bytes: Of values that may come with it. It may be shorter than what is made ready for it, not longer.
        group: The process group.
    """

    __slots__ = ("_bytes", "_work")

    is_here = False  # gloo does not say

    def __init__(self, peer: int, most_bytes: int, group: ProcessGroup) -> None:
        self._bytes = _Bytes(_VALUES_AT + most_bytes)
        self._work = _c10d.receive(torch.frombuffer(self._bytes, dtype=torch.uint8), peer, _c10d.HEADERS, group)

    def wait(self, limit: timedelta | None = None) -> tuple[bytes, Offer | None]:
        """Wait for it: the header, and its values, unless they come as messages of their own."""
        self._work.wait(*(() if limit is None else (limit,)))
        header = bytes(self._bytes[:HEADER_BYTES])
        if header == _LAST:
            raise RuntimeError("connection closed by peer: it has lost another rank")
        channel, num_bytes = _SIZES.unpack_from(self._bytes, HEADER_BYTES)
        return header, Offer(self._bytes, _VALUES_AT, num_bytes, channel, None) if num_bytes else None


class ByMessages:
    """Every header is a message, together with the values where these are few; else they are messages of their own.

    Args:
        group: The process group, which is not kept alive.
    """

    arena: Arena | None = None

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self.pool, self.pid = weakref.ref(group), BufferPool(), own_pid()
        # Headers that `close` has sent; gloo reads their memory until they have arrived.
        self._last: list[tuple[Tensor, Work]] = []
        self.inline_bytes = min(INLINE_BYTES, _ROWS_BYTES // group.size())

    def _alive(self) -> ProcessGroup:
        group = self._group()
        assert group is not None, "a process group is gone whose collectives go on"
        return group

    def say(self, header: bytes, peer: int, values: Sent) -> tuple[Tensor, Work]:
        """Start to send a header, and few values; gives the message, whose memory must stay, and its work."""
        ahead = header + _SIZES.pack(values.channel, values.num_bytes).ljust(_VALUES_AT - HEADER_BYTES, b"\0")
        message = torch.frombuffer(bytearray(ahead) + values.inline, dtype=torch.uint8)
        return message, _c10d.send(message, peer, _c10d.HEADERS, self._alive())

    def listen(self, peer: int) -> _Message:
        """Be ready for the next header of a peer."""
        return _Message(peer, self.inline_bytes, self._alive())

    def close(self) -> None:
        """Let every peer that waits for a header of this rank raise: none will come."""
        for peer in range(self._alive().size()):
            if peer != self._alive().rank():
                with contextlib.suppress(RuntimeError):  # of a peer that is gone
                    self._last.append(self.say(_LAST, peer, Sent()))

    def collect(self) -> None:
        """Nothing is kept."""

    def is_awaited(self, *, unread: bool = True) -> bool:
        """Nothing is read late."""
        return False


Transport = ByMessages | ThroughMemory


def transport_of(group: ShardGroup) -> Transport:
    """How the ranks of a process group reach each other; they find it out together, the first time.

    Raises:
        RuntimeError: As gloo does where a peer does not come.
        StateError: This process was forked from the one that made it.

    Communicates:
        The first time, two messages to each peer.
    """
    found = _c10d.kept_for(group.process_group, "transport", lambda: _find(group))
    if found.pid != own_pid():
        raise StateError(
            f"process group {group.process_group.group_name}: collectives must run in the process that joined it, "
            f"which is process {found.pid}, but this is process {own_pid()}, forked from that one. Give forked "
            "processes plain tensors, such as param.full_tensor(), made ahead of the fork."
        )
    return found


def _find(group: ShardGroup) -> Transport:
    wanted = os.environ.get(_VARIABLE, "memory")
    if wanted not in ("memory", "messages"):
        raise ArgumentError(
            f"{_VARIABLE} must be 'messages' or 'memory', but it is {wanted!r}. Set it on all ranks alike."
        )
    found: ThroughMemory | None = None
    if wanted == "memory":
        label = f"first collective of a process group (with {_VARIABLE} as on this rank)"
        level = logging.WARNING if _VARIABLE in os.environ else logging.INFO
        begin_wait(label, group.process_group)
        is_well = False
        try:
            found = connect(group.process_group, group.device_type, level=level)
            is_well = True
        finally:
            end_wait(label, group.process_group, is_well=is_well)
    return found or ByMessages(group.process_group)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _cut(memory: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Memory as tensors like these, one behind the other."""
    found, start = [], 0
    for tensor in like:
        found.append(memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _aligned(tensor.nbytes)
    return found


class Channel:
    """Collectives between this rank and its peers in one process group, in the order in which they start.

    The first header of each peer belongs to this rank's first collective, and so on. So what this rank gives up stays
    here until its headers were read, ahead of those of the next one.

    Args:
        group: The ranks; their process group is not kept alive.
    """

    def __init__(self, group: ShardGroup) -> None:
        self._process_group = weakref.ref(group.process_group)
        self._transport: Transport | None = None  # once something was said
        self._is_closed = False  # whether this rank has lost a peer, here or elsewhere
        self._waiting: deque[Exchange] = deque()  # whose headers were not read, in order
        self.is_apart = False  # whether ranks were found to be at different things, at some time
        self.differing: Exchange | None = None  # at which they were, if no wait has raised that
        # Held weakly: a process group that is destroyed takes its channel along, with memory and handles of peers.
        channels: weakref.WeakSet[Channel] = _c10d.kept_for(
            _c10d.world_of(group.process_group), "channels", weakref.WeakSet
        )
        channels.add(self)
        watch_channels(channels)

    def start(self, started: "Exchange", transport: Transport) -> None:
        """Say a header to the peers, and be ready for theirs.

        Raises:
            RuntimeError: As gloo does where a peer is gone; or this rank was told to `close`.
        """
        if self._is_closed:
            raise RuntimeError("connection closed: this rank has lost a peer, here or in another process group")
        self._transport = transport
        self._waiting.append(started)
        for peer in started.peers:
            started.coming[peer] = transport.listen(peer)
            sent = transport.say(started.own, peer, started.values.get(peer, Sent()))
            if sent is not None:
                started.sent.append(sent)

    def hear(self, wanted: "Exchange") -> None:
        """Wait for the headers of a collective, and of those before it, until one is found at which ranks differ.

        Peers that were at something else there may never come to this one.
        """
        group = self._process_group()
        assert group is not None, "a process group is gone whose collectives go on"
        while not wanted.is_heard and self.differing is None:
            first = self._waiting[0]
            for peer in list(first.coming):
                began_s = time.perf_counter()
                coming = first.coming[peer]
                heard, offer = coming.wait(*(() if coming.is_here else _c10d.limit_of(group)))
                del first.coming[peer]
                first.note_header(peer, heard, offer)
                waited_for_peer(group, peer, time.perf_counter() - began_s)
            self._waiting.popleft()
            first.note_heard()

    def close(self) -> None:
        """Let peers know that this rank, which has lost one of them, comes to no collective any more; once."""
        if self._process_group() is not None and self._transport is not None and not self._is_closed:
            self._is_closed = True
            self._transport.close()

    def finish(self) -> None:
        """Wait for what has begun: it must arrive at peers that come later, as a reduction that nobody has read."""
        for started in list(self._waiting):
            started.leave()


def channel_of(group: ShardGroup) -> Channel:
    """The channel of a process group."""
    return _c10d.kept_for(group.process_group, "channel", lambda: Channel(group))


class Exchange:
    """All values of one collective between this rank and its peers, behind a header.

    As messages: headers have one tag, and few values travel in the same message. Messages behind them have tags of
    their own, made of what they belong to: gloo ends the process when a message of more bytes arrives than was asked
    for, so messages of different things must never meet. Ranks that are apart learn it from the headers. A message for
    which both sides are ready must arrive before its memory goes, or gloo waits for ever; one for which the peer never
    gets ready may go at any time. The headers tell the two apart.

    Through memory: all ranks have a buffer of one layout there. The header says where this rank's lies, and each takes
    what is meant for it from the same place of the peers'.

    Args:
        group: Ranks that take part.
        kind: What is exchanged.
        label: Of which unit.
        tag: A number that must be equal on all ranks.
        sizes: What else tells the messages apart: everything that their sizes depend on.
        memory: In which all that is sent lies, if peers read it there; laid out alike on all ranks.
        takes_any_writes: Whether ranks that wrote otherwise to the shards are together all the same; `writes_differ`
            says whether there are.
    """

    def __init__(
        self,
        group: ShardGroup,
        kind: Kind,
        label: str,
        tag: int,
        sizes: int,
        memory: Buffer | None = None,
        *,
        takes_any_writes: bool = False,
    ) -> None:
        self._group, self._kind, self._label = group, kind, label
        self.offers: dict[int, Offer] = {}
        self._works: list[tuple[int, Work]] = []
        peers = group.peers
        self._outward: dict[int, list[Tensor]] = {peer: [] for peer in peers}
        self._inward: dict[int, list[Tensor]] = {peer: [] for peer in peers}
        self._places: dict[int, list[Tensor]] = {}  # of what comes, in `memory`
        self._reads_rows = False  # where they are
        self._rows: tuple[Buffer, BufferPool] | None = None  # that come as messages
        self.sent: list[tuple[Tensor, Work]] = []  # by messages: the headers that were sent
        self._is_ended = self.is_heard = False
        self._channel = channel_of(group)
        self._transport: Transport = self._try(lambda: transport_of(group))
        self._readers = Readers(self._transport.collect, self._transport.is_awaited)
        self._memory = memory if memory is not None and memory.arena is not None else None
        if self._memory is not None:
            self._readers.held.append(self._memory)
            self._memory.readers = self._readers
        count_start(group)
        self.own = header(kind, label, tag, num_failures(group))
        self._takes_any_writes = takes_any_writes
        known = without_writes(self.own) if takes_any_writes else self.own
        self._number = zlib.crc32(known, sizes & 0xFFFFFFFF) & 0x3FFFFFFF  # tells messages apart
        self.values: dict[int, Sent] = {}  # what goes with the header to each peer
        self.word = 0  # sent beside the header, through memory, where there are no values
        self.words: dict[int, int] = {}  # what each peer sent so
        self.coming: dict[int, InRing | _Message] = {}  # headers that are awaited
        self._heard: dict[int, bytes] = {}

    def __del__(self) -> None:
        """What both sides are ready for must arrive; the channel keeps this until that is known."""
        if (self._works or self.sent) and self.is_heard and not sys.is_finalizing():
            with contextlib.suppress(RuntimeError), _disable_current_modes():
                self._end(takes=False)
        self.end_reading()

    def swap(self, into: Tensor, values: Tensor, peer: int, place: Tensor | None = None) -> None:
        """Send values to a peer, which must not change until the end, and have a tensor filled with those it sends.

        Args:
            into: Contiguous. What is empty does not travel.
            values: Contiguous. Through memory they are not looked at: peers read `memory`, where they must be by
                `start`.
            peer: The rank, to which and from which several are in order.
            place: Where those that come lie in memory that is laid out as the peer's; by default `into` itself.
        """
        if into.numel():
            self._inward[peer].append(into)
            self._places.setdefault(peer, []).append(into if place is None else place)
        if values.numel():
            self._outward[peer].append(values)

    def swap_rows(self, rows: Sequence[Tensor], places: Sequence[Tensor], pool: BufferPool) -> None:
        """Send each rank its row, and nothing else; `received` gives those of the peers for this rank.

        Args:
            rows: One per rank. Through memory they are not looked at: peers read theirs in `memory`.
            places: Of each rank's row for this one: where it lies in memory that is laid out as that rank's.
            pool: Where memory comes from, if rows come as messages.
        """
        self._reads_rows = True
        if self._transport.arena is not None:
            self._places = {peer: [places[peer]] for peer in self._group.peers}
            return
        like, peers = places[self._group.rank], self._group.peers
        buffer = pool.take(len(peers) * like.nbytes, torch.device("cpu"))
        self._rows = buffer, pool
        for peer, row in zip(peers, buffer.memory.view(like.dtype).view(len(peers), like.numel()), strict=True):
            self.swap(row, rows[peer], peer)

    def received(self, peer: int) -> Tensor:
        """The row that a peer sent, once all were waited for; until `end_reading`, and not to be written to."""
        if self._transport.arena is None:
            return self._inward[peer][0]
        return self._at(self._places[peer][0], self.offers[peer].values())

    def _at(self, place: Tensor, values: Tensor) -> Tensor:
        """What lies in a peer's memory where this lies in one's own."""
        assert self._memory is not None
        start = place.data_ptr() - self._memory.memory.data_ptr()
        return values[start : start + place.nbytes].view(place.dtype).view(place.shape)

    def end_reading(self) -> None:
        """What was received is not needed any more, nor referred to: pools take back what nobody refers to."""
        offers, self.offers = self.offers, {}
        for offer in offers.values():
            offer.release()
        self._inward.clear()
        self._places.clear()
        if self._rows is not None:
            (buffer, pool), self._rows = self._rows, None
            pool.give(buffer)

    def start(self) -> None:
        """Send what was given, and be ready for what the peers do."""
        self._transport.collect()
        arena = self._transport.arena
        if arena is None:
            self._pack_few()
        else:
            self._readers.num_left = len(self._outward)
            at = arena.offset_of(self._memory.memory) if self._memory is not None else None
            num_bytes = self._memory.memory.nbytes if self._memory is not None else 0
            offset = self.word if at is None else at
            self.values = dict.fromkeys(self._outward, Sent(offset, num_bytes, self._number, self._readers.leave))
            self._outward.clear()
        self._try(lambda: self._channel.start(self, self._transport))
        group = self._group.process_group
        for peer, tensors in self._outward.items():
            for tensor in self._inward[peer] if not self._are_few(self._inward[peer]) else ():
                self._works.append((peer, self._try(partial(_c10d.receive, tensor, peer, self._number, group))))
            for tensor in tensors:
                self._works.append((peer, self._try(partial(_c10d.send, tensor, peer, self._number, group))))

    def _are_few(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors travel in the message of their header."""
        return 0 < sum(_aligned(tensor.nbytes) for tensor in tensors) <= self._transport.inline_bytes

    def _pack_few(self) -> None:
        """Have few values go in the message of their header: one run of bytes for all peers that get the same."""
        packed: dict[tuple[int, ...], Sent] = {}
        for peer, tensors in self._outward.items():
            if not self._are_few(tensors):
                continue
            key = tuple(map(id, tensors))
            if key not in packed:
                inline = bytearray(sum(_aligned(tensor.nbytes) for tensor in tensors))
                torch._foreach_copy_(_cut(torch.frombuffer(inline, dtype=torch.uint8), tensors), tensors)
                packed[key] = Sent(0, len(inline), self._number, inline=inline)
            self.values[peer] = packed[key]
            self._outward[peer] = []

    def _try(self, start: Callable[[], T]) -> T:
        """Start something; gloo raises at once where the connection is gone."""
        try:
            return start()
        except RuntimeError as error:
            if not is_symptom(error):
                raise
            raise failure(f"{self._kind.text} '{self._label}'", error, self._group.process_group) from error

    @property
    def peers(self) -> list[int]:
        """Who takes part besides this rank."""
        return self._group.peers

    def note_header(self, peer: int, heard: bytes, offer: Offer | None) -> None:
        """The header of a peer is here."""
        self._heard[peer] = heard
        if offer is not None and self._is_with(peer):
            self.offers[peer] = offer
        elif offer is not None:
            offer.release()

    def note_heard(self) -> None:
        """All peers were heard: values of those that are at something else are not waited for."""
        self.is_heard = True
        if not self._is_together:
            self._channel.is_apart, self._channel.differing = True, self
            with contextlib.suppress(RuntimeError):
                self._end()
            self.end_reading()

    def wait(self) -> None:
        """Wait for all messages.

        Raises:
            DivergenceError: A rank is at something else, here or at a collective before this one.
        """
        self._channel.hear(self)
        differing, self._channel.differing = self._channel.differing, None
        if differing is not None:
            differing.explain()
        if not self._is_together:
            self.explain()
        self._end()

    def explain(self) -> NoReturn:
        """Raise that a rank is at something else."""
        headers = [self._heard.get(rank, self.own) for rank in range(self._group.num_ranks)]
        check_headers(headers, self.own, self._kind, self._label, self._group)
        raise AssertionError("ranks are apart whose headers are equal")

    def leave(self) -> bool:
        """Wait for all messages, of what nobody may want any more; gives whether all of them came.

        Once ranks were found to be at different things, peers may never come to this.
        """
        if not self._channel.is_apart:
            self._channel.hear(self)
        if self._channel.is_apart:
            return False
        self._end()
        return True

    @property
    def _is_together(self) -> bool:
        return all(map(self._is_with, self._heard))

    def _is_with(self, peer: int) -> bool:
        """Whether a peer means the same, and is ready for the messages."""
        heard = self._heard[peer]
        return heard == self.own or (self._takes_any_writes and without_writes(heard) == without_writes(self.own))

    @property
    def writes_differ(self) -> bool:
        """Whether a peer that is together with this rank has written otherwise to the shards."""
        return any(heard != self.own for heard in self._heard.values())

    def _end(self, *, takes: bool = True) -> None:
        """Wait for what is under way between this rank and those that mean the same; once.

        Args:
            takes: Whether somebody wants the values.
        """
        if self._is_ended:
            return
        self._is_ended = True
        works, self._works = self._works, []
        sent, self.sent = self.sent, []
        ready = [peer for peer in self._heard if self._is_with(peer)]
        limit = _c10d.limit_of(self._group.process_group) if works or sent else ()
        for _, work in sent:
            work.wait(*limit)  # each peer was ready for it ahead of its own
        differing: dict[int, DivergenceError] = {}
        for peer in ready:
            if takes and (peer in self.offers or self._are_few(self._inward[peer])):
                try:
                    self._take_in(peer)
                except DivergenceError as error:
                    differing[peer] = error
        for peer, work in works:
            if peer in ready and peer not in differing:  # which sends something else
                work.wait(*limit)
        self._outward.clear()
        if differing:
            raise next(iter(differing.values()))

    def _take_in(self, peer: int) -> None:
        """Copy what a peer has put out or sent with its header, or see that it is what was expected."""
        offer, tensors = self.offers.get(peer), self._inward[peer]
        expected = sum(_aligned(tensor.nbytes) for tensor in tensors)
        if self._memory is not None:
            expected = self._memory.memory.nbytes
        if offer is None or offer.channel != self._number or _aligned(offer.num_bytes) != _aligned(expected):
            raise DivergenceError(
                f"'{self._label}': all ranks must exchange values of the same shapes and dtypes, but rank {peer} sends "
                f"{'others' if offer is None else f'{offer.num_bytes:,} bytes'}, and this one waits for {expected:,} "
                "bytes. Make every rank build the same model."
            )
        if self._memory is not None and self._reads_rows:
            return  # to be read where it is
        if tensors:
            values = offer.values()
            is_there = self._memory is not None
            sources = [self._at(place, values) for place in self._places[peer]] if is_there else _cut(values, tensors)
            torch._foreach_copy_(tensors, sources)
        self.words[peer] = offer.offset
        del self.offers[peer]
        offer.release()


def gather_few(
    values: Tensor, group: ShardGroup, use: Callable[[Tensor], T], *, kind: Kind, label: str, tag: int = 0, name: str
) -> Handle[T]:
    """Have each rank get the few values of every one, by messages or through memory.

    Args:
        values: Shape (numel,).
        group: The ranks.
        use: Makes the result of those of all ranks, shape (num_ranks, numel), which may not be kept.
        kind: What is exchanged.
        label: Of what, in the header.
        tag: A number that must be equal on all ranks.
        name: Of the collective, in the words of an error message.
    """
    transport = transport_of(group)
    transport.collect()
    buffer = transport.pool.take(group.num_ranks * values.nbytes, values.device, transport.arena)
    rows = buffer.memory.view(values.dtype).view(group.num_ranks, values.numel())
    rows[group.rank] = values
    exchange = Exchange(group, kind, label, tag, values.nbytes, buffer)
    for peer in group.peers:
        exchange.swap(rows[peer], rows[group.rank], peer)
    exchange.start()

    def finish() -> T:
        nonlocal rows
        result = use(rows)
        del rows
        exchange.end_reading()
        transport.pool.give(buffer)
        return result

    return Handle(name, [exchange], finish, group=group, leave=exchange.leave)


def shares_memory(group: ShardGroup) -> bool:
    """Whether the ranks of a group, of which there are several, read what others send in these ranks' memory."""
    return group.is_direct and group.num_ranks > 1 and transport_of(group).arena is not None


def shared_memory_of(group: ShardGroup) -> Arena | None:
    """Where to put what is sent to the ranks of a group, if they read it there; what they have read is taken back."""
    if not group.is_direct or group.num_ranks == 1:
        return None
    transport = transport_of(group)
    transport.collect()
    return transport.arena
