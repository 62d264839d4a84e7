"""Collectives of the user's own: torch's AllGather and ReduceScatter objects, a group for reductions, a hook."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dshard
from dshard.testing import WorldPool


class Choosy(nn.Linear):
    """A rank may leave its bias out."""

    uses_bias = True

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias if self.uses_bias else None)


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), Choosy(9, 2))
    for layer in (net[0], net[2]):
        dshard.fully_shard(layer, **options)
    return dshard.fully_shard(net, **options)


def batch(step: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train(net: Any, num_steps: int = 3) -> list[Tensor]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(num_steps):
        net(batch(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() for p in net.parameters()]


class Counting:
    """As torch's Comm classes are."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.allocated: list[int] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocated.append(int(torch.Size(size).numel()))
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(Counting):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.calls.append((output_tensor.numel(), input_tensor.numel()))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter(Counting):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self.calls.append((output_tensor.numel(), input_tensor.numel()))
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(output_tensor, input_tensor, group=group, op=op)
        return None  # done already


def with_objects() -> tuple[Any, ...]:
    net, plain = make(), make()
    gather, scatter = Gather(), Scatter()
    net[2].set_custom_all_gather(gather)
    net[0].set_custom_reduce_scatter(scatter)
    same = all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(train(net), train(plain), strict=True))
    twin = copy.deepcopy(net)
    num_calls = len(gather.calls)
    train(twin, 1)
    return (
        same,
        num_calls,
        len(scatter.calls),
        set(gather.calls),
        set(scatter.calls),
        gather.allocated[0],
        scatter.allocated,
    )


def test_gathers_and_reductions_go_through_objects_of_torchs_interfaces(worlds: WorldPool):
    for same, num_gathers, num_scatters, gathers, scatters, allocated, reduced in worlds.run(2, with_objects):
        assert same
        assert num_gathers == 3 * 2 + 1  # forward and backward of the one layer, and a look at its values
        assert num_scatters == 3  # of the other
        ((out, row),) = gathers
        assert out == 2 * row == allocated
        ((row, rows),) = scatters
        assert rows == 2 * row
        assert reduced == [rows] * 3


class Staging(Scatter):
    """One that allocates the same memory for each reduction of a size."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[Any, Tensor] = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if (tuple(size), dtype) not in self.memory:
            self.memory[tuple(size), dtype] = super().allocate(size, dtype=dtype, device=device)
        return self.memory[tuple(size), dtype]


def gradients_of_micro_batches(comm: Any) -> list[Tensor]:
    """Of two layers of one size; those of the first micro-batches wait until the last one."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    for layer in (net[0], net[2]):
        dshard.fully_shard(layer)
        if comm is not None:
            layer.set_custom_reduce_scatter(comm)
    dshard.fully_shard(net)
    for micro in range(3):
        net.set_requires_gradient_sync(micro == 2)
        net(batch(micro)).square().sum().backward()
    return [p.grad.full_tensor() for p in net.parameters()]


def with_a_staging_buffer() -> bool:
    pairs = zip(gradients_of_micro_batches(Staging()), gradients_of_micro_batches(None), strict=True)
    return all(torch.allclose(a, b, rtol=1e-6) for a, b in pairs)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_reduce_scatter_may_allocate_the_same_memory_each_time(worlds: WorldPool, num_ranks):
    assert worlds.run(num_ranks, with_a_staging_buffer) == [True] * num_ranks


def with_a_group() -> list[Any]:
    net, plain = make(), make()
    net.set_separate_reduce_scatter_group()
    units = [u for u in net._context().units if u.params]
    buckets = [b for u in units for b in u.buckets(u.trainable, u.reduce_dtypes)]
    apart = {b.group.reduce_group.group_name for b in buckets} & {b.group.name for b in buckets}
    first = [torch.allclose(a, b, rtol=1e-6) for a, b in zip(train(net), train(plain), strict=True)]
    net.set_separate_reduce_scatter_group(False)
    second = [torch.allclose(a, b, rtol=1e-6) for a, b in zip(train(net), train(plain), strict=True)]
    return [
        len(apart),
        all(first),
        all(second),
        all(u.buckets(u.trainable, u.reduce_dtypes)[0].group.is_direct for u in units),
    ]


def test_reductions_in_a_group_of_their_own_give_the_same(worlds: WorldPool):
    assert worlds.run(2, with_a_group) == [[0, True, True, True]] * 2


def hooked(num_replicas: int) -> list[bool]:
    """A hook that sums over another pair of ranks: replicas by hand, as for training that rarely syncs."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))
    by_hand, native = make(mesh=mesh["inner"], sync=None), make(mesh=mesh, sync=None)
    outer = mesh["outer"].get_group()
    seen: list[int] = []

    def average(row: Tensor) -> None:
        seen.append(row.numel())
        dist.all_reduce(row, group=outer)
        row.div_(2)

    for layer in (by_hand[0], by_hand[2]):
        layer.set_all_reduce_hook(average)
    results = []
    for step in range(2):
        for net in (by_hand, native):
            net[2].uses_bias = step == 0 or dist.get_rank() == 0
            net(batch(step)).square().sum().backward()
        pairs = zip(by_hand.parameters(), native.parameters(), strict=True)
        results += [torch.allclose(a.grad.full_tensor(), b.grad.full_tensor(), rtol=1e-6) for a, b in pairs]
    return [*results, len(seen) == 4]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_hook_on_reduced_gradients_can_average_them_over_other_ranks(worlds: WorldPool, num_ranks):
    assert all(all(ok) for ok in worlds.run(num_ranks, hooked, 2))
