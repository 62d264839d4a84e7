"""The shipped profile, fitted to published runs of several sources, each of which is kept aside in turn.

```console
$ python -m benchmarks.calibration.fitting --out dshard/planner/rates.json
```

Prints the constants, how far each source's runs are from predictions by the other sources alone, and in which interval
they lie. Takes half a minute of one core.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import floor, log
from pathlib import Path
from statistics import fmean

import numpy as np

from dshard.cli.calibrate import constants_table, misses_table, read_runs
from dshard.planner.calibration import Run, errors_of, fitted, misses_of, predicted_s
from dshard.planner.rates import IN_TEN, PRIORS, Constant, Interval, Misses, Rates, Spread, around_one

RUNS = Path(__file__).parent / "published_runs.tsv"
PAIRED = ("source", "model", "gpu", "n_gpus", "micro_batch", "grad_accum", "seq", "precision", "act_ckpt", "compile")
_TAIL = (1 - IN_TEN / 10) / 2  # on each side of an interval


def pair_of(run: Run) -> tuple[str, ...]:
    """What runs have in common that differ in sharding alone."""
    return tuple(run.row.get(name, "") for name in PAIRED)


def constants_aside(runs: Sequence[Run], known: Mapping[str, Constant]) -> dict[str, dict[str, Constant]]:
    """For each source, the constants of the others' runs alone."""
    found = {}
    for source in sorted({run.source for run in runs}):
        others = [run for run in runs if run.source != source]
        found[source] = fitted(others, known) if others else dict(known)
    return found


def kept_aside(runs: Sequence[Run], aside: Mapping[str, Mapping[str, Constant]]) -> tuple[Misses, ...]:
    """Of each source, and of all together: how far off its runs are by constants of the other sources alone."""
    off = {source: errors_of([run for run in runs if run.source == source], each) for source, each in aside.items()}
    return (*(misses_of(own, source) for source, own in off.items()), misses_of(np.concatenate([*off.values()]), "all"))


def holding(values: Sequence[float]) -> Interval | None:
    """What holds the next value 8 times in 10, if all are drawn alike; None if there are too few to say.

    Of `n` values in order, the next is as likely to fall into any of the `n + 1` gaps: as many of the outer ones are
    left out as make up no more than a tenth on each side.
    """
    ordered = sorted(values)
    num_outer = floor((len(ordered) + 1) * _TAIL + 1e-9)
    return Interval(float(ordered[num_outer - 1]), float(ordered[-num_outer])) if num_outer else None


def spread_of(parts: Sequence[float], sources: Sequence[str]) -> Spread:
    """The spread of runs of several sources.

    Each source counts as much as any other, however many runs it has: the runs of a cluster err together, so that a new
    one is off as another cluster was, not as another run. Means of squares take in what sources differ by and what runs
    of one do.

    Args:
        parts: Of each run that was kept aside: its measured step, in parts of the predicted one.
        sources: Of each run.
    """
    own = {name: [p for p, of in zip(parts, sources, strict=True) if of == name] for name in sorted(set(sources))}
    squares = {source: fmean(log(part) ** 2 for part in each) for source, each in own.items()}
    covered = {}
    for source, each in own.items():
        others = around_one(fmean(square for of, square in squares.items() if of != source))
        covered[source] = sum(others.low <= part <= others.high for part in each) / len(each)
    return Spread(around_one(fmean(squares.values())), len(parts), covered, len(squares))


def spread_aside(runs: Sequence[Run], aside: Mapping[str, Mapping[str, Constant]]) -> Spread:
    """How far measured steps are from predictions by the other sources alone."""
    values = {of: {name: each.value for name, each in constants.items()} for of, constants in aside.items()}
    parts = [run.seconds / predicted_s(run, values[run.source]) for run in runs]
    return spread_of(parts, [run.source for run in runs])


@dataclass(frozen=True, slots=True)
class Pairs:
    """Of pairs of runs that differ in sharding alone, and by more than 2 % in time, those whose faster one is told."""

    num_right: int
    num_pairs: int


def pairs_of(runs: Sequence[Run], constants: Mapping[str, Constant]) -> Pairs:
    """All pairs among some runs."""
    values = {name: constant.value for name, constant in constants.items()}
    right = total = 0
    for one, other in combinations(runs, 2):
        is_pair = pair_of(one) == pair_of(other) and one.sharding != other.sharding
        if is_pair and abs(log(one.seconds / other.seconds)) > 0.02:
            total += 1
            is_faster = predicted_s(one, values) < predicted_s(other, values)
            right += is_faster == (one.seconds < other.seconds)
    return Pairs(right, total)


def profile_of(runs: Sequence[Run]) -> Rates:
    """The profile of runs of several sources."""
    aside = constants_aside(runs, PRIORS)
    spread = spread_aside(runs, aside)
    return Rates(fitted(runs, PRIORS), kept_aside(runs, aside), f"{len(runs)} published runs", spread)


def main(argv: Sequence[str] | None = None) -> None:
    """Fits, prints, and writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="write the profile as JSON")
    args = parser.parse_args(argv)
    runs = read_runs(RUNS)
    found = profile_of(runs)
    print("\n".join(constants_table(found)))
    print("\n".join(misses_table([misses_of(errors_of(runs, found.constants), "fitted to all"), *found.misses])))
    pairs, spread = pairs_of(runs, found.constants), found.spread
    print(f"pairs that differ in sharding alone: the faster one told in {pairs.num_right} of {pairs.num_pairs}")
    assert spread is not None
    for source, part in spread.covered.items():
        print(f"in the interval of the other sources: {part:.0%} of {source}")
    print(f"steps: {spread.steps}")
    if args.out is not None:
        found.save(args.out)


if __name__ == "__main__":
    main()
