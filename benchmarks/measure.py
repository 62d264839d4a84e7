"""Interleaved timing of training steps, on ranks of its own, and how long each step waited for its peers.

What counts as waiting:

- dshard: `CommTrace.exposed_s`.
- FSDP2 on CPU: all of each collective, because it calls them and waits at once.
- FSDP2 on CUDA: the time between events around `Stream.wait_event`, on the stream of the computation.
- DDP: from the last gradient's arrival to the end of the all-reduces, by DDP's own timers. Its waits are in C++ and
  cannot be seen one by one, so this includes the copies out of its buckets.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

import dshard
from dshard.testing import World

_WORLD_TIMEOUT_S = 6 * 3600.0  # of one call on the ranks
_GROUP_TIMEOUT_S = 600.0

Summary = dict[str, float | None]  # of one variant, as JSON holds it
Reader = Callable[[], float | None]  # seconds that a step waited for peers; None where nobody can tell
Step = Callable[[], Reader | None]


@dataclass(frozen=True, slots=True)
class Sample:
    """One step of one variant, in seconds."""

    step_s: float
    cpu_s: float  # of all threads of this rank's process
    exposed_s: float | None = None


def interleave(variants: Mapping[str, Step], *, num_rounds: int, num_warmups: int) -> dict[str, list[Sample]]:
    """Run every variant once in every round and time it. All ranks start each step together.

    Args:
        variants: Steps by name; each may return a reader of its exposed time, which is called outside of the timing.
        num_rounds: Samples per variant.
        num_warmups: Rounds ahead of them that do not count.

    Communicates:
        A barrier before each step, besides what the steps do.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in variants}
    order = random.Random(0)  # the same on all ranks; drawn, so that no variant always follows the same other one
    for i in range(num_warmups + num_rounds):
        for name in order.sample(list(variants), len(variants)):
            dist.barrier()
            cpu_start, start = time.process_time(), time.perf_counter()
            reader = variants[name]()
            step_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
            exposed_s = reader() if reader is not None else None
            if i >= num_warmups:
                samples[name].append(Sample(step_s, cpu_s, exposed_s))
    return samples


def summary_of(times: Sequence[float]) -> Summary:
    """Median and quartiles of at least two times in seconds, in milliseconds."""
    low, middle, high = statistics.quantiles(times, n=4)
    return {"median_ms": middle * 1e3, "q1_ms": low * 1e3, "q3_ms": high * 1e3, "rounds": len(times)}


def summary(samples: Sequence[Sample]) -> Summary:
    """Sum up one variant: `summary_of` its steps, and the median of its exposed time where that is known."""
    row = summary_of([sample.step_s for sample in samples])
    exposed = [sample.exposed_s for sample in samples if sample.exposed_s is not None]
    if exposed:
        row["exposed_ms"] = statistics.median(exposed) * 1e3
    return row


def timed(variants: Mapping[str, Step], *, num_rounds: int, num_warmups: int = 3) -> dict[str, Summary]:
    """`interleave`, and the summary of each variant."""
    samples = interleave(variants, num_rounds=num_rounds, num_warmups=num_warmups)
    return {name: summary(some) for name, some in samples.items()}


def on_ranks(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Results of a function on fresh gloo ranks, one thread each; they take as long as they need."""
    with World(num_ranks, group_timeout_s=_GROUP_TIMEOUT_S) as world:
        return world.run(function, *args, timeout_s=_WORLD_TIMEOUT_S)


_COLLECTIVES = (
    "all_gather_single",  # the names since torch 2.13, and those before
    "reduce_scatter_single",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_reduce",
    "broadcast",
)


class _TimedCollectives:
    """Stands in for the module ``torch.distributed`` inside FSDP2: the same, but synchronous collectives are timed."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self.waited_s = 0.0
        self.num_async = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if name not in _COLLECTIVES:
            return found

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            work = found(*args, **kwargs)
            self.waited_s += time.perf_counter() - start
            self.num_async += work is not None
            return work

        return timed


@contextmanager
def _timed_host() -> Iterator[Reader]:
    """FSDP2 on CPU: count the time within its collectives, which block the host."""
    plain = _fsdp_collectives.dist
    timed = _TimedCollectives(plain)
    _fsdp_collectives.dist = timed  # type: ignore[assignment]
    try:
        yield lambda: None if timed.num_async else timed.waited_s  # an async one would be waited for elsewhere
    finally:
        _fsdp_collectives.dist = plain


@contextmanager
def _timed_stream() -> Iterator[Reader]:
    """FSDP2 on CUDA: count the time that `wait_event` holds back the stream of the computation."""
    stream_type: Any = torch.cuda.Stream
    wait_event = stream_type.wait_event
    compute = torch.cuda.current_stream()
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def timed(self: torch.cuda.Stream, event: Any) -> None:
        if self != compute:
            wait_event(self, event)
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(self)
        wait_event(self, event)
        end.record(self)
        pairs.append((start, end))

    def read() -> float:
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in pairs) / 1e3

    stream_type.wait_event = timed
    try:
        yield read
    finally:
        stream_type.wait_event = wait_event


@contextmanager
def fsdp2_waits(device: torch.device) -> Iterator[Reader]:
    """Time FSDP2's waits within the block; call the reader after it for the seconds.

    Patches names that FSDP2 uses, and puts them back.
    """
    with _timed_stream() if device.type == "cuda" else _timed_host() as reader:
        yield reader


def _ddp_waited_s(model: Any) -> float | None:
    """Seconds of the last step by DDP's own timers; None where they did not run."""
    model.logger.set_runtime_stats_and_log()
    stats = model._get_ddp_logging_data()
    end, start = stats.get("backward_comm_time_end"), stats.get("backward_compute_time_end")
    return (end - start) / 1e9 if end and start else None


def watched(kind: str, model: nn.Module, step: Callable[[], None]) -> Reader:
    """Run a step of a model of that kind, and return a reader of the seconds that it waited for its peers."""
    library = kind.split(",")[0]
    if library == "dshard":
        with dshard.CommTrace() as trace:
            step()
        return lambda: trace.exposed_s
    if library == "FSDP2":
        with fsdp2_waits(next(model.parameters()).device) as reader:
            step()
        return reader
    if library == "DDP":
        model._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[operator]
        step()
        return lambda: _ddp_waited_s(model)
    step()
    return lambda: None
