"""Memory over the time of a trace: activations as of the plain model, all else as counted by a report at that time."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import dshard
from dshard.testing import WorldPool
from tests.inspection.models import Net, ids, sharded

NET = Net()
HEAD_PART = NET.head.weight.numel() / sum(p.numel() for p in NET.parameters())  # which the forward does not use


def kept_by(net: nn.Module) -> int:
    """Bytes that autograd keeps at the end of a plain model's forward, without its parameters."""
    params = {p.untyped_storage().data_ptr() for p in net.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in params:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = net(ids())
    assert out.requires_grad  # and all of it is alive
    return sum(kept.values())


def followed(options: dict[str, Any]) -> tuple[int, int, list[Any], list[dict[str, Any]]]:
    """Activations at the end of forward and after backward; samples; and reports at their times."""
    model = sharded(options)
    optimizer = torch.optim.AdamW(model.parameters())
    reports = []
    for _ in range(2):
        with dshard.trace(model, optimizer, memory=True) as trace:
            reports.append(dshard.report(model, optimizer, trace).num_bytes)
            out = model(ids())
            kept = trace.activations.num_bytes
            out.sum().backward()
            left = trace.activations.num_bytes
            optimizer.step()
            optimizer.zero_grad()
        reports.append(dshard.report(model, optimizer, trace).num_bytes)
    return kept, left, trace.memory, reports[2:]


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"strategy": "zero2"}, {"strategy": "ddp"}])
def test_activations_are_those_of_the_plain_model_and_ends_those_of_a_report(worlds: WorldPool, options):
    torch.manual_seed(0)
    expected = kept_by(Net())
    assert expected > 10 * 12 * 16 * 4
    for kept, left, samples, reports in worlds.run(2, followed, options):
        assert (kept, left) == (expected, 0)
        assert [samples[0].num_bytes, samples[-1].num_bytes] == reports
        assert max(sample.num_bytes["activations"] for sample in samples) <= expected
        assert [sample.at_s for sample in samples] == sorted(sample.at_s for sample in samples)
        grown = [sample.num_bytes["gradients"] for sample in samples]
        shards = samples[0].num_bytes["parameters"] * (1 - HEAD_PART)
        assert (grown[0], max(grown), grown[-1]) == (0, shards, 0)
        assert samples[-1].total_bytes == sum(num or 0 for num in reports[1].values())


class Checkpointed(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.net, x, use_reentrant=False)


def with_hooks_within() -> tuple[int, int, list[bool]]:
    """Activations with and without checkpoints, and whether gradients are those without a trace."""
    found, grads = [], []
    for wraps in (False, True):
        for looks in (False, True):
            torch.manual_seed(0)
            layers = [nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)) for _ in range(3)]
            model = dshard.fully_shard(nn.Sequential(*[Checkpointed(each) if wraps else each for each in layers]))
            trace = dshard.trace(model, memory=looks)
            with trace, torch.autograd.graph.save_on_cpu() if looks and wraps else torch.enable_grad():
                out = model(torch.ones(4, 8, requires_grad=True))
                found.append(trace.activations.num_bytes if looks else 0)
                out.sum().backward()
            grads.append([p.grad.full_tensor() for p in model.parameters()])
    same = [all(map(torch.equal, first, second)) for first, second in itertools.pairwise(grads)]
    return found[1], found[3], same


def test_hooks_of_the_program_come_first_and_nothing_changes(worlds: WorldPool):
    for plain, checkpointed, same in worlds.run(2, with_hooks_within):
        assert same == [True] * 3
        assert plain > checkpointed


def around_a_compiled_step() -> tuple[list[int | None], int | None]:
    """Bytes of states behind each of two steps of an optimizer that is compiled, by a trace; and by a report."""
    model = sharded({})
    optimizer = torch.optim.AdamW(model.parameters())
    step = torch.compile(optimizer.step, backend="eager")
    with dshard.trace(model, optimizer, memory=True) as trace:
        for _ in range(2):
            model(ids()).sum().backward()
            step()
            found = trace.memory[-1].num_bytes["states"]
            assert found is not None
            optimizer.zero_grad()
    states = [sample.num_bytes["states"] for sample in trace.memory]
    return states[-2:], dshard.report(model, optimizer, trace).num_bytes["states"]


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # what inductor imports
def test_memory_is_counted_behind_a_compiled_step_too(worlds: WorldPool):
    for states, reported in worlds.run(2, around_a_compiled_step):
        assert states == [reported] * 2
        assert reported
