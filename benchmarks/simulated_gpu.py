"""A training step as a GPU would run it, **predicted**: dshard beside FSDP2 on a simulated accelerator, nothing timed.

    python -m benchmarks.simulated_gpu [--ranks 8] [--batch 4] [--tokens 2048] [--tiny] [--out benchmarks/results]

One process plays one rank: it issues all of a step's kernels, collectives, marks and waits to the device of
``tests/accelerator``, which computes none of it but counts memory as CUDA's allocator does.
`tests.accelerator.timeline` then lays what was issued out in time, under a table of durations of an H100. Nothing of
this has run on a GPU. Needs a C++ compiler and ninja.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.measure import Summary
from benchmarks.models import ROOT_ALONE, Llama, LlamaConfig, shard, training_step
from benchmarks.output import Bars, Output, table
from tests.accelerator import device
from tests.accelerator.timeline import H100, Record, Timeline, timeline

KINDS = ("FSDP2", "dshard", ROOT_ALONE)
TINY = LlamaConfig(vocab=64, width=32, layers=3, heads=4, kv_heads=2, hidden=64)
NUM_WARMUPS = 3
COLUMNS = {  # of the table: key, factor, decimals
    "step ms": ("step_s", 1e3, 2),
    "exposed ms": ("exposed_s", 1e3, 3),
    "compute ms": ("busy_s", 1e3, 2),
    "host ms": ("host_s", 1e3, 2),
    "kernels": ("num_kernels", 1.0, 0),
    "copies": ("num_copies", 1.0, 0),
    "collectives": ("num_collectives", 1.0, 0),
    "marks, waits": ("num_orders", 1.0, 0),
    "peak GB": ("peak_allocated_bytes", 1e-9, 3),
    "reserved GB": ("peak_reserved_bytes", 1e-9, 3),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model and what shards it; all that a process needs to know."""

    kind: str
    config: LlamaConfig
    num_ranks: int
    batch: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Issued:
    """What one step has issued, and the most memory that it took."""

    records: list[Record]
    peak_allocated_bytes: int
    peak_reserved_bytes: int


def issue(case: Case) -> Issued:
    """Issue some steps on one rank of many, and keep the last one; for a process of its own."""
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with device.dry_world(case.num_ranks) as accelerator:
        sim = torch.device("sim")
        with sim:
            plain = Llama(case.config)
        model = shard(case.kind, plain, sim, policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        ids = torch.randint(0, case.config.vocab, (case.batch, case.tokens + 1), device=sim)
        step = training_step(model, optimizer, ids)
        step()
        gc.collect()
        accelerator.empty_cache()  # the whole model was there while it was cut
        for _ in range(NUM_WARMUPS - 1):
            step()
        accelerator.reset_peaks()
        accelerator.keep_records(on=True)
        step()
        accelerator.keep_records(on=False)
        stats = accelerator.stats()
        records = [Record(*record) for record in accelerator.take_records()]
        return Issued(records, stats["peak_allocated_bytes"], stats["peak_reserved_bytes"])


def issued_apart(case: Case) -> Issued:
    """`issue` in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(issue, case).result()


def row_of(issued: Issued, line: Timeline) -> Summary:
    """The numbers of a case."""
    return {
        **{name: getattr(line, name) for name in line.__slots__ if name not in ("stalls", "spans")},
        "starved_s": line.starved_s,
        "num_orders": sum(record.kind in ("mark", "wait") for record in issued.records),
        "peak_allocated_bytes": issued.peak_allocated_bytes,
        "peak_reserved_bytes": issued.peak_reserved_bytes,
    }


def ratios(ours: Summary, theirs: Summary) -> dict[str, float | None]:
    """Numbers of one library over another's; None where that is zero."""
    return {key: (ours[key] or 0) / other if (other := theirs[key]) else None for key, _, _ in COLUMNS.values()}


def text_of(rows: Mapping[str, Summary]) -> str:
    """The table of a case."""
    cells = {
        kind: [f"{(row[key] or 0) * factor:.{digits}f}" for key, factor, digits in COLUMNS.values()]
        for kind, row in rows.items()
    }
    for kind in KINDS[1:]:
        found = ratios(rows[kind], rows["FSDP2"])
        texts = ["-" if found[key] is None else f"{found[key]:.3f}" for key, _, _ in COLUMNS.values()]
        cells[f"{kind} / FSDP2"] = texts
    return table(list(COLUMNS), cells)


def stalls_of(line: Timeline, at_least_s: float = 20e-6) -> str:
    """Where the computation waited for communication."""
    return "\n".join(
        f"    at {1e3 * stall.at_s:7.2f} ms, for {1e3 * stall.waited_s:6.3f} ms: {stall.name} {stall.label}"
        for stall in line.stalls
        if stall.waited_s >= at_least_s
    )


def main() -> None:
    """Issue, predict, print, write."""
    parser = argparse.ArgumentParser(description="A training step as a GPU would run it, predicted.")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step (%(default)s)")
    parser.add_argument("--tokens", type=int, default=2048, help="per sequence (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a model of a few features, to try it")
    parser.add_argument("--stalls", action="store_true", help="say where the computation waits for communication")
    parser.add_argument("--out", type=Path, help="folder for results, which exists")
    args = parser.parse_args()
    config = TINY if args.tiny else LlamaConfig()
    results: dict[str, dict[str, Summary]] = {}
    print(f"PREDICTIONS by a simulation of {H100.name}: nothing of it was timed or has run on a GPU")
    for checkpointing in (False, True):
        rows: dict[str, Summary] = {}
        stalls: dict[str, str] = {}
        for kind in KINDS:
            case = Case(kind, replace(config, checkpointing=checkpointing), args.ranks, args.batch, args.tokens)
            issued = issued_apart(case)
            line = timeline(issued.records, H100)
            rows[kind], stalls[kind] = row_of(issued, line), stalls_of(line)
        name = "checkpointing" if checkpointing else "no checkpointing"
        results[name] = rows
        print(f"\n{name}, {args.ranks} ranks, {args.batch} x {args.tokens} tokens each\n{text_of(rows)}", flush=True)
        for kind, text in stalls.items() if args.stalls else ():
            print(f"  {kind} waits:\n{text}")
    output = Output(f"python -m benchmarks.simulated_gpu {' '.join(sys.argv[1:])}".strip(), args.out)
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in Llama(config).parameters())
    facts: dict[str, Any] = {"num_parameters": num_parameters, "ranks": args.ranks, "batch": args.batch}
    facts |= {"tokens": args.tokens, "param_dtype": "bfloat16", "reduce_dtype": "float32", "durations": asdict(H100)}
    header = output.header(what="predictions of a simulation; nothing was timed on a GPU", **facts)
    panels = [
        Bars(
            title, unit, {name: {k: _scaled(row[key], by) for k, row in rows.items()} for name, rows in results.items()}
        )
        for title, unit, key, by in (
            ("a training step, predicted", "ms", "step_s", 1e3),
            ("exposed communication, predicted", "ms", "exposed_s", 1e3),
            ("peak of allocated memory, predicted", "GB", "peak_allocated_bytes", 1e-9),
        )
    ]
    all_ratios = {
        name: {kind: ratios(rows[kind], rows["FSDP2"]) for kind in KINDS[1:]} for name, rows in results.items()
    }
    output.write("simulated_gpu", {"header": header, "rows": results, "ratios": all_ratios}, panels)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


if __name__ == "__main__":
    main()
