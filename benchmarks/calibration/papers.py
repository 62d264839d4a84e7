"""Runs of PyTorch FSDP in papers, simulated beside the figures in there, with one set of constants and no profile.

```console
$ python -m benchmarks.calibration.papers --out benchmarks/results/papers.json
```
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.calibration.t5 import t5_11b
from dshard.cli.models import preset
from dshard.planner import DEVICES, EFFICIENCY, Plan, Training, cluster_of
from dshard.planning.plan import Profile
from dshard.testing.training import checkpoint_blocks

_PAPER = "Zhao et al., PyTorch FSDP, VLDB 2023, 5.4"
_BLOG = "PyTorch blog, 14 March 2022"


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure and the run behind it.

    Args:
        name: Of the run.
        preset: Of the model.
        device: Name of it.
        gbit: Network of a host.
        world: Number of ranks.
        batch: Samples per rank.
        sequence: Tokens per sample.
        figure: What was published: TFLOPS per GPU; or by which part they fell since `since` ranks.
        source: Where.
        since: Number of ranks that the figure compares with.
        is_fitted: Whether the efficiency of computation was taken from this row.
        dtype: Of computations.
        state_bytes_per_element: Of the optimizer.
    """

    name: str
    preset: str
    device: str
    gbit: float
    world: int
    batch: int
    sequence: int
    figure: float
    source: str
    since: int | None = None
    is_fitted: bool = False
    dtype: str = "bfloat16"
    state_bytes_per_element: int = 8


def _mingpt(world: int, batch: int, figure: float) -> Row:
    is_fitted = (world, batch) == (512, 2)
    return Row("minGPT-175B", "gpt3-175b", "a100-80g", 2000, world, batch, 2048, figure, _PAPER, is_fitted=is_fitted)


def _t5(batch: int) -> Row:
    return Row("T5-11B", "t5-11b", "a100-80g", 2000, 512, batch, 512, 0.07, _PAPER, since=8)


def _announced(name: str, preset: str, batch: int, sequence: int, figure: float) -> Row:
    sgd = {"dtype": "float16", "state_bytes_per_element": 0}
    return Row(name, preset, "a100-40g", 400, 128, batch, sequence, figure, _BLOG, **sgd)  # type: ignore[arg-type]


ROWS = (
    *(_mingpt(world, 1, 173) for world in (128, 192, 256, 384, 512)),
    *(_mingpt(world, 2, 186) for world in (128, 192, 256, 384, 512)),
    _t5(8),
    _t5(16),
    _announced("GPT-175B", "gpt3-175b", 20, 512, 159),
    _announced("GPT-1T", "gpt-1t", 4, 2048, 84),
)


@dataclass(frozen=True, slots=True)
class Found:
    """A row, what was predicted, and by which part of the published figure that is too large.

    The error of a figure that compares two numbers of ranks is the difference of both shares.
    """

    row: Row
    predicted: float
    error: float
    step_s: float
    exposed: float
    peak_bytes: int


def rows_of() -> list[Found]:
    """All rows; models are traced once for each length and batch.

    Communicates: nothing.
    """
    profiles: dict[tuple[Any, ...], Profile] = {}

    def simulate(row: Row, world: int) -> Plan:
        device = DEVICES[row.device]
        key = (row.preset, row.device, row.sequence, row.dtype, row.batch)
        if key not in profiles:
            with torch.device("meta"):
                model = t5_11b() if row.preset == "t5-11b" else preset(row.preset, row.sequence)
            checkpoint_blocks(model)
            sample = torch.empty(row.batch, row.sequence, dtype=torch.int64, device="meta")
            dtype = getattr(torch, row.dtype)
            training = Training(dtype, dtype, row.state_bytes_per_element, 0)
            profiles[key] = Profile(model, sample, device=device, training=training)
        cluster = cluster_of(device, world, between_hosts=row.gbit * 1e9 / 8)
        return profiles[key].given(cluster, "full")

    found = []
    for row in ROWS:
        plan = simulate(row, row.world)
        predicted, error = plan.tflops, plan.tflops / row.figure - 1
        if row.since is not None:
            predicted = 1 - plan.tflops / simulate(row, row.since).tflops
            error = predicted - row.figure
        found.append(Found(row, predicted, error, plan.step_s, plan.exposed_s / plan.step_s, plan.peak_bytes))
    return found


def table(found: list[Found]) -> str:
    """As Markdown: one line per row."""
    lines = [
        "| run | GPUs | batch | published | predicted | error | communication that waits | peak |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        row = each.row
        if row.since is None:
            figures = (f"{row.figure:.0f} TFLOPS", f"{each.predicted:.0f} TFLOPS", f"{each.error:+.0%}")
        else:
            figures = (
                f"-{row.figure:.0%} since {row.since}",
                f"{-each.predicted:+.1%}",
                f"{each.error * 100:+.1f} points",
            )
        error = f"{figures[2]} (fitted)" if row.is_fitted else figures[2]
        device = "40 GB" if row.device == "a100-40g" else "80 GB"
        cells = (f"{row.name}, {row.sequence} tokens", f"{row.world} x A100 {device}", str(row.batch), *figures[:2])
        lines.append(f"| {' | '.join(cells)} | {error} | {each.exposed:.1%} | {each.peak_bytes / 2**30:.1f} GiB |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table, and writes it as JSON with the constants behind it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args(argv)
    found = rows_of()
    print(table(found))
    if args.out is not None:
        record = {
            "command": "python -m benchmarks.calibration.papers",
            "torch": torch.__version__,
            "efficiency": asdict(EFFICIENCY),
            "rows": [asdict(each) for each in found],
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
