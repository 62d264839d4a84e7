"""Plans at five memory limits, run for real: beside every single strategy, and beside what was predicted.

The limits lie between the predicted peaks of `full` and of `ddp` everywhere. Times are of one interleaved run; peaks
are counted in a step of their own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import dshard
from dshard.bench.common import WORLD_TIMEOUT_S, Step, Summary, gloo_world, interleave, summary
from dshard.bench.models import GPT, Size
from dshard.bench.output import Output, table
from dshard.bench.plots import Bars
from dshard.errors import PlanError
from dshard.planner import Plan
from dshard.planner.profiles import Training
from dshard.planning.links import measure_links
from dshard.planning.plan import Profile
from dshard.tensor.meshes import default_mesh
from dshard.testing import counted_peak

_SINGLES = ("ddp", "zero1", "zero2", "keep", "full")
_BATCH, _TOKENS = 4, 64
_NUM_LIMITS = 5
_NUM_WARMUPS = 3


@dataclass(frozen=True, slots=True)
class Planned:
    """What one limit gave.

    Args:
        limit_bytes: The limit.
        plan: As JSON.
        text: In one line.
    """

    limit_bytes: int
    plan: str
    text: str


def _ids(size: Size) -> Tensor:
    return torch.randint(0, size.vocab, (_BATCH, _TOKENS), generator=torch.Generator().manual_seed(dist.get_rank()))


def _loss(logits: Tensor) -> Tensor:
    return logits.square().mean()


def _model(size: Size) -> GPT:
    torch.manual_seed(0)
    return GPT(size)


def _plans(size: Size, num_limits: int) -> tuple[list[Planned], dict[str, tuple[float, int]]]:
    """Plans at each limit, and predicted seconds and bytes of each single strategy, of one set of measurements."""
    mesh = default_mesh()
    training = Training(step_bytes_per_element=8, steps_together=False)  # AdamW's default on CPU
    profile = Profile(_model(size), (_ids(size),), device=None, training=training, loss_of=_loss, mesh=mesh)
    with tempfile.TemporaryDirectory() as folder:
        cluster = measure_links(mesh, path=Path(folder) / "links.json")
    given = {name: profile.given(cluster, name) for name in _SINGLES}
    low, high = given["full"].peak_bytes, given["ddp"].peak_bytes
    found = []
    for i in range(num_limits):
        limit = low + (high - low) * i // max(num_limits - 1, 1)
        plan = profile.plan(cluster, memory=limit)
        found.append(Planned(limit, plan.to_json(), str(plan)))
    return found, {name: (plan.step_s, plan.peak_bytes) for name, plan in given.items()}


@dataclass(frozen=True, slots=True)
class _Trained:
    """A model that trains, its optimizer and a step of both."""

    model: Any
    optimizer: torch.optim.Optimizer
    step: Step


def _trained(size: Size, choice: str) -> _Trained:
    """A model under a single strategy, or a plan as JSON."""
    model: Any = _model(size)
    options = {"strategy": choice} if choice in _SINGLES else {"plan": Plan.from_json(choice)}
    dshard.fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = _ids(size)

    def step() -> None:
        _loss(model(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return _Trained(model, optimizer, step)


def _times(size: Size, choices: Mapping[str, str], num_rounds: int) -> dict[str, Summary]:
    variants = {name: _trained(size, choice).step for name, choice in choices.items()}
    samples = interleave(variants, num_rounds=num_rounds, num_warmups=_NUM_WARMUPS)
    return {name: summary(some) for name, some in samples.items()}


def _peak(size: Size, choice: str) -> int:
    """Bytes counted in the third step."""
    trained = _trained(size, choice)
    for _ in range(2):
        trained.step()
    with counted_peak(trained.model, trained.optimizer) as counted:
        trained.step()
    return counted.num_bytes


def run(output: Output, *, num_ranks: int, num_rounds: int, size: Size) -> None:
    """Measure, print and write `plan_gloo_N`; times are rank 0's, peaks those of the rank that has most."""
    with gloo_world(num_ranks) as world:
        plans, predicted = world.run(_plans, size, _NUM_LIMITS, timeout_s=WORLD_TIMEOUT_S)[0]
        names = {plan.plan: f"plan {i + 1}" for i, plan in reversed(list(enumerate(plans)))}  # equal ones by the first
        choices = {name: name for name in _SINGLES} | {name: plan for plan, name in names.items()}
        times = world.run(_times, size, choices, num_rounds, timeout_s=WORLD_TIMEOUT_S)[0]
        counted = {name: world.run(_peak, size, choice, timeout_s=WORLD_TIMEOUT_S) for name, choice in choices.items()}
    peaks = {name: max(of_ranks) for name, of_ranks in counted.items()}
    rows = [_row(plan, names[plan.plan], times, peaks, predicted) for plan in plans]
    singles = {
        name: {"predicted_ms": predicted[name][0] * 1e3, "predicted_mb": predicted[name][1] / 1e6, **times[name]}
        | {"counted_mb": peaks[name] / 1e6}
        for name in _SINGLES
    }
    _print(rows, singles, num_ranks)
    facts = output.header(num_ranks=num_ranks, batch=_BATCH, tokens=_TOKENS)
    bars = {f"{row['limit_mb']:.0f} MB": {"plan": row["measured_ms"], "best single": row["best_ms"]} for row in rows}
    panel = Bars("a step by limit", "ms, median", bars)
    output.write(f"plan_gloo_{num_ranks}", {"header": facts, "limits": rows, "singles": singles}, [panel])


def _row(
    planned: Planned,
    name: str,
    times: Mapping[str, Summary],
    peaks: Mapping[str, int],
    predicted: Mapping[str, tuple[float, int]],
) -> dict[str, Any]:
    """A plan beside the single strategies that are predicted to fit."""
    plan = Plan.from_json(planned.plan)
    fitting = [single for single, (_, peak) in predicted.items() if peak <= planned.limit_bytes]
    if not fitting:
        raise PlanError("bench: no single strategy fits into the least limit. Report this as a bug.")
    best = min(fitting, key=lambda single: times[single]["median_ms"] or 0.0)
    measured, best_ms = times[name]["median_ms"] or 0.0, times[best]["median_ms"] or 0.0
    return {
        "limit_mb": planned.limit_bytes / 1e6,
        "plan": planned.text,
        "predicted_ms": plan.step_s * 1e3,
        "measured_ms": measured,
        "time_error": plan.step_s * 1e3 / measured - 1,
        "best_single": best,
        "best_ms": best_ms,
        "of_best": measured / best_ms,
        "predicted_mb": plan.peak_bytes / 1e6,
        "counted_mb": peaks[name] / 1e6,
        "peak_error": plan.peak_bytes / peaks[name] - 1,
    }


def _print(rows: list[dict[str, Any]], singles: Mapping[str, Mapping[str, Any]], num_ranks: int) -> None:
    columns = [
        "predicted ms",
        "measured",
        "error",
        "best single",
        "its ms",
        "of it",
        "predicted MB",
        "counted",
        "error",
    ]
    cells = {
        f"{row['limit_mb']:.1f} MB": [
            f"{row['predicted_ms']:.1f}",
            f"{row['measured_ms']:.1f}",
            f"{row['time_error']:+.0%}",
            row["best_single"],
            f"{row['best_ms']:.1f}",
            f"{row['of_best']:.2f}",
            f"{row['predicted_mb']:.1f}",
            f"{row['counted_mb']:.1f}",
            f"{row['peak_error']:+.1%}",
        ]
        for row in rows
    }
    print(f"\nplans by limit, {num_ranks} gloo ranks\n{table(columns, cells)}\n")
    for row in rows:
        print(f"{row['limit_mb']:.1f} MB: {row['plan']}")
    keys = ["predicted_ms", "median_ms", "predicted_mb", "counted_mb"]
    single_cells = {name: [f"{row[key]:.1f}" for key in keys] for name, row in singles.items()}
    print(f"\nsingle strategies\n{table(keys, single_cells)}", flush=True)
