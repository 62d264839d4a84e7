"""Plans at five memory limits, run for real: beside every single strategy, and beside what was predicted.

The limits lie between the predicted peaks of `full` and of `ddp` everywhere; with activation checkpointing as a
choice, between that of `full` with all of it and that of `ddp` with none. Times are of one interleaved run; peaks are
counted in a step of their own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
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
from dshard.planner.costs import CHECKPOINTING, UnitKind
from dshard.planner.profiles import Training
from dshard.planner.tables import named
from dshard.planning.links import measure_links
from dshard.planning.profile import Profile
from dshard.policies import Strategy
from dshard.tensor.meshes import default_mesh
from tests.kit.counted import counted_peak

_SINGLES = ("ddp", "zero1", "zero2", "keep", "full")
_BATCH, _TOKENS = 4, 64
_MORE_TOKENS = 256  # where activations are to count
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

    @classmethod
    def of(cls, limit_bytes: int, plan: Plan) -> Planned:
        """A plan for it."""
        return cls(limit_bytes, plan.to_json(), str(plan))


def _ids(size: Size, num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, size.vocab, (_BATCH, num_tokens), generator=generator)


def _loss(logits: Tensor) -> Tensor:
    return logits.square().mean()


def _model(size: Size) -> GPT:
    torch.manual_seed(0)
    return GPT(size)


def _plans(size: Size, num_tokens: int, kinds: Sequence[str]) -> tuple[list[Planned], dict[str, Planned]]:
    """Plans at each limit, and each single strategy with each kind of checkpointing, of one set of measurements."""
    mesh = default_mesh()
    training = Training(step_bytes_per_element=8, steps_together=False)  # AdamW's default on CPU
    given = _model(size), (_ids(size, num_tokens),)
    profile = Profile(*given, device=None, training=training, loss_of=_loss, mesh=mesh, checkpointing=kinds)
    with tempfile.TemporaryDirectory() as folder:
        cluster = measure_links(mesh, path=Path(folder) / "links.json")
    singles = {
        named(Strategy.of(name), UnitKind(kind)): profile.given(cluster, name, checkpointing=kind)
        for kind in kinds
        for name in _SINGLES
    }
    low, high = singles[named(Strategy.of("full"), UnitKind(kinds[-1]))].peak_bytes, singles["ddp"].peak_bytes
    limits = [low + (high - low) * i // (_NUM_LIMITS - 1) for i in range(_NUM_LIMITS)]
    plans = [Planned.of(limit, profile.plan(cluster, memory=limit)) for limit in limits]
    return plans, {name: Planned.of(plan.peak_bytes, plan) for name, plan in singles.items()}


@dataclass(frozen=True, slots=True)
class _Trained:
    """A model that trains, its optimizer and a step of both."""

    model: Any
    optimizer: torch.optim.Optimizer
    step: Step


def _trained(size: Size, num_tokens: int, plan: str) -> _Trained:
    """A model under a plan."""
    model: Any = _model(size)
    dshard.fully_shard(model, plan=Plan.from_json(plan))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = _ids(size, num_tokens)

    def step() -> None:
        _loss(model(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return _Trained(model, optimizer, step)


def _times(size: Size, num_tokens: int, plans: Mapping[str, str], num_rounds: int) -> dict[str, Summary]:
    variants = {name: _trained(size, num_tokens, plan).step for name, plan in plans.items()}
    samples = interleave(variants, num_rounds=num_rounds, num_warmups=_NUM_WARMUPS)
    return {name: summary(some) for name, some in samples.items()}


def _peak(size: Size, num_tokens: int, plan: str) -> int:
    """Bytes counted in the third step."""
    trained = _trained(size, num_tokens, plan)
    for _ in range(2):
        trained.step()
    with counted_peak(trained.model, trained.optimizer) as counted:
        trained.step()
    return counted.num_bytes


def run(output: Output, *, num_ranks: int, num_rounds: int, size: Size, with_checkpointing: bool = False) -> None:
    """Measure, print and write `plan_gloo_N`; times are rank 0's, peaks those of the rank that has most.

    Args:
        output: Where to.
        num_ranks: Of gloo.
        num_rounds: Of the interleaved run.
        size: Of the model.
        with_checkpointing: Whether the planner may have each unit computed again, in part or whole.
    """
    num_tokens, kinds = (_MORE_TOKENS, CHECKPOINTING) if with_checkpointing else (_TOKENS, CHECKPOINTING[:1])
    with gloo_world(num_ranks) as world:
        plans, singles = world.run(_plans, size, num_tokens, kinds, timeout_s=WORLD_TIMEOUT_S)[0]
        names = {plan.plan: f"plan {i + 1}" for i, plan in reversed(list(enumerate(plans)))}  # equal ones by the first
        given = {name: single.plan for name, single in singles.items()} | {name: plan for plan, name in names.items()}
        times = world.run(_times, size, num_tokens, given, num_rounds, timeout_s=WORLD_TIMEOUT_S)[0]
        counted = {
            name: max(world.run(_peak, size, num_tokens, plan, timeout_s=WORLD_TIMEOUT_S))
            for name, plan in given.items()
        }
    predicted = {name: Plan.from_json(single.plan) for name, single in singles.items()}
    rows = [_row(plan, names[plan.plan], times, counted, predicted) for plan in plans]
    of_singles = {
        name: {"predicted_ms": plan.step_s * 1e3, "predicted_mb": plan.peak_bytes / 1e6, **times[name]}
        | {"counted_mb": counted[name] / 1e6}
        for name, plan in predicted.items()
    }
    _print(rows, of_singles, num_ranks)
    facts = output.header(num_ranks=num_ranks, batch=_BATCH, tokens=num_tokens)
    bars = {f"{row['limit_mb']:.0f} MB": {"plan": row["measured_ms"], "best single": row["best_ms"]} for row in rows}
    panel = Bars("a step by limit", "ms, median", bars)
    name = "plan_checkpointing" if with_checkpointing else "plan"
    output.write(f"{name}_gloo_{num_ranks}", {"header": facts, "limits": rows, "singles": of_singles}, [panel])


def _row(
    planned: Planned,
    name: str,
    times: Mapping[str, Summary],
    peaks: Mapping[str, int],
    predicted: Mapping[str, Plan],
) -> dict[str, Any]:
    """A plan beside the single strategies that are predicted to fit."""
    plan = Plan.from_json(planned.plan)
    fitting = [name for name, single in predicted.items() if single.peak_bytes <= planned.limit_bytes]
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
        "quartiles_ms": [[times[each]["q1_ms"], times[each]["q3_ms"]] for each in (name, best)],
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
