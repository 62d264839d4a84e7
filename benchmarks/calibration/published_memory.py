"""Peaks of memory that were published, beside what is predicted for the same runs.

`python -m benchmarks.calibration.published` prints the table; `python -m benchmarks.calibration.published_memory`
prints it alone, of the published runs or of another file.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import dshard
from benchmarks.calibration.fitting import RUNS
from benchmarks.calibration.framework import Decoder, Recipe, Sizes
from dshard.planner import ModelCosts, Plan, Training, cluster_of

_UNKNOWN = "offload", "lora", "8-bit"  # what no plan knows
_KINDS = {"max active": "live_bytes", "max reserved": "reserved_bytes", "max allocated": "live_bytes"}


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A run whose peak was published.

    Attributes:
        name: Of the run.
        kind: Which of a `MemoryForecast`'s figures was published.
        published_bytes: The most memory that it took.
        predicted_bytes: The same, predicted.
        what: What the run did, as far as it costs memory.
    """

    name: str
    kind: str
    published_bytes: int
    predicted_bytes: int
    what: str

    @property
    def error(self) -> float:
        """By which part of what was published the prediction is too high; negative if it is too low."""
        return self.predicted_bytes / self.published_bytes - 1


def memory_rows(path: Path = RUNS) -> list[MemoryRow]:
    """Every run of a file whose peak was published, with the prediction for it."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    found, said = [], dict[str, str]()
    for row in rows:
        is_further = row["notes"].startswith("cumulative")  # what was added stays for the rows that follow
        notes = said.get(row["source"], "") * is_further + row["notes"].lower()
        said[row["source"]] = notes
        is_known = row["mlp"] == "swiglu" and row["mem_kind"] in _KINDS and not any(each in notes for each in _UNKNOWN)
        if not row["peak_mem_gib"] or not is_known:
            continue
        recipe = Recipe(
            is_compiled=row["compile"] == "1",
            is_chunked="chunked cross entropy" in notes,
            checkpointing={"every 2": "second"}.get(row["act_ckpt"], row["act_ckpt"]),
            steps_early="step into backward" in notes,
        )
        plan = plan_of(row, recipe)
        predicted = int(getattr(plan.memory_seen, _KINDS[row["mem_kind"]]))
        published = int(float(row["peak_mem_gib"]) * 2**30)
        found.append(MemoryRow(row["id"], row["mem_kind"], published, predicted, str(recipe)))
    return found


def plan_of(row: dict[str, str], recipe: Recipe) -> Plan:
    """The plan that a run is: its model, traced, under its sharding."""
    ranks, is_pure = int(row["n_gpus"]), row["precision"] == "bf16 pure" and int(row["n_gpus"]) == 1
    with torch.device("meta"):
        model = Decoder(Sizes.of(row), recipe)
    if is_pure:
        model.to(torch.bfloat16).angles = model.angles.float()
    training = Training(
        compute_dtype=torch.bfloat16,
        reduce_dtype=torch.float32 if row["precision"] == "bf16 fp32 reduce" else None,
        state_bytes_per_element=4 if is_pure else 8,
        step_bytes_per_element=0,  # torchtune's and torchtitan's AdamW is fused
        tokens_per_sample=int(row["seq"]),
    )
    sample = torch.empty(int(row["micro_batch"]), int(row["seq"]), dtype=torch.int64, device="meta")
    sharding = {"hybrid": f"hybrid({row['gpus_per_node']})"}.get(row["sharding"], row["sharding"])
    strategy = "ddp" if ranks == 1 else sharding
    cluster = cluster_of(row["gpu"], ranks)
    found = dshard.plan(
        model, sample, cluster=cluster, device=row["gpu"], memory="10TiB", strategies=strategy, training=training
    )
    return replace(found, model=_stepped_early(found.model)) if recipe.steps_early else found


def _stepped_early(model: ModelCosts) -> ModelCosts:
    """The same where of each unit only the largest gradient is there at a time, and no reduced ones."""
    units = []
    for unit in model.units:
        largest = max(param.numel * param.gather_itemsize for param in unit.params)
        late = unit.gradients_transient_bytes
        late = unit.backward_transient_bytes if late is None else late
        params = tuple(replace(param, grad_itemsize=0) for param in unit.params)
        units.append(replace(unit, params=params, gradients_transient_bytes=late + largest))
    return replace(model, units=tuple(units))


def memory_table(rows: Sequence[MemoryRow]) -> list[str]:
    """As Markdown: one line per run whose peak was published."""
    lines = ["| run | what it did | kind of peak | published | predicted | error |", "|---" * 6 + "|"]
    for row in rows:
        published, predicted = f"{row.published_bytes / 2**30:.1f} GiB", f"{row.predicted_bytes / 2**30:.2f} GiB"
        lines.append(f"| {row.name} | {row.what} | {row.kind} | {published} | {predicted} | {row.error:+.1%} |")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, default=[RUNS], help="tables of runs (the published ones)")
    print("\n".join(memory_table([row for path in parser.parse_args(argv).runs for row in memory_rows(path)])))


if __name__ == "__main__":
    main()
