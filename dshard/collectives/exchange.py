"""Messages straight from rank to rank, behind a header: what gloo gets in the place of its own collectives."""

import contextlib
import sys
import zlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dshard.collectives import _c10d
from dshard.collectives._c10d import Work
from dshard.collectives.group import ShardGroup
from dshard.collectives.header import Kind, check_headers, header, read
from dshard.collectives.lines import follow, line_of
from dshard.collectives.lost import ended, is_symptom
from dshard.collectives.stalls import failure
from dshard.collectives.whys import Why, told_by
from dshard.errors import DivergenceError, RankLostError


class Exchange:
    """All messages of one collective between this rank and its peers.

    Headers have one size and one tag. The messages behind them have tags of their own, made of what they belong to:
    gloo ends the process when a message of more bytes arrives than was asked for, so messages of different things must
    never meet. Ranks that are apart learn it from the headers.

    A message for which both sides are ready must arrive before its memory goes, or gloo waits for ever; one for which
    the peer never gets ready may go at any time. The headers tell the two apart.

    Args:
        group: Ranks that take part.
        kind: What is exchanged.
        label: Of which unit.
        tag: A number that must be equal on all ranks.
        sizes: What else tells the messages apart: everything that their sizes depend on.
    """

    def __init__(self, group: ShardGroup, kind: Kind, label: str, tag: int, sizes: int) -> None:
        self._group, self._kind, self._label = group, kind, label
        self._works: list[tuple[int, Work]] = []
        self._line = line_of(group)
        self.number = self._line.note()  # of the step that it belongs to
        self._channel = zlib.crc32(f"{int(kind)} {label} {sizes} {tag} {self.number}".encode()) & 0x3FFFFFFF
        self.own = header(kind, label, tag, self.number)
        self.place = 0  # among all of the line
        self.sent: dict[int, Work] = {}  # the header's way to each peer
        self.heard: dict[int, Tensor] = {}  # what each peer is at: another step, if it has left this one
        self.is_heard = False  # of all of them
        self.beyond = 0  # the number of the step to go on to, where a peer has left this one
        self._start(lambda: self._line.start(self, group.process_group))

    def __del__(self) -> None:
        """What both sides are ready for must arrive; the line keeps this until that is known."""
        if self._works and self.is_heard and not sys.is_finalizing():
            with contextlib.suppress(RuntimeError), _disable_current_modes():
                self._end()

    def send(self, tensor: Tensor, peer: int) -> None:
        """Start to send a contiguous tensor, which must not change until the end."""
        group = self._group.process_group
        self._works.append((peer, self._start(lambda: _c10d.send(tensor, peer, self._channel, group))))

    def receive(self, tensor: Tensor, peer: int) -> None:
        """Start to receive into a contiguous tensor what `peer` sends, in the order of its sends."""
        group = self._group.process_group
        self._works.append((peer, self._start(lambda: _c10d.receive(tensor, peer, self._channel, group))))

    def swap(self, into: Tensor, values: Tensor, peer: int) -> None:
        """Start to receive from a peer and to send to it, as of `receive` and `send`; what is empty does not travel."""
        if into.numel():
            self.receive(into, peer)
        if values.numel():
            self.send(values, peer)

    def _start(self, start: Callable[[], Work]) -> Work:
        """Start messages; gloo raises at once where the connection is gone."""
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
            return False
        self._line.hear(self, self._group.process_group)
        self._end()
        return self._is_together()

    def _is_together(self) -> bool:
        return all(map(self._is_with, self.heard))

    def _is_with(self, peer: int) -> bool:
        """Whether a peer means the same, and is ready for the messages."""
        return torch.equal(self.heard[peer], self.own)

    def _end(self) -> None:
        """Wait for what is under way between this rank and those that mean the same."""
        works, self._works = self._works, []
        sent, self.sent = self.sent, {}
        ready = {peer for peer in self.heard if self._is_with(peer)}
        limit = _c10d.limit_of(self._group.process_group)
        for peer, work in sent.items():
            if peer in ready:
                work.wait(*limit)
                self._line.note_read(peer, self)
            else:
                self._line.keep(peer, self.place, self.own, work)
        for peer, work in works:
            if peer in ready:
                work.wait(*limit)

    def _explained(self) -> tuple[DivergenceError, Why]:
        """What to raise where ranks are apart, and what to tell those that wait for this one."""
        for peer, row in self.heard.items():
            if read(row).number > self.number:
                return self._left(peer, row)
        rows = [self.heard.get(rank, self.own) for rank in range(self._group.num_ranks)]
        try:
            check_headers(torch.stack(rows), self.own, self._kind, self._label)
        except DivergenceError as differing:
            return differing, Why(str(differing), differs=True)
        raise AssertionError("ranks are apart whose headers are equal")

    def _left(self, peer: int, row: Tensor) -> tuple[DivergenceError, Why]:
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
            text += " zero_grad() and go on with the next batch; else look for a branch on rank-local data."
        what = f"'{self._label}': all ranks must go through a step together, but rank {rank} {text}"
        error = DivergenceError(what, (rank,) if why.text else ())
        error.left_step = True
        return error, why if why.text else Why(f"rank {rank} was at another forward")
