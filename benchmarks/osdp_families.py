"""OSDP's families of models, planned: `python benchmarks/osdp_families.py [--out FOLDER] [--model NAME]`.

Narrow and deep, wide and shallow, and of inconsistent widths, on 8 TITAN RTX with 8 and 16 GiB of memory each. All
figures are predicted for that described device; nothing runs on one. `--table FILE` prints the table of an earlier run.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dshard.cli.models import Block, GPTConfig
from dshard.errors import PlanError
from dshard.planner import (
    DEVICES,
    Cluster,
    ModelCosts,
    Training,
    UnitCosts,
    cluster_of,
    peak_bytes,
    solve_batch,
    step_time,
)
from dshard.planner.search import Chain, smallest_peak
from dshard.planning.plan import Profile
from dshard.policies import Strategy

NAME = "osdp_families"
DEVICE, NUM_RANKS, LIMITS = "titan-rtx", 8, (8 << 30, 16 << 30)
TOKENS, VOCAB, HEAD_WIDTH = 512, 50257, 128
BATCHES = (*range(1, 9), *range(10, 17, 2), 20, 24)
WHOLE = ("ddp", "zero1", "zero2", "keep", "full")
PLANS = {
    "plan": (*WHOLE, "split(2)", "split(4)", "split(8)"),
    "plan without split": WHOLE,
    "ddp or full": ("ddp", "full"),
}
ALIKE = {"all ddp": "ddp", "all keep": "keep", "all full": "full"}
OSDP, OSDP_BATCH = "OSDP's rule", "OSDP's rule, any batch"
MODELS = {
    "24 x 1024": ("narrow and deep", (1024,) * 24),
    "48 x 1536": ("narrow and deep", (1536,) * 48),
    "4 x 4096": ("wide and shallow", (4096,) * 4),
    "2 x 8192": ("wide and shallow", (8192,) * 2),
    "4 x 8192": ("wide and shallow", (8192,) * 4),
    "8 x 1024, 8 x 2048, 2 x 4096": ("inconsistent", (1024,) * 8 + (2048,) * 8 + (4096,) * 2),
    "1024 and 4096 in turn, 8 blocks": ("inconsistent", (1024, 4096) * 4),
}
MB = 2**20  # in which OSDP counts
GIB = 2**30


class Widths(nn.Module):
    """A GPT whose blocks have any widths; a block of another width than the one before begins with a linear map."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, widths[0])
        self.positions = nn.Embedding(TOKENS, widths[0])
        self.blocks = nn.ModuleList(map(_block, (widths[0], *widths), widths))
        self.norm = nn.LayerNorm(widths[-1])
        self.head = nn.Linear(widths[-1], VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits at every position."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _block(before: int, width: int) -> nn.Module:
    block = Block(GPTConfig(TOKENS, 1, width, width // HEAD_WIDTH))
    return block if before == width else nn.Sequential(nn.Linear(before, width, bias=False), block)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, by batch size, on a cluster with a limit."""

    costs: Mapping[int, ModelCosts]
    cluster: Cluster
    limit_bytes: int

    def row(self, batch: int, strategies: Sequence[Strategy]) -> dict[str, Any]:
        """What a choice is predicted to cost."""
        model = self.costs[batch]
        step_s, peak = step_time(model, strategies, self.cluster), peak_bytes(model, strategies, self.cluster)
        counts = Counter(map(str, strategies)).most_common()
        return {
            "batch": batch,
            "step_s": step_s,
            "samples_per_s": batch * NUM_RANKS / step_s,
            "peak_bytes": peak,
            "over_bytes": max(0, peak - self.limit_bytes),
            "strategies": ", ".join(f"{count} {strategy}" for strategy, count in counts),
        }

    def planned(self, names: Sequence[str]) -> dict[str, Any]:
        """The plan with the most samples per second, or the bytes that are missing at the least batch."""
        try:
            found = solve_batch(self.costs.__getitem__, self.costs, self.cluster, names, self.limit_bytes)
        except PlanError:
            known = [Strategy.of(name).on(NUM_RANKS) for name in names]
            chain = Chain.of(self.costs[BATCHES[0]], known, self.cluster)
            peak = smallest_peak(chain, is_exact=True).peak_bytes
            return {"peak_bytes": peak, "missing_bytes": peak - self.limit_bytes}
        return {
            **self.row(found.model.batch_size, found.solution.strategies),
            "upper_bound_samples_per_s": found.upper_bound,
        }

    def alike(self, name: str) -> dict[str, Any]:
        """The same strategy everywhere, at the batch with the most samples per second."""
        rows = [self.row(batch, (Strategy.of(name),) * len(model.units)) for batch, model in self.costs.items()]
        fitting = [row for row in rows if not row["over_bytes"]]
        if not fitting:
            return {"peak_bytes": rows[0]["peak_bytes"], "missing_bytes": rows[0]["over_bytes"]}
        return max(fitting, key=lambda row: row["samples_per_s"])

    def osdp(self, *, any_batch: bool) -> dict[str, Any]:
        """What OSDP's rule chooses, as our model sees it; at the least batch, or at that it expects most of."""
        found = {batch: osdp_rule(model, self.cluster, self.limit_bytes) for batch, model in self.costs.items()}
        fitting = {batch: choice for batch, choice in found.items() if choice.strategies}
        if not fitting:
            return {"counted_bytes": found[BATCHES[0]].counted_bytes, "finds_none": True}
        batch = min(fitting, key=lambda b: fitting[b].step_s / (b if any_batch else 1))
        choice = fitting[batch]
        counted = {"counted_bytes": choice.counted_bytes, "counted_step_s": choice.step_s}
        return {**self.row(batch, choice.strategies), **counted}


@dataclass(frozen=True, slots=True)
class OsdpChoice:
    """A strategy per unit, none if nothing fits, and what OSDP takes it to cost."""

    strategies: tuple[Strategy, ...]
    step_s: float
    counted_bytes: int


def osdp_rule(model: ModelCosts, cluster: Cluster, limit_bytes: int) -> OsdpChoice:
    """Replicate or shard each block: an exact knapsack on serial times, and on memory without transients, in whole MB.

    What is outside of blocks is not planned: its shards and a copy that stays, as in the root of its FSDP.
    """
    blocks = [i for i, unit in enumerate(model.units) if unit.name.startswith("blocks.")]
    others = [unit for i, unit in enumerate(model.units) if i not in blocks]
    used_mb = sum((_states(unit) // NUM_RANKS + unit.param_bytes + unit.activation_bytes) // MB for unit in others)
    step_s = sum(unit.forward_s + unit.backward_s for unit in model.units)
    step_s += sum(_serial_s(unit, cluster, num_gathers=1) for unit in others)
    weights, gains = [], []
    for unit in (model.units[i] for i in blocks):
        whole, shard = ((_states(unit) // n + unit.activation_bytes) // MB for n in (1, NUM_RANKS))
        sharded_s = _serial_s(unit, cluster, num_gathers=2)
        used_mb, step_s = used_mb + shard, step_s + sharded_s
        weights.append(whole - shard)
        gains.append(sharded_s - cluster.all_reduce_s(unit.grad_bytes))
    room = limit_bytes // MB - used_mb
    if room < 0:
        return OsdpChoice((), step_s, used_mb * MB)
    taken = knapsack(weights, gains, room)
    used_mb += sum(weights[i] for i in taken)
    replicated = {blocks[i] for i in taken}
    names = ["ddp" if i in replicated else "full" if i in blocks else "keep" for i in range(len(model.units))]
    return OsdpChoice(tuple(map(Strategy.of, names)), step_s - sum(gains[i] for i in taken), used_mb * MB)


def _states(unit: UnitCosts) -> int:
    return unit.param_bytes + unit.grad_bytes + unit.state_bytes


def _serial_s(unit: UnitCosts, cluster: Cluster, num_gathers: int) -> float:
    gather_s = cluster.all_gather_s(unit.gather_bytes, NUM_RANKS)
    return num_gathers * gather_s + cluster.reduce_scatter_s(unit.grad_bytes, NUM_RANKS)


def knapsack(weights: Sequence[int], gains: Sequence[float], room: int) -> list[int]:
    """The items with the largest sum of gains whose weights fit."""
    best = np.zeros(room + 1)
    better = []
    for weight, gain in zip(weights, gains, strict=True):
        with_it = np.full(room + 1, -np.inf)
        with_it[weight:] = best[: max(0, room + 1 - weight)] + gain
        better.append(with_it > best)
        best = np.maximum(best, with_it)
    taken = []
    for i in range(len(weights) - 1, -1, -1):
        if better[i][room]:
            taken.append(i)
            room -= weights[i]
    return taken[::-1]


def costs_of_model(widths: Sequence[int]) -> dict[int, ModelCosts]:
    """A model's costs at each batch size."""
    with torch.device("meta"):
        model, sample = Widths(widths), torch.empty(1, TOKENS, dtype=torch.int64)
    costs_at = Profile(model, sample, device=DEVICES[DEVICE], training=Training()).estimated(max(BATCHES))
    return {batch: costs_at(batch) for batch in BATCHES}


def run(names: Sequence[str]) -> dict[str, Any]:
    """All rows."""
    cluster = cluster_of(DEVICES[DEVICE], NUM_RANKS)
    rows = []
    for name in names:
        family, widths = MODELS[name]
        costs = costs_of_model(widths)
        num_params = sum(unit.numel for unit in costs[1].units)
        for limit_bytes in LIMITS:
            case = Case(costs, cluster, limit_bytes)
            found = {plan: case.planned(strategies) for plan, strategies in PLANS.items()}
            found |= {plan: case.alike(strategy) for plan, strategy in ALIKE.items()}
            found |= {OSDP: case.osdp(any_batch=False), OSDP_BATCH: case.osdp(any_batch=True)}
            rows.append(
                {"family": family, "model": name, "params": num_params, "limit_bytes": limit_bytes, "plans": found}
            )
    return {
        "command": f"python benchmarks/{NAME}.py",
        "torch": torch.__version__,
        "device": DEVICE,
        "source": cluster.source,
        "efficiency": DEVICES[DEVICE].efficiency.source,
        "num_ranks": NUM_RANKS,
        "tokens": TOKENS,
        "vocab": VOCAB,
        "dtype": "float32",
        "batches": BATCHES,
        "rows": rows,
    }


def table(content: Mapping[str, Any]) -> str:
    """Markdown: samples per second at a batch size, or the GiB that are missing."""
    plans = [*ALIKE, "ddp or full", "plan without split", "plan", OSDP, OSDP_BATCH]
    lines = ["| model | GiB | " + " | ".join(plans) + " | the plan is |", "|---" * (len(plans) + 3) + "|"]
    for row in content["rows"]:
        found = row["plans"]
        first = f"{row['family']}: {row['model']}, {row['params'] / 1e9:.2f} B"
        cells = [first, f"{row['limit_bytes'] / GIB:.0f}", *(_cell(found[plan]) for plan in plans)]
        lines.append("| " + " | ".join([*cells, found["plan"].get("strategies", "")]) + " |")
    return "\n".join(lines)


def _cell(found: Mapping[str, Any]) -> str:
    if "finds_none" in found:
        return "finds none"
    if "missing_bytes" in found:
        return f"does not fit: {found['missing_bytes'] / GIB:.2f} GiB missing"
    text = f"{found['samples_per_s']:.1f} at {found['batch']}"
    return f"{text}, {found['over_bytes'] / GIB:.2f} GiB over" if found["over_bytes"] else text


def main() -> None:
    """Print the table, and write the rows."""
    parser = argparse.ArgumentParser(description="OSDP's families of models, planned.")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"where {NAME}.json goes")
    parser.add_argument("--model", choices=MODELS, action="append", help="one of them; may be repeated (all)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of this file, and plan nothing")
    args = parser.parse_args()
    content = json.loads(args.table.read_text()) if args.table else run(args.model or list(MODELS))
    print(table(content))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{NAME}.json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"\n{time.process_time():.0f} s of CPU")


if __name__ == "__main__":
    main()
