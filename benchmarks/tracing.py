"""What `dshard.trace` and a flight record take of a step, beside one without, and one of a library that has neither.

    OMP_NUM_THREADS=1 python -m benchmarks.tracing [--ranks 2] [--rounds 40] [--out benchmarks/results]

All are steps of one GPT on gloo ranks, interleaved. `without` has no look at who watches: `profiled` is patched away
where it is called. `recorded` keeps a flight record in a folder of its own, `memory` also counts memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import dshard
from dshard.bench.common import WORLD_TIMEOUT_S, Sample, Step, gloo_world, interleave, summary
from dshard.bench.models import GPT, ROOT_ALONE, Size, shard, training_step
from dshard.bench.output import Output, timing_table
from dshard.bench.plots import Bars
from dshard.collectives import flight
from dshard.gradients import reduction
from dshard.slices import slices
from dshard.units import copies

SIZES = {"8 blocks of 512": (Size(), 4, 64), "16 blocks of 64": (Size(vocab=256, width=64, layers=16, heads=4), 2, 16)}
NUM_WARMUPS = 3


@contextmanager
def without_looks() -> Iterator[None]:
    """Nobody looks whether anybody watches."""
    places: list[Any] = [reduction, slices, copies]
    whole = [place.profiled for place in places]
    for place in places:
        place.profiled = lambda *_: nullcontext()
    try:
        yield
    finally:
        for place, profiled in zip(places, whole, strict=True):
            place.profiled = profiled


@contextmanager
def recorded() -> Iterator[None]:
    """As with `DSHARD_FLIGHT_RECORD`; the file is made once."""
    with tempfile.TemporaryDirectory() as folder:
        flight._State.folder = folder
        try:
            yield
        finally:
            flight._State.folder = ""


def run(size: Size, batch: int, tokens: int, num_rounds: int) -> dict[str, list[Sample]]:
    """Samples on this rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = shard(ROOT_ALONE, GPT(size), torch.device("cpu"))
    ids = torch.randint(0, size.vocab, (batch, tokens + 1))
    step = training_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4), ids)

    def within(context: Any) -> Step:
        def run_step() -> None:
            with context():
                step()

        return run_step

    variants = {
        "without": within(without_looks),
        "off": within(nullcontext),
        "on": within(lambda: dshard.trace(model)),
        "recorded": within(recorded),
        "memory": within(lambda: dshard.trace(model, memory=True)),
    }
    return interleave(variants, num_rounds=num_rounds, num_warmups=NUM_WARMUPS)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="What a trace takes of a step.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, help="folder for results, which exists")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name, (size, batch, tokens) in SIZES.items():
        with gloo_world(args.ranks) as world:
            samples = world.run(run, size, batch, tokens, args.rounds, timeout_s=WORLD_TIMEOUT_S)[0]
        rows = {variant: summary(each) for variant, each in samples.items()}
        least = {variant: 1e3 * min(sample.cpu_s for sample in each) for variant, each in samples.items()}
        results[name] = {"rows": rows, "least CPU ms": least}
        print(f"\n{name}\n{timing_table(rows)}")
        for variant in ("off", "on", "recorded", "memory"):
            wall = (rows[variant]["median_ms"] or 0) / (rows["without"]["median_ms"] or 1) - 1
            print(
                f"{variant}: {wall:+.1%} of the median step, {least[variant] / least['without'] - 1:+.1%} of CPU time"
            )
    output = Output(f"python -m benchmarks.tracing {' '.join(sys.argv[1:])}".strip(), args.out)
    bars = {name: {k: row["median_ms"] for k, row in each["rows"].items()} for name, each in results.items()}
    panels = [Bars("a training step", "ms", bars)]
    output.write(f"tracing_gloo_{args.ranks}", {"header": output.header(ranks=args.ranks), **results}, panels)


if __name__ == "__main__":
    main()
