"""What ranks say ahead of their collectives, in the order in which they say it: how those that left a step are found.

Each header has the number of the step that its rank is in: which of those since ranks last left one, and how often they
have. A rank that meets a higher number than its own learns that a peer has left the step, and leaves it, too; a rank
that meets a lower one reads on, for its peer is on the way. docs/design/0006-steps-that-are-left.md has the rules, and
what follows from them.
"""

import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from dshard.collectives import _c10d, flight
from dshard.collectives._c10d import ProcessGroup, Work
from dshard.collectives.exits import finish_at_end
from dshard.collectives.group import ShardGroup
from dshard.collectives.header import Heard, Kind, header, read
from dshard.collectives.lost import is_symptom
from dshard.collectives.trace import times_peers, waited_for_peer
from dshard.collectives.transport import Coming, Transport, transport_of
from dshard.collectives.whys import Why, tell_why

if TYPE_CHECKING:
    from dshard.collectives.exchange import Exchange

_EPOCH = 1 << 32  # numbers of steps, from one that was left to the next
_MAX_LEFT = 64  # steps that a peer has left, each known by itself, in a group that this rank does not use


class _World:
    """Where this rank is, among the ranks of one default process group."""

    def __init__(self) -> None:
        self.epoch = 0  # how often a step was left for a new beginning
        self.num_left = 0  # how often one was left at all
        self.is_fresh = True  # whether nothing was begun since
        self.lines: dict[str, Line] = {}  # of each process group, by its name

    def finish(self) -> None:
        """Have what this rank has begun arrive at peers that come to it later, as a reduction that nobody has read."""
        for line in list(self.lines.values()):
            line.finish()


@dataclass(slots=True)
class _Posted:
    """A header that is awaited, or was not taken yet.

    Args:
        coming: What to wait for.
        header: What it says, once that was done.
    """

    coming: Coming
    header: bytes = b""

    @property
    def is_here(self) -> bool:
        """Whether it was waited for."""
        return bool(self.header)

    def wait(self, group: ProcessGroup | None = None) -> None:
        """Wait for it, at most as long as a group waits."""
        if not self.header:
            limit = _c10d.limit_of(group) if group is not None and not self.coming.is_here else ()
            self.coming.wait(*limit)
            self.header = self.coming.header

    def has_come(self) -> bool:
        """Whether it is here; then it was waited for."""
        if self.coming.is_here:
            self.wait()
        return self.is_here


def _merge(posted: deque[_Posted]) -> None:
    """Make one of the last two headers, if both say that their rank has left a step: from the first to the last."""
    before, last = posted[-2], posted[-1]
    said, then = read(before.header), read(last.header)
    if said.kind == then.kind == Kind.GAVE_UP:
        last.header = header(Kind.GAVE_UP, "", said.tag, then.number)
        del posted[-2]


class TimesLeft(NamedTuple):
    """How often a rank has left a step: for a new beginning, and at all, for one that peers had begun as well."""

    for_new: int
    at_all: int


class Line:
    """Headers between this rank and its peers in one process group.

    Args:
        group: The process group, which is not kept alive.
        world: Of all groups of the program.
    """

    def __init__(self, group: ShardGroup, world: _World) -> None:
        self.process_group = weakref.ref(group.process_group)
        self.world = world
        self.number = world.epoch * _EPOCH  # of the step
        self.companions = frozenset([group.name])  # groups of the model whose step it is
        self.is_torn = False  # whether that step was left within a forward or backward, for one that others run
        self._is_fresh = True  # whether the step has not begun
        self._is_open = False  # whether it has, and its forward or backward has not ended
        self._is_due = False  # whether the next collective is the first of another step
        self._num_started = 0  # collectives so far
        self._waiting: deque[Exchange] = deque()  # not heard of yet, in order
        self._transport: Transport | None = None  # until the first collective
        self._posted: dict[int, deque[_Posted]] = {peer: deque() for peer in group.peers}
        self._unread: list[tuple[int, int, Work]] = []  # headers on their way, of steps that were left

    def announce(self, companions: frozenset[str]) -> None:
        """A model is about to run: the next collective is the first of its step."""
        self._is_due, self.companions = True, companions

    def begin(self) -> None:
        """A step begins."""
        if not self._is_fresh:
            self.number += 1
        self._is_due, self._is_fresh, self._is_open, self.is_torn = False, False, True, False
        self.world.is_fresh = False

    def withdraw(self) -> bool:
        """The model runs no more; gives whether there was no collective."""
        was_due, self._is_due = self._is_due, False
        return was_due

    def end(self) -> None:
        """The forward or backward that the step is of has ended."""
        self._is_open = False

    def note(self) -> int:
        """A collective starts; gives the number of the step."""
        if self._is_due:
            for name in self.companions:
                self.world.lines[name].begin()
        self._is_fresh = self.world.is_fresh = False
        self._num_started += 1
        return self.number

    def transport(self, group: ShardGroup) -> Transport:
        """The way to the peers; the first time they must all come to find it."""
        if self._transport is None:
            self._transport = transport_of(group)
        return self._transport

    def start(self, said: "Exchange") -> None:
        """Say a header to the peers, and be ready for theirs."""
        assert self._transport is not None
        said.place = self._num_started
        self._waiting.append(said)
        for peer, posted in self._posted.items():
            if len(posted) < len(self._waiting):
                self._post(posted, peer)
            work = self._transport.say(said.own, peer, said.values.get(peer))
            if work is not None:
                said.sent[peer] = work

    def hear(self, wanted: "Exchange", group: ProcessGroup) -> None:
        """Wait for what the peers say of a collective, and of those before it."""
        while not wanted.is_heard:
            said = self._waiting[0]
            for peer in self._posted:
                if peer not in said.heard:
                    said.heard[peer] = (
                        self._timed(peer, said, group) if times_peers() else self._next(peer, said, group)
                    )
            self._waiting.popleft()
            said.is_heard = True
            said.note_heard()

    def finish(self) -> None:
        """Wait for what has begun, whether anybody here wants it or not."""
        for said in list(self._waiting):
            said.leave()

    def note_read(self, peer: int, said: "Exchange") -> None:
        """A peer has read a header, and so those that were sent before it."""
        if self._unread:
            self._unread = [entry for entry in self._unread if entry[0] != peer or entry[1] >= said.place]

    def keep(self, peer: int, place: int, work: Work) -> None:
        """A header is on its way to a peer that will read it when it comes to this group again."""
        self._unread.append((peer, place, work))

    def _post(self, posted: "deque[_Posted]", peer: int) -> None:
        assert self._transport is not None
        posted.append(_Posted(self._transport.listen(peer)))

    def _timed(self, peer: int, said: "Exchange", group: ProcessGroup) -> bytes:
        """`_next`, whose time open traces are told."""
        began_s = time.perf_counter()
        heard = self._next(peer, said, group)
        waited_for_peer(dist.get_global_rank(group, peer), time.perf_counter() - began_s)
        return heard

    def _next(self, peer: int, said: "Exchange", group: ProcessGroup) -> bytes:
        """What a peer says of a collective, or of a later step."""
        posted = self._posted[peer]
        while True:
            if not posted:
                self._post(posted, peer)
            head = posted[0]
            head.wait(group)
            header, offer = head.header, head.coming.offer
            if said.is_same(header):
                posted.popleft()
                if offer is not None:
                    said.offers[peer] = offer
                return header
            heard = read(header)
            if heard.number > said.number:  # it stays, for a later collective of this rank
                said.beyond = max(said.beyond, _goal(heard, said.number))
                return header
            posted.popleft()
            if offer is not None:
                offer.release()
            if heard.number == said.number and heard.kind != Kind.GAVE_UP:
                return header

    def leave(self, number: int) -> None:
        """Leave the step for another one, and say so."""
        group, left = self.process_group(), self.number
        self.number = number
        self._is_fresh, self._is_open, self._is_due = True, False, False
        if self._transport is not None and group is not None:
            said = header(Kind.GAVE_UP, "", left, number)
            try:
                self._read_on()
                for peer in self._posted:
                    work = self._transport.say(said, peer)
                    if work is not None:
                        self.keep(peer, self._num_started, work)
            except RuntimeError as error:
                if not is_symptom(error):
                    raise
                return  # the connections are closed, as after a timeout: the peers know

    def _read_on(self) -> None:
        """Take in which steps peers have left, as far as that is here: an idle group hears of it nowhere else."""
        if self._transport is None or self._transport.arena is None:
            return  # what has come as a message nobody knows who does not wait
        for peer, posted in self._posted.items():
            while not posted or posted[-1].has_come():
                if len(posted) > _MAX_LEFT:
                    _merge(posted)
                self._post(posted, peer)

    def go_on_to_next(self) -> None:
        """Leave the step for the next one, in which a peer was met."""
        self.is_torn = self._is_open
        self.leave(self.number + 1)


def line_of(group: ShardGroup) -> Line:
    """The line of a process group."""
    return _c10d.kept_for(group.process_group, ("line", group.name), lambda: _make_line(group))


def _make_line(group: ShardGroup) -> Line:
    world = _c10d.kept_for(_c10d.world_of(group.process_group), "world", _World)
    finish_at_end(world.finish)
    line = world.lines[group.name] = Line(group, world)
    return line


def announce(groups: Sequence[ShardGroup]) -> None:
    """A model is about to run: the first collective of one of its groups begins a step in all of them.

    Args:
        groups: With their replicas, each once.

    Communicates:
        Nothing.
    """
    names = frozenset(group.name for group in groups)
    for group in groups:
        line_of(group).announce(names)


def begin(groups: Iterable[ShardGroup]) -> None:
    """A step of some groups begins."""
    for group in groups:
        line_of(group).begin()


def withdraw(groups: Sequence[ShardGroup]) -> bool:
    """A model that was announced runs no more; gives whether there was no collective."""
    return bool(sum(line_of(group).withdraw() for group in groups))


def end(groups: Iterable[ShardGroup]) -> None:
    """The forward or backward that the step of some groups is of has ended."""
    for group in groups:
        line_of(group).end()


def is_torn(groups: Iterable[ShardGroup]) -> bool:
    """Whether the model's step was left within its forward or backward, for one that others run."""
    return any(line_of(group).is_torn for group in groups)


def times_left(groups: Sequence[ShardGroup]) -> TimesLeft:
    """How often this rank has left a step."""
    for group in groups[:1]:
        world = line_of(group).world
        return TimesLeft(world.epoch, world.num_left)
    return TimesLeft(0, 0)


def give_up(why: str, groups: Iterable[ShardGroup]) -> None:
    """This rank leaves the step that it is in, in all groups; does nothing where none has begun since it left one.

    Args:
        why: What peers are told, in the words of an exception.
        groups: Some of the program's.

    Communicates:
        A header to each peer; nobody waits.
    """
    for line in [line_of(group) for group in groups][:1]:
        if not line.world.is_fresh:
            _leave(line.world, Why(why), line.world.epoch + 1)


def follow(line: Line, towards: int, why: Why) -> None:
    """This rank leaves the step that it is in, for it has met a peer that has, or one that is at something else in it.

    Args:
        line: Where.
        towards: The number to go on to; less than this rank's where the peer is in the same step.
        why: What peers are told.

    Communicates:
        As `give_up`.
    """
    epoch = line.world.epoch
    if towards // _EPOCH > epoch or towards <= line.number:
        _leave(line.world, why, max(towards // _EPOCH, epoch + 1))
    else:
        known = line.world.lines
        lines = {name: known[name] for name in line.companions if known[name].process_group() is not None}
        line.world.is_fresh = True
        line.world.num_left += 1
        tell_why(why, {name: each.number + 1 for name, each in lines.items()})
        for each in lines.values():
            each.go_on_to_next()


def _goal(heard: Heard, number: int) -> int:
    """The number of the step to go on to, by what a peer says that is in a later one than `number`."""
    if heard.kind == Kind.GAVE_UP and heard.tag > number:
        return heard.tag  # of another one, which is still to be left
    if heard.number // _EPOCH == number // _EPOCH:
        return number + 1  # though a peer may be met at a later forward yet
    return heard.number // _EPOCH * _EPOCH


def _leave(world: _World, why: Why, epoch: int) -> None:
    """Leave the step in all groups."""
    world.epoch, world.is_fresh = epoch, True
    world.num_left += 1
    lines = {name: each for name, each in world.lines.items() if each.process_group() is not None}
    tell_why(why, dict.fromkeys(lines, epoch * _EPOCH))
    for each in lines.values():
        each.is_torn = False
        each.leave(epoch * _EPOCH)


flight.steps_are(lambda group: line_of(group).number)
