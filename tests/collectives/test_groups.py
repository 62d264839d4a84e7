"""Process groups that dshard makes of another one: by names that all of their ranks agree on, and like that one."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import dshard
from dshard.collectives import _c10d
from dshard.testing import World, WorldPool

MAKERS: dict[str, Any] = {
    "hybrid": {"strategy": "hybrid(2)"},
    "few": {"reshard_after_forward": 2},
    "separate": {},
    "switch": {},
}


def train_after_uneven_groups(kind: str) -> list[float]:
    """Stages of a pipeline that share a weight: ranks 0, 1 and 3 are in more groups than rank 2, of 0 to 3."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if rank in (0, 1):
        dist.new_group([0, 1], use_local_synchronization=True)
    if rank == 3:
        dist.new_group([3], use_local_synchronization=True)
    torch.manual_seed(0)
    model: Any = dshard.fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), **MAKERS[kind])
    if kind == "separate":
        model.set_separate_reduce_scatter_group()
    if kind == "switch":
        dshard.set_strategy(model, "hybrid(2)")
    model(torch.full((2, 8), rank + 1.0)).sum().backward()
    assert num_ranks == 4
    return [p.grad.full_tensor().sum().item() for p in model.parameters()]


@pytest.mark.parametrize("kind", MAKERS)
def test_groups_are_made_where_ranks_are_in_different_numbers_of_groups(kind):
    with World(4) as world:
        first, *others = world.run(train_after_uneven_groups, kind, timeout_s=60.0)
    assert others == [first] * 3
    assert first[0] != 0.0


def train_on_some_of_the_ranks() -> list[float]:
    """Two stages on meshes of their own, of which one is in another group besides."""
    rank = dist.get_rank()
    if rank >= 2:
        dist.new_group([2, 3], use_local_synchronization=True)
    ranks = [0, 1] if rank < 2 else [2, 3]
    group: Any = dist.new_group(ranks, use_local_synchronization=True)
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(group, "cpu")
    model: Any = dshard.fully_shard(nn.Linear(8, 8), mesh=mesh, strategy="hybrid(1, keep)")
    model.set_separate_reduce_scatter_group()
    model(torch.full((2, 8), rank % 2 + 1.0)).sum().backward()
    return [p.grad.full_tensor().sum().item() for p in model.parameters()]


def test_stages_on_some_of_the_ranks_make_groups_of_their_own():
    with World(4) as world:
        first, *others = world.run(train_on_some_of_the_ranks, timeout_s=60.0)
    assert others == [first] * 3


def traits_of_made_groups() -> list[tuple[Any, Any, str]]:
    parent: Any = dist.new_group(timeout=timedelta(seconds=77))
    mesh = DeviceMesh.from_group(parent, "cpu")
    model: Any = dshard.fully_shard(nn.Linear(8, 8), mesh=mesh, strategy="hybrid(2)")
    replicas, within = (model.weight.device_mesh.get_group(dim) for dim in range(2))
    few = model.weight.shard_group.neighbours(1).process_group
    model.set_separate_reduce_scatter_group()
    twin = _c10d.twin_of_group(within)
    made = [replicas, within, few, twin]
    names = {group.group_name for group in (parent, *made)}
    assert len(names) == 5, names
    return [(_c10d.timeout_of(group), dist.get_backend(group)) for group in made]


def test_groups_have_the_timeout_and_the_backend_of_the_one_that_they_are_made_of(worlds: WorldPool):
    assert worlds.run(4, traits_of_made_groups) == [[(timedelta(seconds=77), "gloo")] * 4] * 4
