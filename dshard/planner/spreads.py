"""How far measured steps were from predicted ones: intervals that hold 8 in 10, counted rather than assumed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import floor

from dshard.planner.texts import seconds_text

IN_TEN = 8
_TAIL = (1 - IN_TEN / 10) / 2  # on each side


@dataclass(frozen=True, slots=True)
class Interval:
    """From `low` to `high`."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Spread:
    """What runs of sources that the constants had not seen say of predictions.

    Args:
        steps: Of a measured step, in parts of the predicted one; None where too few runs say so.
        num_runs: That it is counted from.
        covered: Of each source, which part of its runs lies in the interval that the others' runs give.
        pairs: Of two runs that differ in sharding alone: by how many seconds their difference was longer than
            predicted, for each second that one is predicted to communicate longer across hosts than the other; 0 is in
            it. None where too few pairs say so.
        num_pairs: That it is counted from.
    """

    steps: Interval | None = None
    num_runs: int = 0
    covered: dict[str, float] = field(default_factory=dict)
    pairs: Interval | None = None
    num_pairs: int = 0


def holding(values: Sequence[float]) -> Interval | None:
    """What holds the next value 8 times in 10, if all are drawn alike; None if there are too few to say.

    Of `n` values in order, the next is as likely to fall into any of the `n + 1` gaps: as many of the outer ones are
    left out as make up no more than a tenth on each side.
    """
    ordered = sorted(values)
    num_outer = floor((len(ordered) + 1) * _TAIL + 1e-9)
    return Interval(float(ordered[num_outer - 1]), float(ordered[-num_outer])) if num_outer else None


def spread_of(parts: Sequence[float], sources: Sequence[str], slopes: Sequence[float], known: Spread) -> Spread:
    """The spread of some runs; of what too few of them tell, that which was known.

    Args:
        parts: Of each run that was kept aside: its measured step, in parts of the predicted one.
        sources: Of each run.
        slopes: Of each pair: seconds that the difference was longer, per second of communication more.
        known: Before these runs.
    """
    found, steps, pairs = known, holding(parts), holding(slopes)
    if steps is not None:
        covered = {}
        for source in sorted(set(sources)):
            own = [part for part, of in zip(parts, sources, strict=True) if of == source]
            others = holding([part for part, of in zip(parts, sources, strict=True) if of != source])
            if others is not None:
                covered[source] = sum(others.low <= part <= others.high for part in own) / len(own)
        found = replace(found, steps=steps, num_runs=len(parts), covered=covered)
    if pairs is not None:
        pairs = Interval(min(pairs.low, 0.0), max(pairs.high, 0.0))
        found = replace(found, pairs=pairs, num_pairs=len(slopes))
    return found


def interval_text(seconds: Interval) -> str:
    """An interval of times, as text."""
    return f"{seconds_text(seconds.low)} to {seconds_text(seconds.high)} in {IN_TEN} of 10"
