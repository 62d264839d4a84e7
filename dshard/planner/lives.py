"""What a traced step noted: its events, the lives of storages, and the phases that both make."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from dshard.planner.flops import Op
from dshard.planner.traces import Phase


@dataclass(slots=True)
class Life:
    """The life of a storage.

    Args:
        num_bytes: Of it.
        born: Number of the event that made it.
        died: Number of the first event after it was gone; None while it is there.
        is_gradient: Whether it holds a parameter's gradient.
    """

    num_bytes: int
    born: int
    died: int | None = None
    is_gradient: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """An operation.

    Args:
        part: That it belongs to.
        is_backward: Which half of the step.
        op: What it costs; None where it runs no kernel.
    """

    part: int
    is_backward: bool
    op: Op | None


@dataclass(frozen=True, slots=True)
class Record:
    """All events of a step, in order, and the lives of what they made."""

    events: tuple[Event, ...]
    lives: tuple[Life, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Events of one part in a row: from number `start` to before `stop`."""

    part: int
    is_backward: bool
    start: int
    stop: int


def spans_of(events: Sequence[Event]) -> list[Span]:
    """Events cut where another part, or backward, begins."""
    found, start = [], 0
    for i in range(1, len(events) + 1):
        first = events[start]
        if i == len(events) or (events[i].part, events[i].is_backward) != (first.part, first.is_backward):
            found.append(Span(first.part, first.is_backward, start, i))
            start = i
    return found


def phases_of(record: Record) -> tuple[Phase, ...]:
    """Events of one part in a row as one phase, with the bytes that were alive in it."""
    num = len(record.events)
    made, gone = [0] * (num + 1), [0] * (num + 1)
    for life in record.lives:
        if not life.is_gradient:
            made[life.born] += life.num_bytes
            gone[num if life.died is None else life.died] += life.num_bytes
    alive = list(accumulate(more - less for more, less in zip(made, gone, strict=True)))
    gradients = sorted(life.born for life in record.lives if life.is_gradient)
    found = []
    for span in spans_of(record.events):
        ops = tuple(event.op for event in record.events[span.start : span.stop] if event.op is not None)
        place = bisect.bisect_left(gradients, span.start)
        turn = min(gradients[place], span.stop) if place < len(gradients) else span.stop
        found.append(
            Phase(
                span.part,
                span.is_backward,
                ops,
                max(alive[span.start : turn], default=0),
                max(alive[turn : span.stop]) if turn < span.stop else None,
                alive[span.stop - 1] - (gone[span.stop] if span.stop < num else 0),
            )
        )
    return tuple(found)
