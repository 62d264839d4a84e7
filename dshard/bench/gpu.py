"""One CUDA device: a Llama-like model of 1.1 billion parameters in bf16, dshard beside FSDP2 and the plain model.

Worlds of one rank run on NCCL, larger ones on torch's fake process group: there one device does what one rank of that
world would do, but for the wire. **This has not been run on a GPU yet**; ``--tiny`` runs the same path on CPU.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from dshard.bench.common import Reader, Summary, summary_of
from dshard.bench.llama import Llama, LlamaConfig
from dshard.bench.models import shard, training_step
from dshard.bench.output import Output, table
from dshard.bench.plots import Bars
from dshard.bench.waits import watched
from dshard.testing import fake_world

_KINDS = ("plain", "FSDP2", "dshard")
_TINY = LlamaConfig(vocab=64, width=32, layers=2, heads=4, kv_heads=2, hidden=64)
_NUM_WARMUPS = 3
_GLOO_GRACE_S = 0.2  # gloo frees the last tensors after `wait`; an interpreter that closes meanwhile aborts
_COLUMNS = {  # of the table: key, factor, decimals
    "step ms": ("median_ms", 1.0, 2),
    "host ms": ("host_ms", 1.0, 2),
    "exposed ms": ("exposed_ms", 1.0, 2),
    "launches": ("num_launches", 1.0, 0),
    "peak GB": ("peak_allocated_bytes", 1e-9, 2),
    "reserved GB": ("peak_reserved_bytes", 1e-9, 2),
}


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step trains on: sequences, and tokens of each."""

    sequences: int
    tokens: int


@dataclass(frozen=True, slots=True)
class _Case:
    """One model on one device; the library that shards it comes apart."""

    config: LlamaConfig
    batch: Batch
    device: torch.device

    @property
    def is_cuda(self) -> bool:
        """Whether there are events, kernels and an allocator with counts."""
        return self.device.type == "cuda"

    def step_of(self, kind: str) -> Callable[[], Reader]:
        """A training step of a freshly built model, which tells what it waited for peers."""
        torch.manual_seed(0)
        with self.device:
            plain = Llama(self.config).to(torch.bfloat16)
        model = shard(kind, plain, self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        shape = (self.batch.sequences, self.batch.tokens + 1)
        ids = torch.randint(0, self.config.vocab, shape, device=self.device)
        bare = training_step(model, optimizer, ids)
        return lambda: watched(kind, model, bare)


@contextmanager
def _world_of_one(device: torch.device) -> Iterator[None]:
    """A real process group of this process alone."""
    is_cuda = device.type == "cuda"
    backend = "nccl" if is_cuda else "gloo"
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device if is_cuda else None
    )
    try:
        yield
    finally:
        if not is_cuda:
            time.sleep(_GLOO_GRACE_S)
        dist.destroy_process_group()


def _world(num_ranks: int, device: torch.device) -> AbstractContextManager[Any]:
    return _world_of_one(device) if num_ranks == 1 else fake_world(0, num_ranks)


def _memory(case: _Case, kind: str) -> Summary:
    """Peaks of the allocator while a variant is built and trains alone; None on CPU, which keeps no count."""
    gc.collect()
    if not case.is_cuda:
        step = case.step_of(kind)
        step()
        return {"peak_allocated_bytes": None, "peak_reserved_bytes": None}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(case.device)
    step = case.step_of(kind)
    gc.collect()
    torch.cuda.empty_cache()  # the whole model was there while it was cut
    torch.cuda.reset_peak_memory_stats(case.device)
    for _ in range(_NUM_WARMUPS):
        step()
    torch.cuda.synchronize(case.device)
    return {
        "allocated_before_bytes": before,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(case.device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(case.device),
    }


@dataclass(frozen=True, slots=True)
class _Timed:
    """One step: seconds on the device, until the host came back, and waited for peers."""

    step_s: float
    host_s: float
    exposed_s: float | None


def _timed(case: _Case, step: Callable[[], Reader]) -> _Timed:
    """One step, from a device that has nothing to do to one that has nothing to do."""
    if not case.is_cuda:
        start_s = time.perf_counter()
        reader = step()
        step_s = time.perf_counter() - start_s
        return _Timed(step_s, step_s, reader())
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(case.device)
    start.record()
    start_s = time.perf_counter()
    reader = step()
    host_s = time.perf_counter() - start_s
    end.record()
    torch.cuda.synchronize(case.device)
    return _Timed(start.elapsed_time(end) / 1e3, host_s, reader())


def _num_launches(case: _Case, step: Callable[[], Reader]) -> int | None:
    """Kernels that the host launches in one step; None on CPU."""
    if not case.is_cuda:
        return None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize(case.device)
    averages = profiler.key_averages()
    return sum(event.count for event in averages if event.key.startswith(("cudaLaunchKernel", "cuLaunchKernel")))


def _times(case: _Case, num_rounds: int) -> dict[str, Summary]:
    """Steps of all kinds, interleaved; the order turns."""
    steps = {kind: case.step_of(kind) for kind in _KINDS}
    gc.collect()
    samples: dict[str, list[_Timed]] = {kind: [] for kind in _KINDS}
    for i in range(_NUM_WARMUPS + num_rounds):
        for kind in _KINDS[i % len(_KINDS) :] + _KINDS[: i % len(_KINDS)]:
            sample = _timed(case, steps[kind])
            if i >= _NUM_WARMUPS:
                samples[kind].append(sample)
    return {
        kind: {**_summary(some), "num_launches": _num_launches(case, steps[kind])} for kind, some in samples.items()
    }


def _summary(samples: Sequence[_Timed]) -> Summary:
    exposed = [sample.exposed_s for sample in samples if sample.exposed_s is not None]
    return {
        **summary_of([sample.step_s for sample in samples]),
        "host_ms": summary_of([sample.host_s for sample in samples])["median_ms"],
        "exposed_ms": summary_of(exposed)["median_ms"] if exposed else None,
    }


def _measure(case: _Case, num_rounds: int) -> dict[str, Summary]:
    """Each kind alone for its memory, then all together for their times."""
    memory = {kind: _memory(case, kind) for kind in _KINDS}
    gc.collect()
    if case.is_cuda:
        torch.cuda.empty_cache()
    times = _times(case, num_rounds)
    gc.collect()
    return {kind: {**times[kind], **memory[kind]} for kind in _KINDS}


def _text(rows: dict[str, Summary]) -> str:
    cells: dict[str, list[str]] = {}
    for kind, row in rows.items():
        values = [(row[key], factor, digits) for key, factor, digits in _COLUMNS.values()]
        cells[kind] = ["-" if value is None else f"{value * by:.{digits}f}" for value, by, digits in values]
    return table(list(_COLUMNS), cells)


def run(output: Output, *, world_sizes: Sequence[int], num_rounds: int, batch: Batch, is_tiny: bool) -> None:
    """Measure, print and write `gpu`, or `gpu_tiny` from a CPU.

    Args:
        output: Where to.
        world_sizes: 1 takes a real group; more, a fake one.
        num_rounds: Samples per variant.
        batch: Of a step; a tiny run takes 2 x 16 tokens.
        is_tiny: Whether to run a tiny model on CPU, where there are no kernels to count and no peaks.
    """
    device = torch.device("cpu") if is_tiny else torch.device("cuda", torch.cuda.current_device())
    if is_tiny:
        torch.set_num_threads(1)
    config, batch = (_TINY, Batch(2, 16)) if is_tiny else (LlamaConfig(), batch)
    results: dict[str, dict[str, Summary]] = {}
    for num_ranks in world_sizes:
        for checkpointing in (False, True):
            case = _Case(replace(config, checkpointing=checkpointing), batch, device)
            name = f"{num_ranks} {'rank' if num_ranks == 1 else 'ranks'}{', checkpointing' if checkpointing else ''}"
            with _world(num_ranks, device):
                results[name] = _measure(case, num_rounds)
            print(
                f"\n{name}, {batch.sequences} x {batch.tokens} tokens on {device}\n{_text(results[name])}", flush=True
            )
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in Llama(config).parameters())
    facts = output.header(num_parameters=num_parameters, batch=batch.sequences, tokens=batch.tokens, dtype="bfloat16")
    facts["cuda"] = torch.version.cuda
    panels = [
        Bars(
            title, unit, {name: {k: _scaled(row[key], by) for k, row in rows.items()} for name, rows in results.items()}
        )
        for title, unit, key, by in (
            ("a training step", "ms, median", "median_ms", 1.0),
            ("host time of a step", "ms, median", "host_ms", 1.0),
            ("peak of allocated memory", "GB", "peak_allocated_bytes", 1e-9),
        )
    ]
    output.write("gpu_tiny" if is_tiny else "gpu", {"header": facts, "rows": results}, panels)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
