"""Units that `fully_shard` finds on the root alone beside units made by hand: time and memory of a training step.

Five models, float32, AdamW. The steps of both variants are interleaved, and their ratio is taken round by round: of the
time between two barriers, and of the CPU time that rank 0 spent in it. Gathered bytes are the peak of what dshard
counts as gathered in a step. Grown memory is that of fresh processes, as `memory` counts it; the median of the repeats.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dshard
from dshard.bench.common import WORLD_TIMEOUT_S, Sample, Step, gloo_world, interleave, summary
from dshard.bench.families import Family, model_and_step
from dshard.bench.output import Output, table
from dshard.bench.peaks import gathered_peak, grown
from dshard.bench.plots import Bars
from dshard.runtime.runtime import context_of

_BY_HAND, _ROOT_ALONE = "by hand", "root alone"
_VARIANTS = {_BY_HAND: True, _ROOT_ALONE: False}
_NUM_WARMUPS = 4


@dataclass(frozen=True, slots=True)
class _Timed:
    """Times of one model on one rank, by variant."""

    samples: dict[str, list[Sample]]
    counts: dict[str, dict[str, Any]]


def _counts(model: Any, step: Step) -> dict[str, Any]:
    """What a step gathers, once the order of use is known."""
    for _ in range(2):
        step()
    with gathered_peak() as peak, dshard.CommTrace() as trace:
        step()
    units = [unit for unit in context_of(model).units if unit.params]
    return {
        "units": len(units),
        "all_gathers": trace.calls("all_gather"),
        "reduce_scatters": trace.calls("reduce_scatter"),
        "gathered_peak_mb": peak.num_bytes / 1e6,
        "unit_mb": [unit.full_bytes / 1e6 for unit in units],
    }


def _time(family: Family, num_rounds: int) -> _Timed:
    """Count and time both variants on this rank."""
    counts: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for variant, by_hand in _VARIANTS.items():
        model, steps[variant] = model_and_step(family, by_hand=by_hand)
        counts[variant] = _counts(model, steps[variant])
    return _Timed(interleave(steps, num_rounds=num_rounds, num_warmups=_NUM_WARMUPS), counts)


def _grow(family: Family, variant: str) -> int:
    """Train on this rank; bytes grown."""
    family.build()  # so that what the model imports is here already
    return grown(lambda: model_and_step(family, by_hand=_VARIANTS[variant])[1]).resident


def _grown_mb(family: Family, num_ranks: int, num_repeats: int) -> dict[str, list[float]]:
    """Megabytes that rank 0 of fresh processes has grown by, by variant."""
    grown: dict[str, list[float]] = {variant: [] for variant in _VARIANTS}
    for _ in range(num_repeats):
        for variant, found in grown.items():
            with gloo_world(num_ranks) as world:
                found.append(world.run(_grow, family, variant, timeout_s=WORLD_TIMEOUT_S)[0] / 1e6)
    return grown


def _ratio(samples: Mapping[str, Sequence[Sample]], seconds: Callable[[Sample], float]) -> dict[str, float]:
    """Root alone over by hand, round by round."""
    rounds = zip(samples[_ROOT_ALONE], samples[_BY_HAND], strict=True)
    q1, median, q3 = statistics.quantiles([seconds(alone) / seconds(by_hand) for alone, by_hand in rounds], n=4)
    return {"median": median, "q1": q1, "q3": q3}


def _over(values: Mapping[str, float]) -> float:
    """Root alone over by hand."""
    return values[_ROOT_ALONE] / values[_BY_HAND]


def _row(family: Family, timed: _Timed, grown: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """What the result file says of a model."""
    return {
        "by hand is": family.stated,
        **{variant: {**summary(timed.samples[variant]), **timed.counts[variant]} for variant in _VARIANTS},
        "time_ratio": _ratio(timed.samples, lambda sample: sample.step_s),
        "cpu_ratio": _ratio(timed.samples, lambda sample: sample.cpu_s),
        "gathered_peak_ratio": _over({v: counts["gathered_peak_mb"] for v, counts in timed.counts.items()}),
        "grown_mb": grown,
        "grown_ratio": _over({variant: statistics.median(found) for variant, found in grown.items()}),
    }


def _table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Counts and ratios as text."""
    rows = {}
    for family, row in results.items():
        counts = [f"{row[_ROOT_ALONE][key]}/{row[_BY_HAND][key]}" for key in ("units", "all_gathers")]
        ratios = [f"{r['median']:.3f} [{r['q1']:.3f}, {r['q3']:.3f}]" for r in (row["time_ratio"], row["cpu_ratio"])]
        rows[family] = [*counts, *ratios, f"{row['gathered_peak_ratio']:.3f}", f"{row['grown_ratio']:.3f}"]
    return table(["units", "gathers", "step time", "CPU time", "gathered", "grown"], rows)


def _panels(results: Mapping[str, Mapping[str, Any]]) -> list[Bars]:
    """Time and memory of both variants, by model."""

    def bars(title: str, unit: str, value: Callable[[Mapping[str, Any], str], float]) -> Bars:
        values = {f: {f"dshard, {variant}": value(row, variant) for variant in _VARIANTS} for f, row in results.items()}
        return Bars(title, unit, values)

    return [
        bars("a training step", "ms, median", lambda row, variant: row[variant]["median_ms"]),
        bars("gathered at the peak", "MB per rank", lambda row, variant: row[variant]["gathered_peak_mb"]),
        bars(
            "memory grown at the peak", "MB per rank", lambda row, variant: statistics.median(row["grown_mb"][variant])
        ),
    ]


def run(output: Output, *, num_ranks: int, num_rounds: int, num_repeats: int, families: Mapping[str, Family]) -> None:
    """Measure, print and write `units_gloo_N`; times and grown bytes are rank 0's.

    Args:
        output: Where to.
        num_ranks: Of the gloo worlds.
        num_rounds: Steps of each variant that are timed.
        num_repeats: Fresh processes per variant whose memory is measured.
        families: By name, of those whose packages are installed.
    """
    with gloo_world(num_ranks) as world:
        timed = {
            f: world.run(_time, family, num_rounds, timeout_s=WORLD_TIMEOUT_S)[0] for f, family in families.items()
        }
    grown = {f: _grown_mb(family, num_ranks, num_repeats) for f, family in families.items()}
    results = {f: _row(family, timed[f], grown[f]) for f, family in families.items()}
    print(f"root alone over by hand, {num_ranks} gloo ranks (times: median and quartiles)\n{_table(results)}")
    facts = output.header(num_ranks=num_ranks, num_rounds=num_rounds)
    output.write(f"units_gloo_{num_ranks}", {"header": facts, "families": results}, _panels(results))
