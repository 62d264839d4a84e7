"""Plans at five memory limits, run for real: beside every single strategy, and beside their predictions.

The limits lie between the predicted peaks of `full` and of `ddp` everywhere; with activation checkpointing as a
choice, between that of `full` with all of it and that of `ddp` with none. Times are of one interleaved run; peaks are
counted in a step of their own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import dshard
from benchmarks.measure import Step, Summary, on_ranks, timed
from benchmarks.models import GPT, Size
from benchmarks.output import Bars, Output, table
from dshard.planner import Plan
from dshard.planner.costs import CHECKPOINTING, UnitKind
from dshard.planner.profiles import Training
from dshard.planner.tables import named
from dshard.planning.links import measure_links
from dshard.planning.plan import Profile
from dshard.policies import Strategy
from dshard.tensor.meshes import default_mesh
from tests.kit.counted import counted_peak

_SINGLES = ("ddp", "zero1", "zero2", "keep", "full")
_NUM_LIMITS = 5


def _ids(size: Size, num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, size.vocab, (4, num_tokens), generator=generator)


def _loss(logits: Tensor) -> Tensor:
    return logits.square().mean()


def _model(size: Size) -> GPT:
    torch.manual_seed(0)
    return GPT(size)


def _plans(size: Size, num_tokens: int, kinds: Sequence[str]) -> tuple[list[tuple[int, str]], dict[str, str]]:
    """Limits with their plans, and each single strategy with each kind of checkpointing, as JSON.

    All are of one set of measurements.
    """
    mesh = default_mesh()
    training = Training(step_bytes_per_element=12, steps_together=False)  # AdamW's default on CPU
    sample = (_ids(size, num_tokens),)
    profile = Profile(
        _model(size), sample, device=None, training=training, loss_of=_loss, mesh=mesh, checkpointing=kinds
    )
    with tempfile.TemporaryDirectory() as folder:
        cluster = measure_links(mesh, path=Path(folder) / "links.json")
    singles = {
        named(Strategy.of(name), UnitKind(kind)): profile.given(cluster, name, checkpointing=kind)
        for kind in kinds
        for name in _SINGLES
    }
    low, high = singles[named(Strategy.of("full"), UnitKind(kinds[-1]))].peak_bytes, singles["ddp"].peak_bytes
    limits = [low + (high - low) * i // (_NUM_LIMITS - 1) for i in range(_NUM_LIMITS)]
    plans = [(limit, profile.plan(cluster, memory=limit).to_json()) for limit in limits]
    return plans, {name: plan.to_json() for name, plan in singles.items()}


def _trained(size: Size, num_tokens: int, plan: str) -> tuple[Any, torch.optim.Optimizer, Step]:
    """A model under a plan, its optimizer and a training step of both."""
    model: Any = _model(size)
    dshard.fully_shard(model, plan=Plan.from_json(plan))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = _ids(size, num_tokens)

    def step() -> None:
        _loss(model(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def _times(size: Size, num_tokens: int, plans: Mapping[str, str], num_rounds: int) -> dict[str, Summary]:
    return timed({name: _trained(size, num_tokens, plan)[2] for name, plan in plans.items()}, num_rounds=num_rounds)


def _peak(size: Size, num_tokens: int, plan: str) -> int:
    """Bytes counted in the third step."""
    model, optimizer, step = _trained(size, num_tokens, plan)
    for _ in range(2):
        step()
    with counted_peak(model, optimizer) as counted:
        step()
    return counted.num_bytes


def _row(limit: int, plan: Plan, own: Mapping[str, Any], singles: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A plan beside the fastest single strategy of those that are predicted to fit."""
    best = min(
        (name for name, single in singles.items() if single["predicted_mb"] <= limit / 1e6),
        key=lambda name: singles[name]["median_ms"],
    )
    best_ms = singles[best]["median_ms"]
    return {
        "limit_mb": limit / 1e6,
        "plan": str(plan),
        "predicted_ms": plan.step_s * 1e3,
        "measured_ms": own["median_ms"],
        "time_error": plan.step_s * 1e3 / own["median_ms"] - 1,
        "best_single": best,
        "best_ms": best_ms,
        "of_best": own["median_ms"] / best_ms,
        "quartiles_ms": [[each["q1_ms"], each["q3_ms"]] for each in (own, singles[best])],
        "predicted_mb": plan.peak_bytes / 1e6,
        "counted_mb": own["counted_mb"],
        "peak_error": plan.peak_bytes / 1e6 / own["counted_mb"] - 1,
    }


def _print(rows: Sequence[Mapping[str, Any]], singles: Mapping[str, Mapping[str, Any]], num_ranks: int) -> None:
    formats = {
        "predicted_ms": ".1f",
        "measured_ms": ".1f",
        "time_error": "+.0%",
        "best_single": "",
        "best_ms": ".1f",
        "of_best": ".2f",
        "predicted_mb": ".1f",
        "counted_mb": ".1f",
        "peak_error": "+.1%",
    }
    cells = {f"{row['limit_mb']:.1f} MB": [format(row[key], how) for key, how in formats.items()] for row in rows}
    print(f"\nplans by limit, {num_ranks} gloo ranks\n{table([key.replace('_', ' ') for key in formats], cells)}\n")
    for row in rows:
        print(f"{row['limit_mb']:.1f} MB: {row['plan']}")
    keys = ["predicted_ms", "median_ms", "predicted_mb", "counted_mb"]
    single_cells = {name: [f"{row[key]:.1f}" for key in keys] for name, row in singles.items()}
    print(f"\nsingle strategies\n{table(keys, single_cells)}", flush=True)


def run(
    output: Output,
    *,
    ranks: int = 2,
    rounds: int = 12,
    layers: int = 6,
    width: int = 256,
    checkpointing: bool = False,
) -> None:
    """Plans at five memory limits beside every single strategy and beside their predictions, over gloo.

    Args:
        output: Gets `plan_gloo_N` or `plan_checkpointing_gloo_N`; times are rank 0's, peaks the largest of all ranks.
        ranks: Processes.
        rounds: Samples per variant.
        layers: Of the GPT.
        width: Of the GPT.
        checkpointing: Whether sequences are longer, and the planner may have each unit recomputed, in part or whole.
    """
    size = Size(layers=layers, width=width)
    num_tokens, kinds = (256, CHECKPOINTING) if checkpointing else (64, CHECKPOINTING[:1])
    plans, singles = on_ranks(ranks, _plans, size, num_tokens, kinds)[0]
    names = {text: f"plan {i + 1}" for i, (_, text) in reversed(list(enumerate(plans)))}  # equal plans share a name
    given = singles | {name: text for text, name in names.items()}
    found: dict[str, dict[str, Any]] = dict(on_ranks(ranks, _times, size, num_tokens, given, rounds)[0])
    for name, text in given.items():
        plan = Plan.from_json(text)
        predicted = {"predicted_ms": plan.step_s * 1e3, "predicted_mb": plan.peak_bytes / 1e6}
        found[name] |= predicted | {"counted_mb": max(on_ranks(ranks, _peak, size, num_tokens, text)) / 1e6}
    of_singles = {name: found[name] for name in singles}
    rows = [_row(limit, Plan.from_json(text), found[names[text]], of_singles) for limit, text in plans]
    _print(rows, of_singles, ranks)
    facts = output.header(num_ranks=ranks, batch=4, tokens=num_tokens)
    bars = {f"{row['limit_mb']:.0f} MB": {"plan": row["measured_ms"], "best single": row["best_ms"]} for row in rows}
    panel = Bars("a step by limit", "ms, median", bars)
    name = "plan_checkpointing" if checkpointing else "plan"
    output.write(f"{name}_gloo_{ranks}", {"header": facts, "limits": rows, "singles": of_singles}, [panel])
