"""Collectives on gloo: messages straight from rank to rank, behind a header, or through memory within a host.

Headers, and what ranks conclude from them, are the same either way (`divergence.py`). `DSHARD_TRANSPORT=messages` has
ranks of one host exchange messages all the same.
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
_SIZES = struct.Struct("<II")  # behind the header of a message: a number of its values, and how many bytes there are
_VALUES_AT = HEADER_BYTES + _SIZES.size
_LAST = bytes(HEADER_BYTES)  # what a rank that has lost a peer sends instead of its next header, and then nothing more
_ROWS_BYTES = 1 << 20  # for one message of each peer


class _Message:
    """A header that comes as a message, and values that may come with it.

    Args:
        peer: Who sends it.
        most_bytes: Of values that may come with it. It may be shorter than what is made ready for it, not longer.
        group: The process group.
    """

    __slots__ = ("_bytes", "_work")

    def __init__(self, peer: int, most_bytes: int, group: ProcessGroup) -> None:
        self._bytes = bytearray(_VALUES_AT + most_bytes)
        self._work = _c10d.receive(torch.frombuffer(self._bytes, dtype=torch.uint8), peer, _c10d.HEADERS, group)

    def wait(self, group: ProcessGroup) -> tuple[bytes, Offer | None]:
        """Wait for it: the header, and its values, unless they come as messages of their own."""
        self._work.wait(*_c10d.limit_of(group))
        header = bytes(self._bytes[:HEADER_BYTES])
        if header == _LAST:
            raise RuntimeError("connection closed by peer: it has lost another rank")
        channel, num_bytes = _SIZES.unpack_from(self._bytes, HEADER_BYTES)
        read = partial(torch.frombuffer, self._bytes, dtype=torch.uint8, offset=_VALUES_AT, count=num_bytes)
        return header, Offer(read, 0, num_bytes, channel, None) if num_bytes else None


class ByMessages:
    """Every header is a message, together with the values where these are few; else they are messages of their own.

    Args:
        group: The process group, which is not kept alive.
    """

    arena: Arena | None = None

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self.pool = weakref.ref(group), BufferPool()
        # Headers that `close` has sent; gloo reads their memory until they have arrived.
        self._last: list[tuple[Tensor, Work]] = []
        self.inline_bytes = min(INLINE_BYTES, _ROWS_BYTES // group.size())

    def _alive(self) -> ProcessGroup:
        group = self._group()
        assert group is not None, "a process group is gone whose collectives go on"
        return group

    def send(self, header: bytes, peer: int, values: Sent) -> tuple[Tensor, Work]:
        """Start to send a header, and few values; return the message, whose memory must stay, and its work."""
        ahead = header + _SIZES.pack(values.channel, values.num_bytes)
        message = torch.frombuffer(bytearray(ahead) + values.inline, dtype=torch.uint8)
        return message, _c10d.send(message, peer, _c10d.HEADERS, self._alive())

    def receive(self, peer: int) -> _Message:
        """Start to receive the next header of a peer."""
        return _Message(peer, self.inline_bytes, self._alive())

    def close(self) -> None:
        """Let every peer that waits for a header of this rank raise: none will come."""
        for peer in range(self._alive().size()):
            if peer != self._alive().rank():
                with contextlib.suppress(RuntimeError):  # of a peer that is gone
                    self._last.append(self.send(_LAST, peer, Sent()))

    def collect(self) -> None:
        """Nothing is kept."""

    def is_awaited(self, *, unread: bool = True) -> bool:
        """Nothing is read late."""
        return False


Transport = ByMessages | ThroughMemory


def _find(group: ShardGroup) -> Transport:
    """How the ranks of a process group reach each other; they find it out together."""
    wanted = os.environ.get(_VARIABLE, "memory")
    if wanted not in ("memory", "messages"):
        raise ArgumentError(
            f"{_VARIABLE} must be 'messages' or 'memory', but it is {wanted!r}. Set it on all ranks alike."
        )
    if wanted == "messages":
        return ByMessages(group.process_group)
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


class Channel:
    """Collectives between this rank and its peers in one process group, in the order in which they start.

    The first header of each peer belongs to this rank's first collective, and so on. So what this rank gives up stays
    here until its headers were read, ahead of those of the next one.

    Args:
        group: The ranks; their process group is not kept alive.
    """

    def __init__(self, group: ShardGroup) -> None:
        self._process_group, self.pid = weakref.ref(group.process_group), own_pid()
        self.transport = _find(group)
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

    def start(self, started: "Exchange") -> None:
        """Send a header to the peers, and start to receive theirs.

        Raises:
            RuntimeError: As gloo does where a peer is gone; or this rank has called `close`.
        """
        if self._is_closed:
            raise RuntimeError("connection closed: this rank has lost a peer, here or in another process group")
        self._waiting.append(started)
        for peer, link in started.links.items():
            link.awaited = self.transport.receive(peer)
            link.sent = self.transport.send(started.own, peer, link.values)

    def await_headers(self, wanted: "Exchange") -> None:
        """Wait for the headers of a collective, and of those before it, until one is found at which ranks differ.

        Peers that were at something else there may never come to this one.
        """
        group = self._process_group()
        assert group is not None, "a process group is gone whose collectives go on"
        while not wanted.has_headers and self.differing is None:
            first = self._waiting[0]
            for peer, link in first.links.items():
                if link.awaited is not None:  # else it came ahead of an error
                    began_s = time.perf_counter()
                    theirs, offer = link.awaited.wait(group)
                    first.note_header(link, theirs, offer)
                    waited_for_peer(group, peer, time.perf_counter() - began_s)
            self._waiting.popleft()
            first.note_all_headers()

    def close(self) -> None:
        """Let peers know that this rank, which has lost one of them, comes to no collective any more; once."""
        if self._process_group() is not None and not self._is_closed:
            self._is_closed = True
            self.transport.close()

    def finish(self) -> None:
        """Wait for what has begun: it must arrive at peers that come later, as a reduction that nobody has read."""
        for started in list(self._waiting):
            started.leave()


def channel_of(group: ShardGroup) -> Channel:
    """The channel of a process group, whose ranks find out together how they reach each other, the first time.

    Raises:
        RuntimeError: As gloo does where a peer does not come.
        StateError: This process was forked from the one that made it.

    Communicates:
        The first time, two messages to each peer.
    """
    found = _c10d.kept_for(group.process_group, "channel", lambda: Channel(group))
    if found.pid != own_pid():
        raise StateError(
            f"process group {group.process_group.group_name}: collectives must run in the process that joined it, "
            f"which is process {found.pid}, but this is process {own_pid()}, forked from that one. Give forked "
            "processes plain tensors, such as param.full_tensor(), made ahead of the fork."
        )
    return found


def transport_of(group: ShardGroup) -> Transport:
    """How the ranks of a process group reach each other; raises and communicates as `channel_of`."""
    return channel_of(group).transport


class _Link:
    """What one collective exchanges with one peer."""

    __slots__ = ("awaited", "header", "inward", "offer", "outward", "places", "sent", "values", "word", "works")

    def __init__(self) -> None:
        self.outward: list[Tensor] = []  # to be sent in messages of their own
        self.inward: list[Tensor] = []  # to be filled
        self.places: list[Tensor] = []  # where that lies in memory laid out as the peer's
        self.values = Sent()  # that go with the header
        self.sent: tuple[Tensor, Work] | None = None  # by messages: the header that was sent
        self.works: list[Work] = []  # messages behind it
        self.awaited: InRing | _Message | None = None  # the peer's header, while it is awaited
        self.header = b""  # the peer's, once it is here
        self.offer: Offer | None = None  # the peer's values, until they were read
        self.word = 0  # that the peer sent beside its header


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
        word: Sent beside the header, through memory, where there are no values.
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
        word: int = 0,
    ) -> None:
        self._group, self._kind, self._label, self._word = group, kind, label, word
        self.links = {peer: _Link() for peer in group.peers}
        self._reads_rows = False  # where they are
        self._rows: tuple[Buffer, BufferPool] | None = None  # that come as messages
        self._is_ended = self.has_headers = False
        self._channel = self._try(lambda: channel_of(group))
        self._transport = transport = self._channel.transport
        self._readers = Readers(transport.collect, transport.is_awaited)
        self._memory = memory if memory is not None and memory.arena is not None else None
        if self._memory is not None:
            self._readers.held.append(self._memory)
            self._memory.readers = self._readers
        count_start(group)
        self.own = header(kind, label, tag, num_failures(group))
        self._takes_any_writes = takes_any_writes
        known = without_writes(self.own) if takes_any_writes else self.own
        self._number = zlib.crc32(known, sizes & 0xFFFFFFFF) & 0x3FFFFFFF  # tells messages apart

    def __del__(self) -> None:
        """What both sides are ready for must arrive; the channel keeps this until that is known."""
        if self.has_headers and self._transport.arena is None and not sys.is_finalizing():
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
        link = self.links[peer]
        if into.numel():
            link.inward.append(into)
            link.places.append(into if place is None else place)
        if values.numel():
            link.outward.append(values)

    def swap_rows(self, rows: Sequence[Tensor], places: Sequence[Tensor], pool: BufferPool) -> None:
        """Send each rank its row, and nothing else; `received` gives those of the peers for this rank.

        Args:
            rows: One per rank. Through memory they are not looked at: peers read theirs in `memory`.
            places: Of each rank's row for this one: where it lies in memory that is laid out as that rank's.
            pool: Where memory comes from, if rows come as messages.
        """
        self._reads_rows = True
        if self._transport.arena is not None:
            for peer, link in self.links.items():
                link.places = [places[peer]]
            return
        like, num_peers = places[self._group.rank], len(self.links)
        buffer = pool.take(num_peers * like.nbytes, torch.device("cpu"))
        self._rows = buffer, pool
        incoming = buffer.memory.view(like.dtype).view(num_peers, like.numel())
        for peer, row in zip(self.links, incoming, strict=True):
            self.swap(row, rows[peer], peer)

    def received(self, peer: int) -> Tensor:
        """The row that a peer sent, once all were waited for; until `end_reading`, and not to be written to."""
        link = self.links[peer]
        if link.offer is None:  # it came as a message, or is empty: such do not travel
            return link.inward[0] if link.inward else torch.empty(0, dtype=torch.uint8)
        return self._at(link.places[0], link.offer.read())

    def _at(self, place: Tensor, values: Tensor) -> Tensor:
        """What lies in a peer's memory where this lies in one's own."""
        assert self._memory is not None
        start = place.data_ptr() - self._memory.memory.data_ptr()
        return values[start : start + place.nbytes].view(place.dtype).view(place.shape)

    def end_reading(self) -> None:
        """What was received is not needed any more, nor referred to: pools take back what nobody refers to."""
        for link in self.links.values():
            offer, link.offer = link.offer, None
            if offer is not None:
                offer.release()
            link.inward, link.places = [], []
        if self._rows is not None:
            (buffer, pool), self._rows = self._rows, None
            pool.give(buffer)

    def start(self) -> None:
        """Send what was given, and be ready for what the peers do."""
        self._transport.collect()
        arena, memory = self._transport.arena, self._memory
        if arena is not None:
            at = arena.offset_of(memory.memory) if memory is not None else None
            num_bytes = memory.memory.nbytes if memory is not None else 0
            put_out = Sent(self._word if at is None else at, num_bytes, self._number, self._readers.leave)
            self._readers.num_left = len(self.links)
            for link in self.links.values():
                link.values, link.outward = put_out, []
        self._try(self._send)

    def _send(self) -> None:
        """Send headers, few values with them, and more behind them as messages of their own."""
        for link in self.links.values():
            if self._are_few(link.outward):
                inline = b"".join(_as_bytes(tensor).numpy().tobytes() for tensor in link.outward)
                link.values, link.outward = Sent(0, len(inline), self._number, inline=inline), []
        self._channel.start(self)
        if self._transport.arena is not None:
            return
        group = self._group.process_group
        for peer, link in self.links.items():
            for tensor in link.inward if not self._are_few(link.inward) else ():
                link.works.append(_c10d.receive(tensor, peer, self._number, group))
            link.works += [_c10d.send(tensor, peer, self._number, group) for tensor in link.outward]

    def _are_few(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors travel in the message of their header."""
        return 0 < sum(tensor.nbytes for tensor in tensors) <= self._transport.inline_bytes

    def _try(self, start: Callable[[], T]) -> T:
        """Start something; gloo raises at once where the connection is gone."""
        try:
            return start()
        except RuntimeError as error:
            if not is_symptom(error):
                raise
            raise failure(f"{self._kind.text} '{self._label}'", error, self._group.process_group) from error

    def note_header(self, link: _Link, theirs: bytes, offer: Offer | None) -> None:
        """The header of a peer is here."""
        link.awaited, link.header = None, theirs
        if offer is not None and self._is_with(link):
            link.offer = offer
        elif offer is not None:
            offer.release()

    def note_all_headers(self) -> None:
        """The headers of all peers are here: values of those that are at something else are not waited for."""
        self.has_headers = True
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
        self._channel.await_headers(self)
        differing, self._channel.differing = self._channel.differing, None
        if differing is not None:
            differing.explain()
        if not self._is_together:
            self.explain()
        self._end()

    def explain(self) -> NoReturn:
        """Raise that a rank is at something else."""
        headers = [self.own] * self._group.num_ranks
        for peer, link in self.links.items():
            headers[peer] = link.header or self.own
        check_headers(headers, self.own, self._kind, self._label, self._group)
        raise AssertionError("ranks are apart whose headers are equal")

    def leave(self) -> bool:
        """Wait for all messages, of what nobody may want any more; return whether all of them came.

        Once ranks were found to be at different things, peers may never come to this.
        """
        if not self._channel.is_apart:
            self._channel.await_headers(self)
        if self._channel.is_apart:
            return False
        self._end()
        return True

    @property
    def _is_together(self) -> bool:
        return all(self._is_with(link) for link in self.links.values() if link.header)

    def _is_with(self, link: _Link) -> bool:
        """Whether a peer, whose header is here, means the same, and is ready for the messages."""
        theirs = link.header
        return theirs == self.own or (self._takes_any_writes and without_writes(theirs) == without_writes(self.own))

    @property
    def writes_differ(self) -> bool:
        """Whether a peer that is together with this rank has written otherwise to the shards."""
        return any(link.header not in (b"", self.own) for link in self.links.values())

    @property
    def words(self) -> dict[int, int]:
        """What each peer sent beside its header."""
        return {peer: link.word for peer, link in self.links.items()}

    def _end(self, *, takes: bool = True) -> None:
        """Wait for what is under way between this rank and those that mean the same; once.

        Args:
            takes: Whether somebody wants the values.
        """
        if self._is_ended:
            return
        self._is_ended = True
        limit = _c10d.limit_of(self._group.process_group) if self._transport.arena is None else ()
        for link in self.links.values():
            if link.sent is not None:
                link.sent[1].wait(*limit)  # each peer was ready for it ahead of its own
        errors: list[DivergenceError] = []
        for peer, link in self.links.items():
            works, link.sent, link.works, link.outward = link.works, None, [], []
            if not self._is_with(link):
                continue
            try:
                if takes and (link.offer is not None or self._are_few(link.inward)):
                    self._take_in(peer, link)
            except DivergenceError as error:  # it sends something else
                errors.append(error)
            else:
                for work in works:
                    work.wait(*limit)
        if errors:
            raise errors[0]

    def _take_in(self, peer: int, link: _Link) -> None:
        """Copy what a peer has put out or sent with its header, or see that it is what was expected."""
        offer, memory = link.offer, self._memory
        expected = sum(tensor.nbytes for tensor in link.inward) if memory is None else memory.memory.nbytes
        if offer is None or offer.channel != self._number or offer.num_bytes != expected:
            raise DivergenceError(
                f"'{self._label}': all ranks must exchange values of the same shapes and dtypes, but rank {peer} sends "
                f"{'others' if offer is None else f'{offer.num_bytes:,} bytes'}, and this one waits for {expected:,} "
                "bytes. Make every rank build the same model, and train the same parameters of it (requires_grad)."
            )
        if memory is not None and self._reads_rows:
            return  # to be read where it is
        if link.inward and memory is not None:
            values = offer.read()
            torch._foreach_copy_(link.inward, [self._at(place, values) for place in link.places])
        elif link.inward:
            inward = list(map(_as_bytes, link.inward))
            torch._foreach_copy_(inward, list(offer.read().split([tensor.numel() for tensor in inward])))
        link.word, link.offer = offer.offset, None
        offer.release()


def _as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as uint8, shape (bytes,)."""
    return tensor.detach().view(-1).view(torch.uint8)


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
