"""What a sharded model takes on one rank: shards, the most that a step adds to them, and Python's bookkeeping."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from dshard.bench.models import GPT, Size, shard, training_step
from dshard.bench.peaks import gathered_peak

_CPU = torch.device("cpu")
_NUM_STEPS = 3


@contextmanager
def _silent_profiler() -> Iterator[None]:
    """No lines of the profiler's own on stderr: its library reads this variable when it first starts."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ[name] = "6"  # above its errors
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _shard_bytes(model: nn.Module) -> int:
    """Bytes of this rank's shards, without padding."""
    local = [p.to_local() if isinstance(p, torch.distributed.tensor.DTensor) else p for p in model.parameters()]
    return sum(p.numel() * p.element_size() for p in local)


def _peak_of(events: Any) -> int:
    """The most bytes that torch's allocator had given out, over what it had at the start of the profile."""
    now = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def _sharded(kind: str, size: Size, tokens: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = shard(kind, GPT(size), _CPU)
    ids = torch.randint(0, size.vocab, (1, tokens + 1))
    return model, training_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4), ids)


def footprint(kind: str, size: Size, tokens: int) -> dict[str, float | None]:
    """Bytes of a GPT on this rank of the default group.

    Returns:
        `shard_bytes`: of the parameters' shards. `peak_bytes`: the most that torch's allocator gave out on top of them
        in the first steps: gathered copies, gradients, optimizer state, activations. `gathered_bytes`: the most bytes
        of gathered copies at one time, by dshard's own count; None for others.
    """
    model, step = _sharded(kind, size, tokens)
    gc.collect()
    recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with gathered_peak() as gathered, _silent_profiler(), recording as profiler:
        for _ in range(_NUM_STEPS):
            step()
    kineto: Any = profiler.profiler
    return {
        "shard_bytes": _shard_bytes(model),
        "peak_bytes": _peak_of(kineto.kineto_results.events()),
        "gathered_bytes": gathered.num_bytes if kind.startswith("dshard") else None,
    }


def bookkeeping_bytes(kind: str, size: Size, tokens: int) -> float:
    """Bytes of Python objects per block that sharding a GPT and training two steps leaves, by `tracemalloc`.

    C++ objects and the memory of tensors are not in it. Those of the unsharded model (gradients, optimizer state) are:
    subtract them.
    """
    torch.manual_seed(0)
    gc.collect()
    tracemalloc.start()
    try:
        model, step = _sharded(kind, size, tokens)
        for _ in range(2):
            step()
        gc.collect()
        num_bytes, _ = tracemalloc.get_traced_memory()
        del model
    finally:
        tracemalloc.stop()
    return num_bytes / size.layers
