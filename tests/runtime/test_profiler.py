"""What profilers and torch's own counting mode see of a sharded model."""

import re
from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

import dshard
from dshard.testing import WorldPool


def sharded() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    for layer in model:
        dshard.fully_shard(layer)
    return dshard.fully_shard(model)


def step(model: nn.Module) -> None:
    model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.to_local()


def profiled_step() -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    model = sharded()
    with dshard.CommTrace() as trace, profile(activities=[ProfilerActivity.CPU]) as prof:
        step(model)
    ranges = Counter(event.name for event in prof.events() if event.name.startswith("dshard::"))
    calls = Counter((record.kind, record.label) for record in trace.records)
    return dict(ranges), dict(calls)


def test_a_profiler_sees_a_range_per_collective_named_by_its_unit(worlds: WorldPool):
    for ranges, calls in worlds.run(2, profiled_step):
        kinds = {"gather": "all_gather", "reduce": "reduce_scatter"}
        for what, kind in kinds.items():
            found = dict(labels(ranges, what))
            assert found == {label: n for (k, label), n in calls.items() if k == kind}
            assert set(labels(ranges, f"{what}_wait")) == set(found) == {"0", "1", "2"}


def labels(ranges: dict[str, int], what: str) -> dict[str, int]:
    found = {re.fullmatch(rf"dshard::{what} (.*)", name): n for name, n in ranges.items()}
    return {match[1]: n for match, n in found.items() if match}


def step_without_a_profiler() -> bool:
    def refuse(*args: Any) -> None:
        raise AssertionError("a range was made")

    with mock.patch("torch.autograd.profiler.record_function", refuse):
        step(sharded())
    return True


def test_without_a_profiler_no_range_is_made(worlds: WorldPool):
    assert worlds.run(2, step_without_a_profiler) == [True, True]


def under_comm_debug_mode() -> tuple[int, int, bool]:
    model, twin = sharded(), sharded()
    step(twin)
    with dshard.CommTrace() as trace, CommDebugMode() as mode:
        step(model)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    same = all(torch.equal(p.grad.to_local(), q.grad.to_local()) for p, q in pairs)
    return mode.get_total_counts(), trace.calls(), same


def test_torchs_comm_debug_mode_changes_nothing_and_sees_none_of_what_comm_trace_counts(worlds: WorldPool):
    for seen, counted, same in worlds.run(2, under_comm_debug_mode):
        assert same
        assert seen == 0 < counted  # limits.md says why; should it ever see some, say so there
