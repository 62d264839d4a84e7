"""Checkpoints of a GPT and its AdamW: rates beside the disk's and DCP's, and what a save takes from training.

The disk's rate is that of `dd` with as many bytes, in the same rounds. Written bytes are synced, and files are dropped
from the page cache before each read. Rates are of all ranks together. For asynchronous saves, blocks of steps with one
save at their beginning alternate with blocks without one. The stall is the time that the training thread itself waits:
in the call, and in the next optimizer step until the copy is made.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from benchmarks.measure import Summary, on_ranks, summary_of
from benchmarks.models import GPT, Size, shard, training_step
from benchmarks.output import Bars, Output, table, timing_table
from dshard import checkpoint
from dshard.checkpoint import saving

_BATCH, _TOKENS, _BLOCK_STEPS = 4, 128, 4
_DD_BYTES = 1 << 22


def _drop(folder: Path) -> None:
    """Drop the files of a folder from the page cache, so that they are read from the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            opened = os.open(file, os.O_RDONLY)
            os.fsync(opened)
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(opened)


def _timed(action: Callable[[], Any]) -> float:
    """Seconds until all ranks are done."""
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def _dd(arguments: list[str]) -> Callable[[], None]:
    """An action that runs dd on the first rank."""

    def run() -> None:
        if dist.get_rank() == 0:
            subprocess.run(["dd", f"bs={_DD_BYTES}", *arguments], check=True, capture_output=True)

    return run


def _rates(size: Size, folder: str, num_rounds: int) -> dict[str, list[float]]:
    """Bytes per second of every round, by what writes or reads."""
    root = Path(folder)
    torch.manual_seed(0)
    model = shard("dshard", GPT(size), torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, size.vocab, (_BATCH, _TOKENS + 1))
    training_step(model, optimizer, ids)()
    ours, theirs, raw = root / "dshard", root / "dcp", root / "dd"

    def save_dcp() -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(theirs, ignore_errors=True)
        dist.barrier()
        states, optimizer_states = get_state_dict(model, optimizer)
        dcp.save({"model": states, "optimizer": optimizer_states}, checkpoint_id=str(theirs))

    def load_dcp() -> None:
        states, optimizer_states = get_state_dict(model, optimizer)
        dcp.load({"model": states, "optimizer": optimizer_states}, checkpoint_id=str(theirs))
        set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=optimizer_states)

    checkpoint.save(ours, model, optimizer)
    num_bytes = checkpoint.check(ours)[0].num_bytes
    count = -(-num_bytes // _DD_BYTES)
    actions: dict[str, Callable[[], Any]] = {
        "write, dd": _dd(["if=/dev/zero", f"of={raw}", f"count={count}", "conv=fsync"]),
        "write, dshard.checkpoint.save": lambda: checkpoint.save(ours, model, optimizer),
        "write, dcp.save": save_dcp,
        "read, dd": _dd([f"if={raw}", "of=/dev/null"]),
        "read, dshard.checkpoint.load": lambda: checkpoint.load(ours, model, optimizer),
        "read, dcp.load": load_dcp,
    }
    found: dict[str, list[float]] = {name: [] for name in actions}
    for i in range(num_rounds + 1):
        for name, action in actions.items():
            if name.startswith("read") and dist.get_rank() == 0:
                _drop(root)
            took = _timed(action)
            if i:
                found[name].append((count * _DD_BYTES if name.endswith("dd") else num_bytes) / took)
    return found


def _stalls(size: Size, folder: str, num_rounds: int) -> dict[str, list[float]]:
    """Seconds of a step with a save and without, and of the training thread's waits."""
    torch.manual_seed(0)
    model = shard("dshard", GPT(size), torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = training_step(model, optimizer, torch.randint(0, size.vocab, (_BATCH, _TOKENS + 1)))
    waits: list[float] = []
    own_wait = saving.Snapshot.wait

    def timed_wait(self: saving.Snapshot) -> None:
        start = time.perf_counter()
        own_wait(self)
        waits.append(time.perf_counter() - start)

    found: dict[str, list[float]] = {"a step": [], "a step, while a save is written": [], "call": [], "wait": []}
    saving.Snapshot.wait = timed_wait  # type: ignore[method-assign]
    try:
        for i in range(2 * (num_rounds + 1)):
            waits.clear()
            dist.barrier()
            start = time.perf_counter()
            is_saving = i % 2
            pending = (
                checkpoint.save(Path(folder) / "saved", model, optimizer, asynchronous=True) if is_saving else None
            )
            call = time.perf_counter() - start
            for _ in range(_BLOCK_STEPS):
                step()
            took = (time.perf_counter() - start - call - sum(waits)) / _BLOCK_STEPS
            if pending is not None:
                pending.result()
            if i < 2:
                continue
            found["a step, while a save is written" if is_saving else "a step"].append(took)
            if is_saving:
                found["call"].append(call)
                found["wait"].append(sum(waits))
    finally:
        saving.Snapshot.wait = own_wait  # type: ignore[method-assign]
    return found


def run(output: Output, *, ranks: int = 2, rounds: int = 8, layers: int = 8, width: int = 512) -> None:
    """Saving and loading beside dd and DCP, and what an asynchronous save takes from training, over gloo."""
    size = Size(layers=layers, width=width)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(dir=output.folder) as folder:
        warnings.simplefilter("ignore")
        rates = on_ranks(ranks, _rates, size, folder, rounds)[0]
        stalls = on_ranks(ranks, _stalls, size, folder, rounds)[0]
    of_disk = {
        name: statistics.median(a / b for a, b in zip(some, rates[name.split(",")[0] + ", dd"], strict=True))
        for name, some in rates.items()
    }
    medians = {name: statistics.median(some) / 1e6 for name, some in rates.items()}
    rows = {name: [f"{rate:.0f}", f"{of_disk[name]:.2f}"] for name, rate in medians.items()}
    print(f"\ncheckpoints, {ranks} gloo ranks\n{table(['MB/s, median', 'of dd'], rows)}")
    steps: dict[str, Summary] = {name: summary_of(some) for name, some in stalls.items()}
    waited = statistics.median(a + b for a, b in zip(stalls["call"], stalls["wait"], strict=True))
    stall = waited / statistics.median(stalls["a step"])
    print(f"\nan asynchronous save stalls training by {stall:.1%} of a step\n{timing_table(steps)}", flush=True)
    content = {
        "header": output.header(num_ranks=ranks),
        "mb_per_s": {name: [round(rate / 1e6, 1) for rate in some] for name, some in rates.items()},
        "of_dd": of_disk,
        "asynchronous": steps,
        "stall_of_step": stall,
    }
    output.write(f"checkpoint_gloo_{ranks}", content, [Bars("a checkpoint", "MB/s, median", {"rate": medians})])
