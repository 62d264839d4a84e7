"""What every benchmark shares: a world of ranks, interleaved timing, a header and result files."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RESULTS = Path(__file__).parent / "results"


def header(**facts: Any) -> dict[str, Any]:
    """Hardware, versions and command of a run."""
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    ).stdout.strip()
    return {
        "command": "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "num_cpus": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "revision": revision,
        **facts,
    }


def interleave(variants: dict[str, Callable[[], Any]], *, num_rounds: int, num_warmups: int) -> dict[str, list[float]]:
    """Seconds of every variant in every round; all ranks start each together, and the order turns."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for i in range(num_warmups + num_rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            variants[name]()
            if i >= num_warmups:
                times[name].append(time.perf_counter() - start)
    return times


def summary(times: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, in milliseconds."""
    low, middle, high = statistics.quantiles(times, n=4)
    return {"median_ms": middle * 1e3, "q1_ms": low * 1e3, "q3_ms": high * 1e3, "rounds": len(times)}


def table(rows: dict[str, dict[str, float]]) -> str:
    """Medians and quartiles as text."""
    width = max(len(name) for name in rows)
    lines = [f"{'':<{width}}  {'median ms':>10}  {'quartiles':>17}"]
    for name, row in rows.items():
        lines.append(f"{name:<{width}}  {row['median_ms']:>10.2f}  {row['q1_ms']:>8.2f}{row['q3_ms']:>9.2f}")
    return "\n".join(lines)


def write(name: str, content: dict[str, Any]) -> Path:
    """Write a result file."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _start(rank: int, fn: Callable[..., None], num_ranks: int, store: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    fn(*args)
    dist.destroy_process_group()


def run_ranks(fn: Callable[..., None], num_ranks: int, *args: Any) -> None:
    """Run `fn(*args)` on fresh gloo ranks, one thread each."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_start, (fn, num_ranks, f"{folder}/store", args), nprocs=num_ranks)
