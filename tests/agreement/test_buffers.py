"""What `buffers=` does with buffers that differ between ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dshard
from dshard.testing import WorldPool, expect_error


def norm_of_rank() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    net[1].running_mean.fill_(float(dist.get_rank()))
    return net


def running_mean(buffers: str, steps: int) -> torch.Tensor:
    net = dshard.fully_shard(norm_of_rank(), buffers=buffers)
    torch.manual_seed(dist.get_rank())
    for _ in range(steps):
        net(torch.randn(5, 3)).sum().backward()
    if steps:
        net.train()
        with torch.enable_grad():
            net[1].momentum = 0.0  # the last forward broadcasts, and changes nothing itself
            net(torch.randn(5, 3))
    return net[1].running_mean.clone()


def test_leave_leaves_each_rank_its_own(worlds: WorldPool):
    first, second = worlds.run(2, running_mean, "leave", 0)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("steps", [0, 2])
def test_broadcast_takes_those_of_rank_0_now_and_at_every_training_forward(worlds: WorldPool, steps):
    first, second = worlds.run(2, running_mean, "broadcast", steps)
    assert torch.equal(first, second)


def test_check_names_the_buffers_that_differ_on_every_rank(worlds: WorldPool):
    for kind, text in expect_error(worlds.get_world(2), running_mean, "check", 0):
        assert kind == "DivergenceError"
        assert "1.running_mean" in text


def no_sync_gradient(by_scope: bool) -> torch.Tensor:
    torch.manual_seed(0)
    net = dshard.fully_shard(nn.Linear(3, 2, bias=False))
    x = torch.full((1, 3), dist.get_rank() + 1.0)
    with dshard.CommTrace() as trace:
        if by_scope:
            with dshard.no_sync(net):
                net(x).sum().backward()
        else:
            net(x).sum().backward()
        sent = trace.calls("reduce_scatter")
        net(x).sum().backward()
    assert sent == (0 if by_scope else 1)
    return net.weight.grad.full_tensor()


def test_no_sync_defers_the_reduction_to_the_next_backward(worlds: WorldPool):
    for by_scope in (True, False):
        assert all(torch.equal(g, torch.full((2, 3), 3.0)) for g in worlds.run(2, no_sync_gradient, by_scope))
