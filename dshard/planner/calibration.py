"""Fits constants of the model of time to measured runs: Gauss-Newton in log time, shrunk to what was known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from dshard.planner.devices import Device
from dshard.planner.rates import (
    Constant,
    Misses,
    Rates,
    Spread,
    around_one,
    described,
    kind_of,
    of_family,
    variance_of,
    with_families,
)
from dshard.planner.tracing import Trace

Floats = npt.NDArray[np.float64]

_NOISE = 0.1  # of one run's time, that no constant explains; more than runs scatter, as those of a source err together
_OUTLIER = 2.5  # times that: what is off by more counts less
_MAX_STEPS, _STEP = 30, 1e-4
_NUM_FOLDS = 10  # parts of the runs, each of which is kept aside in turn
_RUNS_KNOWN = 9  # runs that count as much as the interval that was known before


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
        row: The columns of the table that it was read from.
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
    row: Mapping[str, str]
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
    def within(self) -> int:
        """Ranks that share a parameter."""
        return min(self.num_ranks, self.ranks_per_host) if self.sharding == "hybrid" else self.num_ranks


def terms_of(trace: Trace, device: Device, copied_s: Floats, repeats: Sequence[int], *, is_backward: bool) -> Terms:
    """What each unit of a traced step does in one half of it.

    Args:
        trace: Of the step.
        device: That runs it.
        copied_s: Of each unit, as `Terms` has it.
        repeats: Of each unit in the order of the trace, in how many places of the model it stands.
        is_backward: Which half.
    """
    found = {field.name: np.zeros(len(trace.parts)) for field in fields(Terms)}
    for phase in trace.phases:
        for op in phase.ops if phase.is_backward == is_backward else ():
            kind, traffic_s = kind_of(op), op.num_bytes / device.memory_bytes_per_s
            if kind == "other":
                found["other_s"][phase.part] += traffic_s
                continue
            found[f"{kind}_s"][phase.part] += op.flops / device.peak(op.dtype)
            found["operands_s" if kind == "product" else "attention_bytes_s"][phase.part] += traffic_s
    ordered = {name: np.repeat(values[list(trace.order)], repeats) for name, values in found.items()}
    return Terms(**(ordered | {"copied_s": copied_s}))


def recomputed(forward: Terms, backward: Terms, checkpointing: str) -> Terms:
    """A backward that computes again what selective checkpointing has dropped.

    Args:
        forward: Of the same units.
        backward: Without checkpointing.
        checkpointing: "op" for all but products and attention, "every 2" for all of every second block, or another.
    """
    if checkpointing == "op":
        return replace(backward, other_s=backward.other_s + forward.other_s)
    if checkpointing.startswith("every"):
        names, number = [each.name for each in fields(Terms) if each.name != "copied_s"], int(checkpointing.split()[1])
        return replace(backward, **{n: getattr(backward, n) + getattr(forward, n) / number for n in names})
    return backward


def predicted_s(run: Run, values: Mapping[str, float]) -> float:
    """Time of a step: what `step_time` gives with these constants, for one strategy of all units."""
    cluster = described(run.device, values, run.num_ranks, run.ranks_per_host, run.network)
    gather_bytes: Any = run.gather_bytes  # of all units at once, as arrays
    grad_bytes: Any = run.grad_bytes
    gather_s: Any = cluster.all_gather_s(gather_bytes, run.within)
    reduce_s: Any = cluster.reduce_scatter_s(grad_bytes, run.within)
    if run.within < run.num_ranks:
        reduce_s = reduce_s + cluster.all_reduce_s(grad_bytes / run.within, run.within)
    again_s = np.zeros_like(gather_s) if run.sharding == "keep" else gather_s * run.uses_backward
    slowest, lost = 1 + cluster.stragglers, cluster.interference
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
    return terms.product_s / product + terms.attention_s / attention + traffic / values["memory"]


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


def errors_of(runs: Sequence[Run], constants: Mapping[str, Constant]) -> Floats:
    """By which part of its time the prediction of each run is too long."""
    values = {name: constant.value for name, constant in constants.items()}
    return np.array([predicted_s(run, values) / run.seconds - 1 for run in runs])


def misses_of(off: Floats, source: str) -> Misses:
    """How far off predictions are, by the errors of some runs."""
    return Misses(source, len(off), float(np.abs(off).mean()), float(np.quantile(np.abs(off), 0.9)))


def errors_aside(runs: Sequence[Run], known: Mapping[str, Constant]) -> Floats:
    """`errors_of` each run, by constants that were fitted to the tenths of the runs that it is not in."""
    num_folds = min(len(runs), _NUM_FOLDS)
    found = np.zeros(len(runs))
    for fold in range(num_folds):
        others = [run for place, run in enumerate(runs) if place % num_folds != fold]
        constants = fitted(others, known) if others else known
        found[fold::num_folds] = errors_of(runs[fold::num_folds], constants)
    return found


def calibrated(runs: Sequence[Run], known: Rates, source: str) -> Rates:
    """The profile of the runs of one cluster.

    The interval of a step is that of this cluster: of errors of runs that were kept aside, drawn to what was known.

    Args:
        runs: At least one.
        known: The profile that is moved: where the runs say nothing, it stays.
        source: Of the runs, for whoever reads the profile.
    """
    constants = with_families(known.constants, (run.device for run in runs))
    off = errors_aside(runs, constants)
    square, spread = float(np.mean(np.log1p(off) ** 2)), known.spread or Spread()
    if spread.steps is not None:
        square = fmean((square, variance_of(spread.steps)), (len(runs), _RUNS_KNOWN))
    spread = replace(spread, steps=around_one(square), num_runs=len(runs), covered={}, num_sources=1)
    return Rates(fitted(runs, constants), (misses_of(off, "runs kept aside"),), source, spread)
