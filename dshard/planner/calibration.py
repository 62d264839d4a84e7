"""Fits constants of the model of time to measured runs: Gauss-Newton in log time, shrunk to what was known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import log, log2

import numpy as np
import numpy.typing as npt

from dshard.planner.devices import Device
from dshard.planner.rates import START_S, Constant, Misses, Rates, of_family, ring_hop_s, with_families
from dshard.planner.spreads import Spread, spread_of

Floats = npt.NDArray[np.float64]

_NOISE = 0.1  # of one run's time, that no constant explains; more than runs scatter, as those of a source err together
_OUTLIER = 2.5  # times that: what is off by more counts less
_MAX_STEPS, _STEP = 30, 1e-4
_NUM_FOLDS = 10  # of the runs of one source, of which each is kept aside in turn
_TELLING = 0.01  # of a step: pairs whose communication differs by less say nothing of how well that is known


@dataclass(frozen=True, slots=True)
class Terms:
    """What each unit of a model does in one half of a step, at the rates of a datasheet; arrays of one per unit.

    Args:
        product_s: Arithmetic of products.
        attention_s: The same of attention.
        operands_s: Traffic of products.
        attention_bytes_s: Traffic of attention.
        other_s: Traffic of all else.
        copied_s: Bytes of the collective of this half, read or written once.
    """

    product_s: Floats
    attention_s: Floats
    operands_s: Floats
    attention_bytes_s: Floats
    other_s: Floats
    copied_s: Floats


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run, and what its step is made of.

    Args:
        name: Of the run.
        source: Who measured.
        pair: What runs have in common that differ in sharding alone.
        sharding: "full", "keep" (gathered once per step) or "hybrid".
        seconds: Measured, of a step.
        device: On which.
        num_ranks: On how many.
        ranks_per_host: Of a host.
        network: Bytes per second of a host's network.
        num_backwards: Micro-batches per step.
        is_compiled: Whether by torch.compile.
        forward: Of one micro-batch.
        backward: Likewise, with what is computed again.
        gather_bytes: Per unit.
        grad_bytes: Per unit, as they are reduced.
        uses_backward: Whether the unit is gathered for its backward.
        optimizer_s: Traffic of the optimizer's step on this rank's shards.
    """

    name: str
    source: str
    pair: tuple[str, ...]
    sharding: str
    seconds: float
    device: Device
    num_ranks: int
    ranks_per_host: int
    network: float
    num_backwards: int
    is_compiled: bool
    forward: Terms
    backward: Terms
    gather_bytes: Floats
    grad_bytes: Floats
    uses_backward: Floats
    optimizer_s: float

    @property
    def num_hosts(self) -> int:
        """Full hosts."""
        return max(1, self.num_ranks // self.ranks_per_host)

    @property
    def within(self) -> int:
        """Ranks that share a parameter."""
        return min(self.num_ranks, self.ranks_per_host) if self.sharding == "hybrid" else self.num_ranks


def predicted_s(run: Run, values: Mapping[str, float]) -> float:
    """Time of a step: what `step_time` gives with these constants, for one strategy of all units."""
    gather_s, reduce_s = _collectives_s(run, values)
    again_s = np.zeros_like(gather_s) if run.sharding == "keep" else gather_s * run.uses_backward
    slowest, lost = 1 + values["stragglers"] * log2(run.num_ranks), values["interference"]
    forward_s = _compute_s(run, run.forward, values) * slowest + lost * gather_s
    backward_s = _compute_s(run, run.backward, values) * slowest + lost * (again_s + reduce_s)
    after = np.append(gather_s[1:], 0.0)
    total_s = gather_s[0] + np.maximum(forward_s, after).sum()
    beside = np.append(reduce_s[1:], 0.0) + np.append(0.0, again_s[:-1])
    total_s += again_s[-1] + reduce_s[0] + np.maximum(backward_s, beside).sum()
    return float(run.num_backwards * total_s + run.optimizer_s / values["memory"])


def _compute_s(run: Run, terms: Terms, values: Mapping[str, float]) -> Floats:
    traffic = terms.operands_s * values["operands"] + terms.attention_bytes_s + terms.copied_s * values["copies"]
    traffic = traffic + terms.other_s * (values["fused"] if run.is_compiled else 1.0)
    product, attention = (of_family(values, name, run.device) for name in ("product", "attention"))
    found: Floats = terms.product_s / product + terms.attention_s / attention + traffic / values["memory"]
    return found


def _collectives_s(run: Run, values: Mapping[str, float]) -> tuple[Floats, Floats]:
    """Gathers and reductions of each unit."""
    within, near = run.within, run.device.within_host
    inside = near.bytes_per_s * values["inside"]
    contended = run.network * values["between"] * (run.num_hosts / 2) ** -values["contention"]
    rate, hop_s = inside, near.latency_s * values["hops"]
    if within > run.ranks_per_host:
        rate, hop_s = min(contended, inside), ring_hop_s(values, run.device, run.ranks_per_host)

    def of(num_bytes: Floats) -> Floats:
        wire = num_bytes * (within - 1) / within
        return np.where(num_bytes > 0, START_S + hop_s * (within - 1) + wire / rate, 0.0) if within > 1 else 0 * wire

    reduce_s = of(run.grad_bytes)
    replicas = run.num_ranks // within
    if replicas > 1:
        wire = 2 * run.grad_bytes / within * (replicas - 1) / replicas * min(within, run.ranks_per_host)
        start_s = START_S + 2 * values["hops"] * run.device.between_hosts.latency_s * log2(run.num_hosts)
        reduce_s = reduce_s + np.where(run.grad_bytes > 0, start_s + wire / min(contended, inside), 0.0)
    return of(run.gather_bytes), reduce_s


def across_s(run: Run, values: Mapping[str, float]) -> float:
    """What collectives of a step take across hosts, hidden or not: all but what a host does alone."""
    if run.within > run.ranks_per_host:
        return _communicates_s(run, values)
    return _communicates_s(run, values) - _communicates_s(replace(run, num_ranks=run.within), values)


def _communicates_s(run: Run, values: Mapping[str, float]) -> float:
    gather_s, reduce_s = _collectives_s(run, values)
    again_s = 0.0 if run.sharding == "keep" else gather_s @ run.uses_backward
    return float(run.num_backwards * (gather_s.sum() + again_s + reduce_s.sum()))


def fitted(runs: Sequence[Run], known: Mapping[str, Constant]) -> dict[str, Constant]:
    """The constants that fit some runs best, shrunk to what was known of them; the fewer runs, the less they move.

    Args:
        runs: At least one.
        known: Constants, of which the value and its uncertainty count.
    """
    names = list(known)
    center = np.log([known[name].value for name in names])
    spread = np.array([known[name].uncertainty for name in names])
    measured = np.log([run.seconds for run in runs])

    def residuals(point: Floats) -> Floats:
        values = dict(zip(names, np.exp(point).tolist(), strict=True))
        off = (np.log([predicted_s(run, values) for run in runs]) - measured) / _NOISE
        weights = np.sqrt(np.minimum(1.0, _OUTLIER / np.maximum(np.abs(off), 1e-9)))
        return np.concatenate([off * weights, (point - center) / spread])

    point, damping = center.copy(), 1e-2
    now = residuals(point)
    for _ in range(_MAX_STEPS):
        slopes = np.stack([(residuals(point + _STEP * unit) - now) / _STEP for unit in np.eye(len(names))], axis=1)
        normal, gradient, before = slopes.T @ slopes, slopes.T @ now, float(now @ now)
        for _ in range(12):
            moved = point - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            then = residuals(moved)
            if then @ then < before:
                break
            damping *= 4
        else:
            break
        point, now, damping = moved, then, max(damping / 4, 1e-6)
        if before - now @ now < 1e-6 * before:
            break
    deviations = np.sqrt(np.diag(np.linalg.inv(normal)))
    return {
        name: replace(known[name], value=float(np.exp(at)), uncertainty=float(deviation))
        for name, at, deviation in zip(names, point, deviations, strict=True)
    }


def misses_of(runs: Sequence[Run], constants: Mapping[str, Constant], source: str) -> Misses:
    """How far predictions of some runs are off."""
    off = np.abs(errors_of(runs, constants))
    return Misses(source, len(runs), float(off.mean()), float(np.quantile(off, 0.9)))


def errors_of(runs: Sequence[Run], constants: Mapping[str, Constant]) -> Floats:
    """By which part of its time the prediction of each run is too long."""
    values = {name: constant.value for name, constant in constants.items()}
    return np.array([predicted_s(run, values) / run.seconds - 1 for run in runs])


def constants_aside(runs: Sequence[Run], known: Mapping[str, Constant]) -> dict[str, dict[str, Constant]]:
    """For each source, the constants of the others' runs alone."""
    found = {}
    for source in sorted({run.source for run in runs}):
        others = [run for run in runs if run.source != source]
        found[source] = fitted(others, known) if others else dict(known)
    return found


def kept_aside(runs: Sequence[Run], aside: Mapping[str, Mapping[str, Constant]]) -> tuple[Misses, ...]:
    """Of each source, and of all together: how far off its runs are by constants of the other sources alone."""
    found, off = [], []
    for source, constants in aside.items():
        own = [run for run in runs if run.source == source]
        found.append(misses_of(own, constants, source))
        off.append(np.abs(errors_of(own, constants)))
    every = np.concatenate(off)
    return (*found, Misses("all", len(runs), float(every.mean()), float(np.quantile(every, 0.9))))


def spread_aside(runs: Sequence[Run], aside: Mapping[str, Mapping[str, Constant]], known: Spread) -> Spread:
    """How far measured steps, and differences between shardings, are from predictions by the other sources alone.

    Of runs of one source, steps are by constants of the rest of its runs.
    """
    values = {of: {name: each.value for name, each in constants.items()} for of, constants in aside.items()}
    predicted = [predicted_s(run, values[run.source]) for run in runs]
    parts = [run.seconds / step_s for run, step_s in zip(runs, predicted, strict=True)]
    if len(aside) == 1:
        parts = _parts_in_turn(runs, next(iter(aside.values())))
    slopes = []
    for (one, one_s), (other, other_s) in combinations(zip(runs, predicted, strict=True), 2):
        if one.pair != other.pair or one.sharding == other.sharding:
            continue
        more_s = across_s(one, values[one.source]) - across_s(other, values[other.source])
        if abs(more_s) > _TELLING * min(one_s, other_s):
            slopes.append(((one.seconds - other.seconds) - (one_s - other_s)) / more_s)
    return spread_of(parts, [run.source for run in runs], slopes, known)


def _parts_in_turn(runs: Sequence[Run], known: Mapping[str, Constant]) -> list[float]:
    """Of each run its measured by its predicted time, with constants of a part of the runs that it is not in."""
    num_folds = min(len(runs), _NUM_FOLDS)
    parts = [0.0] * len(runs)
    for fold in range(num_folds):
        others = [run for place, run in enumerate(runs) if place % num_folds != fold]
        constants = fitted(others, known) if others else known
        values = {name: each.value for name, each in constants.items()}
        for place in range(fold, len(runs), num_folds):
            parts[place] = runs[place].seconds / predicted_s(runs[place], values)
    return parts


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
        if one.pair != other.pair or one.sharding == other.sharding or abs(log(one.seconds / other.seconds)) <= 0.02:
            continue
        total += 1
        is_faster = predicted_s(one, values) < predicted_s(other, values)
        right += is_faster == (one.seconds < other.seconds)
    return Pairs(right, total)


def calibrated(runs: Sequence[Run], known: Rates, source: str) -> Rates:
    """The profile of some runs.

    Args:
        runs: At least one.
        known: What is moved: where the runs say nothing, it stays.
        source: Of the runs, for whoever reads the profile.
    """
    constants = with_families(known.constants, (run.device for run in runs))
    aside = constants_aside(runs, constants)
    spread = spread_aside(runs, aside, known.spread or Spread())
    return Rates(fitted(runs, constants), kept_aside(runs, aside), source, spread)
