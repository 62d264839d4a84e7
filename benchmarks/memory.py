"""What training takes of memory: grown by a process, allocated by torch, and gathered by dshard.

`run` trains five steps of each variant in fresh processes, because a heap that others have used tells nothing. It
counts the peak over the steps, less what was there before the model was built, in two ways: the process's share of
memory that several processes map (what ranks of one host take together), and resident memory, which counts shared
pages as often as they are mapped.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import on_ranks
from benchmarks.models import GPT, KINDS, MESSAGES, ROOT_ALONE, Size, shard, step_of, training_step
from benchmarks.output import Bars, Output, table
from dshard.units.context import Eviction
from dshard.units.unit import Unit

_ROWS = {"batch 4 x 128 tokens": (4, 128), "batch 1 x 16 tokens": (1, 16)}
_RESIDENT = ", resident"
_LOOK_S = 0.004


@dataclass(slots=True)
class Peak:
    """The most bytes so far."""

    num_bytes: int = 0


@contextmanager
def gathered_peak() -> Iterator[Peak]:
    """Count the most bytes of gathered values at one time within the block, by `Eviction.num_bytes`."""
    peak, note_gather = Peak(), Eviction.note_gather

    def counted(self: Eviction, unit: Unit) -> None:
        note_gather(self, unit)
        peak.num_bytes = max(peak.num_bytes, self.num_bytes)

    Eviction.note_gather = counted  # type: ignore[method-assign]
    try:
        yield peak
    finally:
        Eviction.note_gather = note_gather  # type: ignore[method-assign]


def _bytes_of(file: str, field: str) -> int:
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


class Grown(NamedTuple):
    """Bytes that a process grew by at the peak.

    Args:
        resident: By the system's own mark.
        proportional: Its share of pages that several processes map: the most of looks every few milliseconds.
    """

    resident: int
    proportional: int


def grown(make_step: Callable[[], Callable[[], object]]) -> Grown:
    """Bytes that this process grew by while it built a model and trained five steps.

    Communicates:
        A barrier before and one after, besides what the steps do.
    """
    dist.barrier()
    resident, share, found = _bytes_of("status", "VmRSS:"), _bytes_of("smaps_rollup", "Pss:"), Peak()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    has_ended = threading.Event()

    def look() -> None:
        while not has_ended.wait(_LOOK_S):
            found.num_bytes = max(found.num_bytes, _bytes_of("smaps_rollup", "Pss:"))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        step = make_step()
        for _ in range(5):
            step()
    finally:
        has_ended.set()
        looking.join()
    known = Grown(_bytes_of("status", "VmHWM:") - resident, found.num_bytes - share)
    dist.barrier()
    return known


def _measure(kind: str, size: Size, batch: int, tokens: int) -> Grown:
    return grown(lambda: step_of(kind, size, batch, tokens))


def run(output: Output, *, ranks: int = 2, layers: int = 8, width: int = 512) -> None:
    """Memory that training a GPT grows a rank's process by, over gloo."""
    size = Size(layers=layers, width=width)
    results: dict[str, dict[str, float]] = {f"{row}{how}": {} for how in ("", _RESIDENT) for row in _ROWS}
    messages = ("dshard" + MESSAGES, "dshard, no reshard" + MESSAGES) if ranks > 1 else ()
    kinds = (*KINDS, ROOT_ALONE, *messages)
    for row, (batch, tokens) in _ROWS.items():
        for kind in kinds:
            found = on_ranks(ranks, _measure, kind, size, batch, tokens)[0]
            results[row][kind], results[row + _RESIDENT][kind] = found.proportional / 1e6, found.resident / 1e6
    rows = {kind: [f"{results[row][kind]:.0f}" for row in results] for kind in kinds}
    print(f"MB grown at the peak, {ranks} gloo ranks\n{table(list(results), rows)}")
    content = {"header": output.header(num_ranks=ranks), "grown_mb": results}
    output.write(f"memory_gloo_{ranks}", content, [Bars("memory grown at the peak", "MB per rank", results)])


def _peak_of(events: Any) -> int:
    """The most bytes that torch's allocator had given out, over what it had at the start of the profile."""
    now = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def footprint(kind: str, size: Size, tokens: int) -> dict[str, float | None]:
    """Bytes of a GPT on this rank of the default group.

    Returns:
        `shard_bytes`: of the parameters' shards. `peak_bytes`: the most that torch's allocator gave out on top of them
        in three steps: gathered values, gradients, optimizer state, activations. `gathered_bytes`: the most bytes of
        gathered values at one time, by dshard's own count; None for others.
    """
    torch.manual_seed(0)
    model = shard(kind, GPT(size), torch.device("cpu"))
    ids = torch.randint(0, size.vocab, (1, tokens + 1))
    step = training_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4), ids)
    gc.collect()
    recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with gathered_peak() as gathered, recording as profiler:
        for _ in range(3):
            step()
    kineto: Any = profiler.profiler
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {
        "shard_bytes": sum(p.numel() * p.element_size() for p in local),
        "peak_bytes": _peak_of(kineto.kineto_results.events()),
        "gathered_bytes": gathered.num_bytes if kind.startswith("dshard") else None,
    }
