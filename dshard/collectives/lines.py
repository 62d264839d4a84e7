"""What ranks say ahead of their collectives, in the order in which they say it: how those that left a step are found.

Each forward of a model begins a step, and steps of a process group are numbered. The number travels in every header. A
rank that meets a higher one than its own learns that a peer has left its step, and goes on to that one; a rank that
meets a lower one reads on, for its peer is on the way. Where a rank knows that it leaves a step, it says so at once, in
all groups, and goes on to a number that is above those of all forwards that others may run by then.
"""

import math
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dshard.collectives import _c10d
from dshard.collectives._c10d import ProcessGroup, Work
from dshard.collectives.group import ShardGroup
from dshard.collectives.header import HEADER_BYTES, Kind, header, read
from dshard.collectives.whys import tell_why

_EPOCH = 1 << 32  # numbers of forwards, from one step that was left to the next

__all__ = ["Line", "Said", "begin", "end", "give_up", "is_torn", "line_of", "num_started"]


class Said(Protocol):
    """A collective that was announced to the peers, and waits for what they say."""

    number: int  # of the step that it belongs to
    place: int  # among all of the group
    own: Tensor  # its header
    sent: dict[int, Work]  # the header's way to each peer
    heard: dict[int, Tensor | None]  # the header of each peer; None of one that has left the step
    is_heard: bool  # of all of them
    beyond: int  # the highest number of a step that a peer has gone on to, if one has

    def note_heard(self) -> None:
        """All peers were heard."""


class Line:
    """Headers between this rank and its peers in one process group.

    Args:
        group: The process group, which is not kept alive.
    """

    def __init__(self, group: ShardGroup) -> None:
        self.process_group = weakref.ref(group.process_group)
        self.number = 0  # of the step
        self.is_claimed = False  # whether the step of that number has begun
        self.companions = frozenset([group.name])  # groups of the model whose forward began it
        self.num_started = 0  # collectives so far
        self.is_torn = False  # whether a rank has left the step within its forward or backward
        self._end: float = math.inf  # how many had started when its backward ended
        self._is_direct = group.is_direct
        self._waiting: deque[Said] = deque()  # not heard of yet, in order
        self._posted: dict[int, deque[list[Any]]] = {
            peer: deque() for peer in group.peers
        }  # [header, what to wait for]
        self._unread: list[tuple[int, int, Tensor, Work]] = []  # headers on their way, of steps that were left

    def begin(self, *, is_new: bool) -> None:
        """A step begins."""
        if self.is_claimed and is_new:
            self.number += 1
        self.is_claimed, self.is_torn, self._end = True, False, math.inf

    def end(self) -> None:
        """The backward of the step has ended on this rank, its reductions maybe not."""
        self._end = self.num_started

    def note(self) -> int:
        """A collective starts; gives the number of the step."""
        self.is_claimed = True
        self.num_started += 1
        return self.number

    def start(self, said: Said, group: ProcessGroup) -> None:
        """Say a header to the peers, and be ready for theirs."""
        self.note()
        said.place = self.num_started
        self._waiting.append(said)
        for peer, posted in self._posted.items():
            if len(posted) < len(self._waiting):
                self._post(posted, peer, group)
            said.sent[peer] = _c10d.send(said.own, peer, _c10d.HEADERS, group)

    def hear(self, wanted: Said, group: ProcessGroup) -> None:
        """Wait for what the peers say of a collective, and of those before it."""
        while not wanted.is_heard:
            said = self._waiting[0]
            for peer in self._posted:
                if peer not in said.heard:
                    found = said.heard[peer] = self._next(peer, said, group)
                    if found is None and said.number == self.number:
                        self.is_torn |= said.place <= self._end
            self._waiting.popleft()
            said.is_heard = True
            said.note_heard()

    def note_read(self, peer: int, said: Said) -> None:
        """A peer has read a header, and so those that were sent before it."""
        if self._unread:
            self._unread = [entry for entry in self._unread if entry[0] != peer or entry[1] >= said.place]

    def keep(self, peer: int, place: int, sent: Tensor, work: Work) -> None:
        """A header is on its way to a peer that will read it when it comes to this group again."""
        self._unread.append((peer, place, sent, work))

    @staticmethod
    def _post(posted: deque[list[Any]], peer: int, group: ProcessGroup) -> None:
        row = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
        posted.append([row, _c10d.receive(row, peer, _c10d.HEADERS, group)])

    def _next(self, peer: int, said: Said, group: ProcessGroup) -> Tensor | None:
        """What a peer says of a collective; None if it has left that step."""
        posted = self._posted[peer]
        while True:
            if not posted:
                self._post(posted, peer, group)
            row, work = posted[0]
            if work is not None:
                work.wait(*_c10d.limit_of(group))
                posted[0][1] = None
            if torch.equal(row, said.own):
                posted.popleft()
                return row
            heard = read(row)
            if heard.number > said.number:
                left, is_torn = divmod(heard.tag, 2) if heard.kind == Kind.GAVE_UP else (said.number, 0)
                if said.number == self.number == left:
                    self.is_torn |= bool(is_torn)
                said.beyond = max(said.beyond, left if left > said.number else heard.number)
                return None  # it stays, for a later collective of this rank
            posted.popleft()
            if heard.number == said.number and heard.kind != Kind.GAVE_UP:
                return row

    def after(self, num_epochs: int, num_forwards: int) -> int:
        """The number of a step further on."""
        return (self.number // _EPOCH + num_epochs) * _EPOCH if num_epochs else self.number + num_forwards

    def leave(self, num_epochs: int, num_forwards: int) -> None:
        """Leave the step for another one, and say so."""
        group, left = self.process_group(), self.number
        self.number = self.after(num_epochs, num_forwards)
        self.is_claimed = False
        if self._is_direct and group is not None:
            said = header(Kind.GAVE_UP, "", 2 * left + int(self.is_torn), self.number)
            for peer in self._posted:
                self.keep(peer, self.num_started, said, _c10d.send(said, peer, _c10d.HEADERS, group))


_LINES: dict[str, Line] = {}


def line_of(group: ShardGroup) -> Line:
    """That of a process group."""
    line = _LINES.get(group.name)
    if line is None or line.process_group() is not group.process_group:
        line = _LINES[group.name] = Line(group)
    return line


def begin(groups: Sequence[ShardGroup], *, is_new: bool = True) -> None:
    """A step of some groups and their replicas begins, by a call that all ranks make alike. Communicates nothing.

    Args:
        groups: Each once.
        is_new: Whether it is another one where the last was begun and not left.
    """
    lines = {group.name: line_of(group) for group in groups}
    for line in lines.values():
        line.begin(is_new=is_new)
        line.companions = frozenset(lines)


def num_started(groups: Iterable[ShardGroup]) -> int:
    """How many collectives were started in some groups so far."""
    return sum(line_of(group).num_started for group in groups)


def end(groups: Iterable[ShardGroup]) -> None:
    """The backward of the step that some groups are in has ended."""
    for group in groups:
        line_of(group).end()


def is_torn(groups: Iterable[ShardGroup]) -> bool:
    """Whether a rank of a group has left the step within its forward or backward."""
    return any(line_of(group).is_torn for group in groups)


def give_up(why: str, torn: Iterable[ShardGroup] = (), *, line: Line | None = None, towards: int = 0) -> None:
    """This rank leaves the step that it is in, in all groups; does nothing in those where none has begun.

    Args:
        why: What peers are told, in the words of an exception.
        torn: Groups of a model that is within its forward or backward.
        line: The one in which a peer was found ahead, if that is why.
        towards: The number of that peer's step there.

    Communicates:
        A header to each peer; nobody waits.
    """
    for group in torn:
        line_of(group).is_torn = True
    num_epochs, num_forwards = 1, 0
    if line is not None and towards > line.number:
        num_epochs = towards // _EPOCH - line.number // _EPOCH
        num_forwards = 1  # a peer may be met at a later forward of its step
    lines = {name: each for name, each in _LINES.items() if each.is_claimed and each.process_group() is not None}
    if line is not None and not num_epochs:  # the peer's other models are in the steps that they were in
        lines = {name: each for name, each in lines.items() if name in line.companions}
    if lines:
        tell_why(why, {name: each.after(num_epochs, num_forwards) for name, each in lines.items()})
    for each in lines.values():
        try:
            each.leave(num_epochs, num_forwards)
        except RuntimeError:  # the connections are closed, as after a timeout: the peers know
            continue
