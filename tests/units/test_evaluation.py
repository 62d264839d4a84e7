"""Forwards without gradients: what they gather again, what they leave behind, and that it is never stale."""

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dshard
from dshard.testing import WorldPool

WITHOUT_GRADIENTS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
KEPT: list[dict[str, Any]] = [
    {"reshard_after_forward": False},
    {"strategy": "keep"},
    {"strategy": "zero1"},
    {"strategy": "zero2"},
    {"memory_budget": 1 << 20},
]
FREED: list[dict[str, Any]] = [{}, {"strategy": "full"}, {"reshard_after_forward": 2}, {"memory_budget": 1}]


def made(options: dict[str, Any]) -> tuple[Any, Any]:
    """A model in units and as it was: the same values."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(nn.Sequential(*(nn.Linear(8, 8, dtype=torch.double) for _ in range(3))))
        nets[-1].scale = nn.Parameter(torch.ones(8, dtype=torch.double))
    net, plain = nets
    on_root = {key: options[key] for key in options if key == "memory_budget"}
    for layer in net:
        dshard.fully_shard(layer, **{key: options[key] for key in options if key not in on_root})
    dshard.fully_shard(net, **on_root, **({} if "strategy" not in options else options))
    return net, plain


def loss(net: Any, x: Tensor) -> Tensor:
    out: Tensor = (net(x) * net.scale).square().mean()
    return out


def decoded(options: dict[str, Any], mode: str) -> dict[str, Any]:
    """Gathers per forward of a decoding, after a write, and after a training step; each forward is a plain one's."""
    net, plain = made(options)
    x = torch.randn(2, 8, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    numbers = []

    def forward() -> int:
        without: AbstractContextManager[Any] = WITHOUT_GRADIENTS[mode]()
        with without, dshard.CommTrace() as trace:
            out = net(x)
        with torch.no_grad():
            torch.testing.assert_close(out, plain(x), rtol=1e-12, atol=1e-12)
        return trace.calls("all_gather")

    numbers.append([forward() for _ in range(3)])
    with torch.no_grad():
        for each in (net, plain):
            each[1].weight.mul_(2)
    numbers.append([forward() for _ in range(2)])
    for each in (net, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        loss(each, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    is_freed = not any(layer._dshard_units[0].is_gathered for layer in net)
    numbers.append([forward() for _ in range(2)])
    return {"numbers": numbers, "is_freed": is_freed}


@pytest.mark.parametrize("mode", WITHOUT_GRADIENTS)
@pytest.mark.parametrize("options", KEPT, ids=str)
def test_what_is_not_resharded_is_gathered_once_until_it_is_written_or_trained(worlds: WorldPool, options, mode):
    for found in worlds.run(2, decoded, options, mode):
        (first, second, third), written, trained = found["numbers"]
        assert first > 0
        assert second == third == 0
        assert written == [1, 0]
        assert trained[0] > 0
        assert trained[1] == 0
        assert found["is_freed"] or options.get("strategy") in ("zero1", "zero2")


FREE_OF_CHARGE: list[dict[str, Any]] = [{}, {"strategy": "full"}, {"reshard_after_forward": True}]


@pytest.mark.parametrize("options", FREE_OF_CHARGE, ids=str)
def test_what_a_host_has_once_stays_behind_an_evaluation_though_it_is_resharded(worlds: WorldPool, options):
    for found in worlds.run(2, decoded, options, "inference_mode"):
        (first, second, third), written, trained = found["numbers"]
        assert first > 0
        assert second == third == 0
        assert written == [1, 0]
        assert trained[0] > trained[1] == 0
        assert found["is_freed"]


@pytest.mark.parametrize("options", FREED, ids=str)
def test_what_is_resharded_is_gathered_for_each_forward(messaging: WorldPool, options):
    for found in messaging.run(2, decoded, options, "no_grad"):
        (first, second, third), written, trained = found["numbers"]
        assert first == second == third == written[1] == trained[1] > 0
        assert found["is_freed"]


@pytest.mark.parametrize("options", FREED[2:], ids=str)
def test_what_parts_or_a_budget_free_is_gathered_for_each_forward_through_memory_too(worlds: WorldPool, options):
    for found in worlds.run(4, decoded, options, "no_grad"):
        (first, second, third), written, trained = found["numbers"]
        assert first == second == third == written[1] == trained[1] > 0
