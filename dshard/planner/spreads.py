"""How far measured steps were from predicted ones: intervals that hold 8 in 10 of what was not seen."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp, floor, hypot, log, sqrt
from statistics import NormalDist, fmean

from dshard.planner.texts import seconds_text

IN_TEN = 8
_TAIL = (1 - IN_TEN / 10) / 2  # on each side
_DEVIATIONS = NormalDist().inv_cdf(1 - _TAIL)
_RUNS_KNOWN = 9  # of a cluster's own runs: as many count as much as what was known before


@dataclass(frozen=True, slots=True)
class Interval:
    """From `low` to `high`."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Spread:
    """What runs of sources that the constants had not seen say of predictions.

    Args:
        steps: Of a measured step, in parts of the predicted one; None where no run says so.
        num_runs: That it is from.
        covered: Of each source, which part of its runs lies in the interval that the others' runs give; where there is
            one source, in that which was known before.
        pairs: Of two runs that differ in sharding alone: by how many seconds their difference was longer than
            predicted, for each second that one is predicted to communicate longer across hosts than the other; 0 is in
            it. None where too few pairs say so.
        num_pairs: That it is counted from.
        num_sources: Of the runs. Of several, `steps` is for a cluster that is none of them; of one, for that one.
    """

    steps: Interval | None = None
    num_runs: int = 0
    covered: dict[str, float] = field(default_factory=dict)
    pairs: Interval | None = None
    num_pairs: int = 0
    num_sources: int = 0


def holding(values: Sequence[float]) -> Interval | None:
    """What holds the next value 8 times in 10, if all are drawn alike; None if there are too few to say.

    Of `n` values in order, the next is as likely to fall into any of the `n + 1` gaps: as many of the outer ones are
    left out as make up no more than a tenth on each side.
    """
    ordered = sorted(values)
    num_outer = floor((len(ordered) + 1) * _TAIL + 1e-9)
    return Interval(float(ordered[num_outer - 1]), float(ordered[-num_outer])) if num_outer else None


def around_one(variance: float) -> Interval:
    """What holds 8 in 10 of numbers whose logarithms have a mean of 0 and this variance."""
    half = _DEVIATIONS * sqrt(variance)
    return Interval(exp(-half), exp(half))


def variance_of(interval: Interval) -> float:
    """The variance of which `around_one` makes an interval as wide."""
    return (log(interval.high / interval.low) / 2 / _DEVIATIONS) ** 2


def widened(interval: Interval, deviation: float) -> Interval:
    """An interval of parts where they are off by a further factor, of which the logarithm has this deviation."""
    more = _DEVIATIONS * deviation
    return Interval(exp(-hypot(log(interval.low), more)), exp(hypot(log(interval.high), more)))


def spread_of(parts: Sequence[float], sources: Sequence[str], slopes: Sequence[float], known: Spread) -> Spread:
    """The spread of some runs, drawn to what was known; of what too few of them tell, that which was known.

    Each source counts as much as any other, however many runs it has: the runs of a cluster err together, so that a new
    one is off as another cluster was, not as another run. Means of squares take in what sources differ by and what runs
    of one do.

    Args:
        parts: Of each run that was kept aside: its measured step, in parts of the predicted one.
        sources: Of each run.
        slopes: Of each pair: seconds that the difference was longer, per second of communication more.
        known: Before these runs.
    """
    found, pairs = known, holding(slopes)
    squares = _mean_squares(parts, sources)
    if len(squares) > 1:
        steps = around_one(_drawn(squares, known))
        covered = {}
        for source in squares:
            others = around_one(fmean(each for of, each in squares.items() if of != source))
            covered[source] = _part_in(others, parts, sources, source)
        found = replace(found, steps=steps, num_runs=len(parts), covered=covered, num_sources=len(squares))
    elif squares:
        ((source, square),) = squares.items()
        covered = {source: _part_in(known.steps, parts, sources, source)} if known.steps is not None else {}
        if known.steps is not None:
            weights = (len(parts), _RUNS_KNOWN)
            square = fmean((square, variance_of(known.steps)), weights)
        found = replace(found, steps=around_one(square), num_runs=len(parts), covered=covered, num_sources=1)
    if pairs is not None:
        pairs = Interval(min(pairs.low, 0.0), max(pairs.high, 0.0))
        found = replace(found, pairs=pairs, num_pairs=len(slopes))
    return found


def _mean_squares(parts: Sequence[float], sources: Sequence[str]) -> dict[str, float]:
    """Of each source, the mean square of its logarithms."""
    found = {}
    for source in sorted(set(sources)):
        found[source] = fmean(log(part) ** 2 for part, of in zip(parts, sources, strict=True) if of == source)
    return found


def _drawn(squares: dict[str, float], known: Spread) -> float:
    """The variance of a new source: that of these, and of as many as were known before."""
    if known.steps is None:
        return fmean(squares.values())
    before = max(known.num_sources, 1)
    return fmean((fmean(squares.values()), variance_of(known.steps)), (len(squares), before))


def _part_in(interval: Interval, parts: Sequence[float], sources: Sequence[str], source: str) -> float:
    """Which part of a source's runs is in an interval."""
    own = [part for part, of in zip(parts, sources, strict=True) if of == source]
    return sum(interval.low <= part <= interval.high for part in own) / len(own)


def interval_text(seconds: Interval) -> str:
    """An interval of times, as text."""
    return f"{seconds_text(seconds.low)} to {seconds_text(seconds.high)} in {IN_TEN} of 10"
