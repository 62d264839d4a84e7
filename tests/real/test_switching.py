"""Strategies that change between gradients that were added up and the next backward."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dshard
from dshard.testing import WorldPool

MIX = {"*bias": "ddp", "*": "full"}
STRATEGIES: list[Any] = ["ddp", "zero1", "zero2", "keep", "full", MIX, "split(2)"]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def data(step: int, rank: int) -> Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def difference(start: Any, end: Any, syncs: bool, drops: bool, some: bool) -> float:
    """The largest difference from one process, of weights after three steps with a switch within each.

    Args:
        start: The first strategy.
        end: The other one.
        syncs: Whether the backward ahead of the switch reduces.
        drops: Whether its gradients are dropped.
        some: Whether it is of one rank alone, which the others do not know of.
    """
    plain, model = net(), dshard.fully_shard(net(), strategy=start)
    steps = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (plain, model)]
    rank, size = dist.get_rank(), dist.get_world_size()
    runs = [0] if some else range(size)
    for step in range(1 if some else 3):
        if rank in runs:
            model.set_requires_gradient_sync(syncs)
            model(data(10 * step, rank)).square().sum().backward()
            model.set_requires_gradient_sync(True)
        for other in runs:
            (plain(data(10 * step, other)).square().sum() / size).backward()
        if drops:
            for optimizer in steps:
                optimizer.zero_grad()
        dshard.set_strategy(model, end if step % 2 == 0 else start, optimizer=steps[1])
        model(data(10 * step + 1, rank)).square().sum().backward()
        for other in range(size):
            (plain(data(10 * step + 1, other)).square().sum() / size).backward()
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    return max((a - b.full_tensor()).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("syncs", [False, True])
def test_a_switch_takes_gradients_along_or_lets_them_go(worlds: WorldPool, syncs, drops):
    for start, end in product(STRATEGIES, STRATEGIES):
        for found in worlds.run(2, difference, start, end, syncs, drops, False):
            assert found < 1e-5, (start, end)


@pytest.mark.parametrize("drops", [False, True])
def test_a_switch_reduces_what_one_rank_alone_has_added_up(worlds: WorldPool, drops):
    """By a strategy that needs no gather, a rank may run a forward by itself, and a backward without sync."""
    for end in ("zero2", "full", MIX):
        for found in worlds.run(2, difference, "ddp", end, False, drops, True):
            assert found < 1e-5, end


def bytes_on_their_way(start: Any, end: Any) -> tuple[int, int]:
    """Bytes of buffers in use or kept, behind a step and a switch, and behind the step that follows."""
    torch.manual_seed(0)
    model = dshard.fully_shard(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), strategy=start)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    dshard.set_strategy(model, end, optimizer=optimizer)
    found = dshard.report(model, optimizer).num_bytes
    return found["on their way"], found["pool"]


@pytest.mark.parametrize("start", ["ddp", "zero1", "full"])
def test_a_switch_leaves_no_buffers_behind(worlds: WorldPool, start):
    assert worlds.run(2, bytes_on_their_way, start, "zero2") == [(0, 0)] * 2
