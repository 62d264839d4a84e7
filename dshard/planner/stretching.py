"""From a step in which four blocks of a run ran to the step in which all of them do."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dshard.planner.traces import Event, Life, Record, Span, spans_of

_FIRST, _SECOND, _FORELAST, _LAST = range(4)


class DoubtError(Exception):
    """Whether blocks do the same is not certain; the whole model must run."""


@dataclass(frozen=True, slots=True, order=True)
class _At:
    """A place in the record: of which span, and how far in it; with the run and the block where it is one of a run's.

    Args:
        span: Of those of the short step; 0 for one of a run.
        is_backward: Which half, of a run's.
        run: Its number; None for a span that is no block's.
        block: In the run.
        offset: Events since the start of the span.
    """

    span: int
    is_backward: bool
    run: int
    block: int
    offset: int


_NOWHERE = -1


def stretched(record: Record, runs: Sequence[Sequence[int]]) -> Record:
    """The record of the whole step: the second block of each run, as often as there are blocks between the four.

    Args:
        record: In which the first two and the last two blocks of each run ran.
        runs: Parts of the blocks of each, in order.

    Raises:
        DoubtError: The second and the third of these did not do the same, or what they made did not live alike.
    """
    spans = spans_of(record.events)
    place_of = _places(spans, runs)
    at = _Positions(spans, place_of)
    lives = [(at.of(life.born), None if life.died is None else at.after(life.died), life) for life in record.lives]
    for r, parts in enumerate(runs):
        _check_ops(record.events, spans, place_of, r)
        _check_lives(lives, r, len(parts))
    made = []
    for born, died, life in lives:
        made.append((_moved(born, runs), None if died is None else _died(born, died, runs), life))
        if born.run != _NOWHERE and born.block == _SECOND:
            for more in range(1, len(runs[born.run]) - 3):
                own = replace(born, block=1 + more)
                made.append((own, None if died is None else _died(born, died, runs, more), life))
    return _laid_out(record, spans, place_of, runs, made)


def _places(spans: Sequence[Span], runs: Sequence[Sequence[int]]) -> dict[int, tuple[int, int]]:
    """Run and block of each span that is a block's, by number of the span."""
    found: dict[int, tuple[int, int]] = {}
    for r, parts in enumerate(runs):
        known = {part: block for block, part in enumerate((*parts[:2], *parts[-2:]))}
        wanted = [[0, 1, 2, 3], [3, 2, 1, 0]]
        for is_backward in (False, True):
            own = [k for k, span in enumerate(spans) if span.part in known and span.is_backward == is_backward]
            blocks = [known[spans[k].part] for k in own]
            is_row = own == list(range(own[0], own[0] + 4)) if own else is_backward
            if not is_row or (own and blocks != wanted[is_backward]):
                raise DoubtError
            found.update({k: (r, block) for k, block in zip(own, blocks, strict=True)})
    return found


class _Positions:
    """Places of numbers of events."""

    def __init__(self, spans: Sequence[Span], place_of: dict[int, tuple[int, int]]) -> None:
        self._spans, self._place_of = spans, place_of
        self._span_of = [k for k, span in enumerate(spans) for _ in range(span.start, span.stop)]

    def of(self, number: int) -> _At:
        """Of an event."""
        k = self._span_of[number]
        span = self._spans[k]
        run, block = self._place_of.get(k, (_NOWHERE, 0))
        return _At(k if run == _NOWHERE else 0, span.is_backward, run, block, number - span.start)

    def after(self, number: int) -> _At:
        """After the event before a number."""
        before = self.of(number - 1)
        return replace(before, offset=before.offset + 1)


def _check_ops(events: Sequence[Event], spans: Sequence[Span], place_of: dict[int, tuple[int, int]], run: int) -> None:
    for is_backward in (False, True):
        ops = {
            block: [event.op for event in events[spans[k].start : spans[k].stop]]
            for k, (r, block) in place_of.items()
            if r == run and spans[k].is_backward == is_backward
        }
        if ops and ops[_SECOND] != ops[_FORELAST]:
            raise DoubtError


_Made = tuple[_At, _At | None, Life]


def _check_lives(lives: Iterable[_Made], run: int, num_blocks: int) -> None:
    """That what the second and the third block made lived alike, and that none of it went further than a neighbour."""
    told: dict[int, list[tuple[object, ...]]] = {_SECOND: [], _FORELAST: []}
    for born, died, life in lives:
        far = died is not None and died.run == run
        if born.run != run:
            if far and died is not None and died.block in told:
                raise DoubtError
            continue
        if far and died is not None and abs(died.block - born.block) > 1:
            raise DoubtError
        if born.block in told:
            where: object = died
            if far and died is not None:
                where = replace(died, block=died.block - born.block)
            told[born.block].append((replace(born, block=0), where, life.num_bytes, life.is_gradient))
    if sorted(told[_SECOND], key=repr) != sorted(told[_FORELAST], key=repr):
        raise DoubtError


def _moved(at: _At, runs: Sequence[Sequence[int]]) -> _At:
    """Where a place of the short step is in the whole one: the last two blocks are the last two."""
    if at.run == _NOWHERE or at.block < _FORELAST:
        return at
    return replace(at, block=len(runs[at.run]) - 4 + at.block)


def _died(born: _At, died: _At, runs: Sequence[Sequence[int]], more: int = 0) -> _At:
    """The same of an end: in the run of what was born there, as many blocks away as it was."""
    if born.run == _NOWHERE or died.run != born.run:
        return _moved(died, runs)
    return replace(died, block=_moved(born, runs).block + more + died.block - born.block)


def _laid_out(
    record: Record,
    spans: Sequence[Span],
    place_of: dict[int, tuple[int, int]],
    runs: Sequence[Sequence[int]],
    lives: Iterable[_Made],
) -> Record:
    """Events in order, and lives by their numbers."""
    events: list[Event] = []
    starts: dict[_At, int] = {}

    def put(span: Span, at: _At, part: int) -> None:
        starts[at] = len(events)
        own = record.events[span.start : span.stop]
        events.extend(own if part == span.part else (replace(event, part=part) for event in own))

    for k, span in enumerate(spans):
        if k not in place_of:
            put(span, _At(k, span.is_backward, _NOWHERE, 0, 0), span.part)
            continue
        run, block = place_of[k]
        at = _moved(_At(0, span.is_backward, run, block, 0), runs)
        more = list(range(2, len(runs[run]) - 2))
        copies = [replace(at, block=each) for each in (reversed(more) if span.is_backward else more)]
        if block != _SECOND:
            put(span, at, span.part)
            continue
        for each in (*copies, at) if span.is_backward else (at, *copies):
            put(span, each, runs[run][each.block])

    def number(at: _At) -> int:
        return starts[replace(at, offset=0)] + at.offset

    told = (
        Life(life.num_bytes, number(born), None if died is None else number(died), life.is_gradient)
        for born, died, life in lives
    )
    return Record(tuple(events), tuple(told))
