"""What `buffers=` does with buffers that differ between ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dshard
from dshard.testing import WorldPool, expect_error
from tests.twins import data


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


def buffers_of_all_kinds() -> dict[str, list[float]]:
    net = norm_of_rank()
    net[1].running_var.fill_(5.0 + dist.get_rank())
    net[1].num_batches_tracked.fill_(dist.get_rank())
    dshard.fully_shard(net, buffers="broadcast")
    return {name: buffer.unique().tolist() for name, buffer in net.named_buffers()}


def test_every_buffer_of_every_dtype_is_broadcast(worlds: WorldPool):
    expected = {"1.running_mean": [0.0], "1.running_var": [5.0], "1.num_batches_tracked": [0]}
    assert worlds.run(2, buffers_of_all_kinds) == [expected] * 2


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))


def statistics_at_forwards(option: str) -> list[list[float]]:
    """Running means as each of three training forwards finds them."""
    model = dshard.fully_shard(normed(), buffers=option)
    seen: list[list[float]] = []
    model[1].register_forward_pre_hook(lambda module, args: seen.append(module.running_mean.tolist()))
    for step in range(3):
        model(data(5, 6, seed=step)).sum().backward()
    return seen


def test_running_statistics_are_each_ranks_own_or_rank_0s_as_told(worlds: WorldPool):
    own = worlds.run(2, statistics_at_forwards, "leave")
    assert own[0][0] == own[1][0]
    assert own[0][1] != own[1][1]
    assert own[0][2] != own[1][2]
    assert worlds.run(2, statistics_at_forwards, "broadcast") == [own[0], own[0]]


def differing_buffers() -> None:
    model = normed()
    model[1].running_var[2] += dist.get_rank()
    dshard.fully_shard(model, buffers="check")


def test_buffers_that_differ_between_ranks_are_named_when_asked(worlds: WorldPool):
    for kind, text in expect_error(worlds.get_world(2), differing_buffers):
        assert kind == "DivergenceError"
        assert "1.running_var" in text
        assert "running_mean" not in text
