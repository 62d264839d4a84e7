"""How long a step waited for peers: what dshard counts by itself, and what can be seen of FSDP2 and DDP from outside.

- dshard: `CommTrace.exposed_s`.
- FSDP2 on CPU: all of each collective, for there it calls them and waits at once.
- FSDP2 on CUDA: what events around `Stream.wait_event` say, on the stream of the computation. Not run on a GPU yet.
- DDP: from the last gradient's arrival to the end of the all-reduces, by DDP's own timers. Its waits are in C++ and
  cannot be seen one by one, so this holds the copies out of its buckets too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

import dshard
from dshard.bench.common import Reader

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
    """FSDP2 on CPU: its collectives block the host."""
    plain = _fsdp_collectives.dist
    timed = _TimedCollectives(plain)
    _fsdp_collectives.dist = timed  # type: ignore[assignment]
    try:
        yield lambda: None if timed.num_async else timed.waited_s  # an async one would be waited for elsewhere
    finally:
        _fsdp_collectives.dist = plain


@contextmanager
def _timed_stream() -> Iterator[Reader]:
    """FSDP2 on CUDA: its collectives hold back the stream of the computation, by `wait_event`. Not run on a GPU yet."""
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
    """Time what FSDP2 waits for within the block; what it gives reads the seconds, afterwards.

    Patches names that FSDP2 uses, and nothing that dshard does; puts them back.
    """
    with _timed_stream() if device.type == "cuda" else _timed_host() as reader:
        yield reader


def _ddp_waited_s(model: Any) -> float | None:
    """What DDP's own timers say of the last step."""
    model.logger.set_runtime_stats_and_log()
    stats = model._get_ddp_logging_data()
    end, start = stats.get("backward_comm_time_end"), stats.get("backward_compute_time_end")
    return (end - start) / 1e9 if end and start else None


def watched(kind: str, model: nn.Module, step: Callable[[], None]) -> Reader:
    """Run a step of a model of that kind, and return what reads how long it waited for its peers."""
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
