"""Messages straight from rank to rank, behind a header: what gloo gets in the place of its own collectives."""

import contextlib
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dshard.collectives import _c10d
from dshard.collectives._c10d import Work
from dshard.collectives.arena import Arena
from dshard.collectives.group import ShardGroup
from dshard.collectives.header import Kind, check_headers, header, read, untagged
from dshard.collectives.lines import follow, line_of
from dshard.collectives.lost import ended, is_symptom
from dshard.collectives.memory import Buffer, BufferPool, Readers
from dshard.collectives.messages import Packed
from dshard.collectives.stalls import failure
from dshard.collectives.transport import Sent, Transport, Values
from dshard.collectives.whys import Why, told_by
from dshard.errors import DivergenceError, RankLostError

T = TypeVar("T")
_ALIGN_BYTES = 16  # of each tensor among those that lie one behind the other


@dataclass(slots=True)
class _Rows:
    """What every peer is to send.

    Args:
        numel: Elements of each row.
        dtype: Of the elements.
        pool: Where memory comes from.
        buffer: The memory, where rows are messages.
    """

    numel: int
    dtype: torch.dtype
    pool: BufferPool
    buffer: Buffer | None = None


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _cut(memory: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Memory as tensors like these, one behind the other."""
    found, start = [], 0
    for tensor in like:
        found.append(memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _aligned(tensor.nbytes)
    return found


def _same_places(memory: Tensor, like: Sequence[Tensor], own: Tensor) -> list[Tensor]:
    """The parts of a peer's memory that lie where these tensors do in one's own."""
    found = []
    for tensor in like:
        start = tensor.data_ptr() - own.data_ptr()
        found.append(memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
    return found


class Exchange:
    """All values of one collective between this rank and its peers, behind a header.

    As messages: headers have one tag, and few values travel in the same message. Messages behind them have tags of
    their own, made of what they belong to: gloo ends the process when a message of more bytes arrives than was asked
    for, so messages of different things must never meet. Ranks that are apart learn it from the headers. A message for
    which both sides are ready must arrive before its memory goes, or gloo waits for ever; one for which the peer never
    gets ready may go at any time. The headers tell the two apart.

    Through memory: the header says where this rank's values lie. Those that lie elsewhere are copied there first, so
    that nobody waits for a peer to read them.

    Args:
        group: Ranks that take part.
        kind: What is exchanged.
        label: Of which unit.
        tag: A number that must be equal on all ranks.
        sizes: What else tells the messages apart: everything that their sizes depend on.
        takes_any_tag: Whether ranks with other tags are together all the same; `tags_differ` says whether there are.
    """

    def __init__(
        self, group: ShardGroup, kind: Kind, label: str, tag: int, sizes: int, *, takes_any_tag: bool = False
    ) -> None:
        self._group, self._kind, self._label = group, kind, label
        self.offers: dict[int, Values] = {}
        self._works: list[tuple[int, Work]] = []
        self._outward: dict[int, list[Tensor]] = {peer: [] for peer in group.peers}
        self._inward: dict[int, list[Tensor]] = {peer: [] for peer in group.peers}
        self._rows: _Rows | None = None
        self._mirrored: Buffer | None = None
        self._is_wanted, self._is_ended = True, False
        self._line = line_of(group)
        self._transport: Transport = self._try(lambda: self._line.transport(group))
        self._readers = Readers(self._transport.collect, self._transport.is_awaited)
        self.number = self._line.note()
        self.own = header(kind, label, tag, self.number)
        self._takes_any_tag = takes_any_tag
        known = untagged(self.own) if takes_any_tag else self.own
        self._channel = zlib.crc32(known, sizes & 0xFFFFFFFF) & 0x3FFFFFFF
        self.sent: dict[int, Work] = {}  # by messages: the headers that are on their way
        self.values: dict[int, Sent | Packed] = {}  # what goes with the header to each peer
        self.word = 0  # told beside the header, through memory, where there are no values
        self.words: dict[int, int] = {}  # what each peer told so
        self.heard: dict[int, bytes] = {}
        self.is_heard, self.place, self.beyond = False, 0, 0

    def __del__(self) -> None:
        """What both sides are ready for must arrive; the line keeps this until that is known."""
        if (self._works or self.sent) and self.is_heard and not sys.is_finalizing():
            with contextlib.suppress(RuntimeError), _disable_current_modes():
                self._end(takes=False)
        self.end_reading()

    def send(self, tensor: Tensor, peer: int) -> None:
        """Have a contiguous tensor sent, which must not change until the end."""
        self._outward[peer].append(tensor)

    def receive(self, tensor: Tensor, peer: int) -> None:
        """Have a contiguous tensor filled with what `peer` sends, in the order of its sends."""
        self._inward[peer].append(tensor)

    def swap(self, into: Tensor, values: Tensor, peer: int) -> None:
        """`receive` from a peer and `send` to it; what is empty does not travel."""
        if into.numel():
            self.receive(into, peer)
        if values.numel():
            self.send(values, peer)

    def lies_in(self, buffer: Buffer, *, mirrored: bool = False) -> None:
        """What is sent lies in a buffer, which its pool gets back when nobody reads it any more.

        Args:
            buffer: If it is shared memory, peers read it where it is.
            mirrored: Whether all ranks have such a buffer, and each part is received to where it was sent from.
        """
        if buffer.arena is not None and buffer.arena is self._transport.arena:
            self._readers.held.append(buffer)
            buffer.readers = self._readers
            self._mirrored = buffer if mirrored else None

    def expect(self, numel: int, dtype: torch.dtype, pool: BufferPool) -> None:
        """Have every peer send a row of as many elements, and nothing else; `received` gives it."""
        self._rows = _Rows(numel, dtype, pool)
        if self._transport.arena is None and numel:
            buffer = self._rows.buffer = pool.take(len(self._group.peers) * numel * dtype.itemsize, torch.device("cpu"))
            rows = buffer.memory.view(dtype).view(-1, numel)
            for peer, row in zip(self._group.peers, rows, strict=True):
                self.receive(row, peer)

    def received(self, peer: int) -> Tensor:
        """The row that a peer sent, once all were waited for; until `end_reading`, and not to be written to."""
        assert self._rows is not None
        if self._transport.arena is None:
            return self._inward[peer][0]
        return self.offers[peer].values().view(self._rows.dtype)

    def end_reading(self) -> None:
        """What was received is not needed any more."""
        offers, self.offers = self.offers, {}
        for offer in offers.values():
            offer.release()
        if self._rows is not None and self._rows.buffer is not None:
            self._inward.clear()  # the pool takes back what nobody refers to
            buffer, self._rows.buffer = self._rows.buffer, None
            self._rows.pool.give(buffer)

    def start(self) -> None:
        """Send what was given, and be ready for what the peers do."""
        if self._transport.arena is not None:
            self._put_out(self._transport, self._transport.arena)
            self._try(lambda: self._line.start(self))
            return
        self._pack_few()
        self._try(lambda: self._line.start(self))
        group = self._group.process_group
        for peer in self._group.peers:
            for tensor in self._inward[peer] if not self._are_few(self._inward[peer]) else ():
                self._works.append((peer, self._try(partial(_c10d.receive, tensor, peer, self._channel, group))))
            for tensor in self._outward[peer]:
                self._works.append((peer, self._try(partial(_c10d.send, tensor, peer, self._channel, group))))

    def _are_few(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors travel in the message of their header."""
        return 0 < sum(_aligned(tensor.nbytes) for tensor in tensors) <= self._transport.inline_bytes

    def _pack_few(self) -> None:
        """Have what is little go to each peer in the message of the header; to those that get the same, the same."""
        packed: dict[tuple[int, ...], Packed] = {}
        for peer, tensors in self._outward.items():
            if self._are_few(tensors):
                key = tuple(map(id, tensors))
                if key not in packed:
                    packed[key] = Packed(sum(_aligned(tensor.nbytes) for tensor in tensors), self._channel)
                    torch._foreach_copy_(_cut(packed[key].values, tensors), tensors)
                self.values[peer] = packed[key]
                self._outward[peer] = []

    def _put_out(self, transport: Transport, arena: Arena) -> None:
        """Have what is sent lie in shared memory: as one run of bytes for each peer, or for those that get the same."""
        transport.collect()
        places: dict[tuple[int, ...], tuple[int, int]] = {}
        self._readers.num_left = len(self._outward)
        for peer, tensors in self._outward.items():
            key = tuple(map(id, tensors)) if self._mirrored is None else ()
            if key not in places:
                places[key] = self._place_of(tensors, transport, arena) if not self.word else (self.word, 0)
            self.values[peer] = Sent(*places[key], self._channel, self._readers.leave)
        self._outward.clear()

    def _place_of(self, tensors: list[Tensor], transport: Transport, arena: Arena) -> tuple[int, int]:
        """Where in shared memory some tensors lie, one behind the other, and how many bytes they take."""
        if self._mirrored is not None:
            tensors = [self._mirrored.memory]
        known = arena.offset_of(tensors[0]) if len(tensors) == 1 and self._readers.held else None
        if known is not None:
            return known, tensors[0].nbytes
        num_bytes = sum(_aligned(tensor.nbytes) for tensor in tensors)
        if not num_bytes:
            return 0, 0
        buffer = transport.pool.take(num_bytes, torch.device("cpu"), arena)
        torch._foreach_copy_(_cut(buffer.memory, tensors), tensors)
        self._readers.afterwards(partial(transport.pool.give, buffer))
        offset = arena.offset_of(buffer.memory)
        assert offset is not None
        return offset, num_bytes

    def _try(self, start: Callable[[], T]) -> T:
        """Start something; gloo raises at once where the connection is gone."""
        try:
            return start()
        except RuntimeError as error:
            if not is_symptom(error):
                raise
            raise failure(f"{self._kind.text} '{self._label}'", error, self._group.process_group) from error

    def note_heard(self) -> None:
        """All peers were heard: those that are elsewhere are not waited for."""
        if not self._is_together():
            with contextlib.suppress(RuntimeError):
                self._end()
            self.end_reading()
        elif not self._is_wanted:
            self.end_reading()

    def wait(self) -> None:
        """Wait for all messages.

        Raises:
            DivergenceError: A rank is elsewhere, or has left the step. Then this rank leaves it, too.
        """
        self._line.hear(self, self._group.process_group)
        self._end()
        if self._is_together():
            return
        error, why = self._explained()
        if self.number == self._line.number:
            follow(self._line, self.beyond, why)
        raise error

    def leave(self) -> bool:
        """Wait for the messages of what nobody wants any more; gives whether all of them came.

        Of a step that was left nobody waits: what follows in the same group hears of it.
        """
        if self.number != self._line.number:
            self._is_wanted = False
            return False
        self._line.hear(self, self._group.process_group)
        self._end()
        return self._is_together()

    def _is_together(self) -> bool:
        return all(map(self._is_with, self.heard))

    def _is_with(self, peer: int) -> bool:
        """Whether a peer means the same, and is ready for the messages."""
        return self.is_same(self.heard[peer])

    def is_same(self, header: bytes) -> bool:
        """Whether a header is one that goes with this rank's."""
        return header == self.own or (self._takes_any_tag and untagged(header) == untagged(self.own))

    @property
    def tags_differ(self) -> bool:
        """Whether a peer that is together with this rank has sent another tag."""
        return any(heard != self.own for heard in self.heard.values())

    def _end(self, *, takes: bool = True) -> None:
        """Wait for what is under way between this rank and those that mean the same; once.

        Args:
            takes: Whether somebody wants the values.
        """
        if self._is_ended:
            return
        self._is_ended = True
        works, self._works = self._works, []
        sent, self.sent = self.sent, {}
        ready = [peer for peer in self.heard if self._is_with(peer)]
        limit = _c10d.limit_of(self._group.process_group) if works or sent else ()
        for peer, work in sent.items():
            if peer in ready:
                work.wait(*limit)
            else:
                self._line.keep(peer, self.place, work)
        differing: dict[int, DivergenceError] = {}
        for peer in ready:
            self._line.note_read(peer, self)
            if takes and (peer in self.offers or self._are_few(self._inward[peer])):
                try:
                    self._take_in(peer)
                except DivergenceError as error:
                    differing[peer] = error
        for peer, work in works:
            if peer in ready and peer not in differing:  # which sends something else
                work.wait(*limit)
        if differing:
            raise next(iter(differing.values()))

    def _take_in(self, peer: int) -> None:
        """Copy what a peer has put out or sent with its header, or see that it is what was expected."""
        offer, tensors = self.offers.get(peer), self._inward[peer]
        stays = self._rows is not None and self._transport.arena is not None  # to be read where it is
        if self._mirrored is not None:
            expected = self._mirrored.memory.nbytes
        elif self._rows is not None:
            expected = self._rows.numel * self._rows.dtype.itemsize
        else:
            expected = sum(_aligned(tensor.nbytes) for tensor in tensors)
        if offer is None or offer.channel != self._channel or _aligned(offer.num_bytes) != _aligned(expected):
            raise DivergenceError(
                f"'{self._label}': all ranks must exchange values of the same shapes and dtypes, but rank {peer} sends "
                f"{'others' if offer is None else f'{offer.num_bytes:,} bytes'}, and this one waits for {expected:,} "
                "bytes. Make every rank build the same model."
            )
        if not stays:
            if tensors:
                values = offer.values()
                own = self._mirrored
                sources = _cut(values, tensors) if own is None else _same_places(values, tensors, own.memory)
                torch._foreach_copy_(tensors, sources)
            self.words[peer] = offer.offset
            del self.offers[peer]
            offer.release()

    def _explained(self) -> tuple[DivergenceError, Why]:
        """What to raise where ranks are apart, and what to tell those that wait for this one."""
        for peer, row in self.heard.items():
            if read(row).number > self.number:
                return self._left(peer, row)
        rows = [self.heard.get(rank, self.own) for rank in range(self._group.num_ranks)]
        try:
            check_headers(rows, self.own, self._kind, self._label)
        except DivergenceError as differing:
            return differing, Why(str(differing), differs=True)
        raise AssertionError("ranks are apart whose headers are equal")

    def _left(self, peer: int, row: bytes) -> tuple[DivergenceError, Why]:
        """What to raise, and to tell, of a peer that is in a later step."""
        heard = read(row)
        is_end = heard.kind == Kind.GAVE_UP and heard.tag <= self.number
        rank, why = told_by(peer, self._group.process_group, heard.number if is_end else -1)
        if why.differs:
            return DivergenceError(f"{why.text} (as rank {rank} found)"), why
        lost = ended(rank, why.lost)
        if lost is not None:
            return RankLostError(f"'{self._label}': {lost}", lost.ranks), Why(str(lost))
        if why.text:
            text = f"has left it ({why.text}). Leave it on this rank, too: catch this error, call zero_grad() and go on"
            text += " with the next batch, as that rank does."
        else:
            at = "" if heard.kind == Kind.GAVE_UP else f", at {heard.what}"
            text = f"is at another forward{at}, and has told of no exception. If there was one, catch this error, call"
            text += " zero_grad() and go on with the next batch; else look for a branch on rank-local data, or for a"
            text += " value that one rank alone reads (a norm, item(), full_tensor())."
        what = f"'{self._label}': all ranks must go through a step together, but rank {rank} {text}"
        error = DivergenceError(what, (rank,) if why.text else ())
        error.left_step = True
        return error, why if why.text else Why(f"rank {rank} was at another forward")


def shares_memory(group: ShardGroup) -> bool:
    """Whether the ranks of a group, of which there are several, read what others send in these ranks' memory."""
    return group.is_direct and group.num_ranks > 1 and line_of(group).transport(group).arena is not None


def shared_memory_of(group: ShardGroup) -> Arena | None:
    """Where to put what is sent to the ranks of a group, if they read it there; what they have read is taken back."""
    if not group.is_direct or group.num_ranks == 1:
        return None
    transport = line_of(group).transport(group)
    transport.collect()
    return transport.arena
