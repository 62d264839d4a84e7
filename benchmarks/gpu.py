"""One CUDA device: a Llama of 1.1 billion parameters in bf16, dshard beside FSDP2 and the plain model.

A world of one rank runs on NCCL, larger ones on torch's fake process group: there one device does what one rank of
that world would do, except for the wire. ``--tiny`` runs the same path on CPU with a tiny model.
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

from benchmarks.measure import Reader, Sample, Summary, summary, watched
from benchmarks.models import Llama, LlamaConfig, shard, training_step
from benchmarks.output import Output, bars_of, table
from dshard.testing import fake_world

KINDS = ("plain", "FSDP2", "dshard")
TINY = LlamaConfig(vocab=64, width=32, layers=2, heads=4, kv_heads=2, hidden=64)
_NUM_WARMUPS = 3
_GLOO_GRACE_S = 0.2  # gloo frees the last tensors after `wait`; an interpreter that closes meanwhile aborts
_COLUMNS = {  # of the table: key, decimals
    "step ms": ("median_ms", 2),
    "host ms": ("host_ms", 2),
    "exposed ms": ("exposed_ms", 2),
    "launches": ("num_launches", 0),
    "peak GB": ("peak_allocated_gb", 2),
    "reserved GB": ("peak_reserved_gb", 2),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model on one device, and its batch: sequences, and tokens of each."""

    config: LlamaConfig
    sequences: int
    tokens: int
    device: torch.device

    @property
    def is_cuda(self) -> bool:
        """Whether there are events, kernels and an allocator that counts."""
        return self.device.type == "cuda"

    def step_of(self, kind: str) -> Callable[[], Reader]:
        """A training step of a freshly built model, which returns a reader of its exposed time."""
        torch.manual_seed(0)
        with self.device:
            plain = Llama(self.config).to(torch.bfloat16)
        model = shard(kind, plain, self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        ids = torch.randint(0, self.config.vocab, (self.sequences, self.tokens + 1), device=self.device)
        bare = training_step(model, optimizer, ids)
        return lambda: watched(kind, model, bare)


@contextmanager
def _world_of_one(device: torch.device) -> Iterator[None]:
    """A real process group of this process alone."""
    is_cuda = device.type == "cuda"
    options: dict[str, Any] = {"device_id": device} if is_cuda else {}
    backend = "nccl" if is_cuda else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    try:
        yield
    finally:
        if not is_cuda:
            time.sleep(_GLOO_GRACE_S)
        dist.destroy_process_group()


def world(num_ranks: int, device: torch.device) -> AbstractContextManager[Any]:
    """A real world of one rank, or the first rank of a fake one."""
    return _world_of_one(device) if num_ranks == 1 else fake_world(0, num_ranks)


def _memory(case: Case, kind: str) -> Summary:
    """Peaks of the allocator while a variant is built and trains alone; None on CPU, which keeps no count."""
    gc.collect()
    if not case.is_cuda:
        case.step_of(kind)()
        return {"peak_allocated_gb": None, "peak_reserved_gb": None}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(case.device)
    step = case.step_of(kind)
    gc.collect()
    torch.cuda.empty_cache()  # the whole model was there before it was sharded
    torch.cuda.reset_peak_memory_stats(case.device)
    for _ in range(_NUM_WARMUPS):
        step()
    torch.cuda.synchronize(case.device)
    return {
        "allocated_before_gb": before / 1e9,
        "peak_allocated_gb": torch.cuda.max_memory_allocated(case.device) / 1e9,
        "peak_reserved_gb": torch.cuda.max_memory_reserved(case.device) / 1e9,
    }


def _timed(case: Case, step: Callable[[], Reader]) -> Sample:
    """Time one step, from an idle device to an idle device; `cpu_s` is the time until the host came back."""
    if not case.is_cuda:
        start_s = time.perf_counter()
        reader = step()
        step_s = time.perf_counter() - start_s
        return Sample(step_s, step_s, reader())
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(case.device)
    start.record()
    start_s = time.perf_counter()
    reader = step()
    host_s = time.perf_counter() - start_s
    end.record()
    torch.cuda.synchronize(case.device)
    return Sample(start.elapsed_time(end) / 1e3, host_s, reader())


def _num_launches(case: Case, step: Callable[[], Reader]) -> int | None:
    """Kernels that the host launches in one step; None on CPU."""
    if not case.is_cuda:
        return None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize(case.device)
    averages = profiler.key_averages()
    return sum(event.count for event in averages if event.key.startswith(("cudaLaunchKernel", "cuLaunchKernel")))


def _times(case: Case, num_rounds: int) -> dict[str, Summary]:
    """Steps of all kinds, interleaved; the order rotates."""
    steps = {kind: case.step_of(kind) for kind in KINDS}
    gc.collect()
    samples: dict[str, list[Sample]] = {kind: [] for kind in KINDS}
    for i in range(_NUM_WARMUPS + num_rounds):
        for kind in KINDS[i % len(KINDS) :] + KINDS[: i % len(KINDS)]:
            sample = _timed(case, steps[kind])
            if i >= _NUM_WARMUPS:
                samples[kind].append(sample)
    rows: dict[str, Summary] = {}
    for kind, some in samples.items():
        host_ms = summary([Sample(each.cpu_s, 0.0) for each in some])["median_ms"]
        launches = _num_launches(case, steps[kind])
        rows[kind] = {"exposed_ms": None, **summary(some), "host_ms": host_ms, "num_launches": launches}
    return rows


def measure(case: Case, num_rounds: int) -> dict[str, Summary]:
    """Each kind alone for its memory, then all together for their times."""
    memory = {kind: _memory(case, kind) for kind in KINDS}
    gc.collect()
    if case.is_cuda:
        torch.cuda.empty_cache()
    times = _times(case, num_rounds)
    gc.collect()
    return {kind: {**times[kind], **memory[kind]} for kind in KINDS}


def _text(rows: dict[str, Summary]) -> str:
    cells: dict[str, list[str]] = {}
    for kind, row in rows.items():
        values = [(row[key], digits) for key, digits in _COLUMNS.values()]
        cells[kind] = ["-" if value is None else f"{value:.{digits}f}" for value, digits in values]
    return table(list(_COLUMNS), cells)


def run(
    output: Output,
    *,
    world_sizes: Sequence[int] = (1, 8, 64),
    rounds: int = 10,
    batch: int = 4,
    tokens: int = 2048,
    tiny: bool = False,
) -> None:
    """A Llama of 1.1 billion parameters on one CUDA device.

    Args:
        output: Gets `gpu`, or `gpu_tiny` from a CPU.
        world_sizes: 1 takes a real group; more, a fake one.
        rounds: Samples per variant.
        batch: Sequences per step.
        tokens: Per sequence.
        tiny: Whether to run a tiny model on CPU, where there are no kernels to count and no peaks.
    """
    device = torch.device("cpu") if tiny else torch.device("cuda", torch.cuda.current_device())
    config = LlamaConfig()
    if tiny:
        torch.set_num_threads(1)
        config, batch, tokens = TINY, 2, 16
    results: dict[str, dict[str, Summary]] = {}
    for num_ranks in world_sizes:
        for checkpointing in (False, True):
            case = Case(replace(config, checkpointing=checkpointing), batch, tokens, device)
            name = f"{num_ranks} {'rank' if num_ranks == 1 else 'ranks'}{', checkpointing' if checkpointing else ''}"
            with world(num_ranks, device):
                results[name] = measure(case, rounds)
            print(f"\n{name}, {batch} x {tokens} tokens on {device}\n{_text(results[name])}", flush=True)
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in Llama(config).parameters())
    facts = output.header(num_parameters=num_parameters, batch=batch, tokens=tokens, dtype="bfloat16")
    facts["cuda"] = torch.version.cuda
    panels = [
        bars_of("a training step", results, "median_ms"),
        bars_of("host time of a step", results, "host_ms"),
        bars_of("peak of allocated memory", results, "peak_allocated_gb", "GB"),
    ]
    output.write("gpu_tiny" if tiny else "gpu", {"header": facts, "rows": results}, panels)
