"""Plans for meshes of two dims: replicas of what the ranks of the second dim share."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dshard
from dshard.planner import Cluster, Link, Links, cluster_of
from dshard.planning import meshes
from dshard.planning.links import measure_links
from dshard.planning.meshes import PlannedMesh, in_stages
from dshard.policies import Strategy
from dshard.testing import WorldPool
from tests.planning.small import build, losses, tokens

NAMES = ("replicate", "shard")


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def train(shape: tuple[int, ...], home: str, asked: Any = None, whole: tuple[int, ...] = ()) -> Any:
    """Losses under a plan that was made, and is followed, on one mesh."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "home", lambda: Path(home))
        patch.setattr(meshes, "measure_links", partial(measure_links, sizes=(1 << 14, 1 << 18), num_rounds=2))
        mesh = mesh_of(whole, (*NAMES, "rest"))[NAMES] if whole else mesh_of(shape)
        model = build()
        plan = dshard.plan(model, tokens(), mesh=mesh, memory="1GiB", strategies=asked, margin=0)
    dshard.fully_shard(model, mesh=mesh, plan=plan)
    cut = {p.device_mesh.ndim for p in model.parameters()}
    return (
        losses(model, mesh.get_coordinate()[0] * shape[1] + mesh.get_coordinate()[1]),
        set(map(str, plan.strategies)),
        cut,
    )


@pytest.mark.slow
def test_a_plan_for_replicas_by_shards_trains_as_any_other(worlds: WorldPool, tmp_path):
    expected = [each[0] for each in worlds.run(4, train, (2, 2), str(tmp_path), "ddp")]
    for asked in (["keep", "ddp"], "full", ["zero1", "split(2)"], None):
        found = worlds.run(4, train, (2, 2), str(tmp_path), asked)
        assert [each[0] for each in found] == expected
        assert len({str(each[1]) for each in found}) == 1
        for text in found[0][1]:
            strategy = Strategy.of(text)
            assert strategy.base == "ddp" or strategy.within == 2
        assert {2} == set().union(*(each[2] for each in found))


def test_dims_of_a_larger_mesh_and_dims_of_one_rank_are_planned_for(worlds: WorldPool, tmp_path):
    part = worlds.run(4, train, (2, 1), str(tmp_path), None, (2, 1, 2))
    assert part[0][1] == {"ddp"}  # nobody shares a parameter there
    assert part[0][0] == part[1][0] != part[2][0]  # the rest sees the same data
    assert worlds.run(2, train, (1, 2), str(tmp_path), "full")[0][1] == {"full"}


def follow(shape: tuple[int, ...], strategies: str, num_ranks: int = 4) -> Any:
    model, cluster = build(), cluster_of("titan-rtx", num_ranks)
    plan = dshard.plan(model, tokens(), cluster=cluster, device="titan-rtx", strategies=strategies)
    dshard.fully_shard(model, mesh=mesh_of(shape), plan=plan)
    return losses(model, dist.get_rank())


def test_a_plan_of_a_described_cluster_is_followed_on_a_mesh_that_cuts_alike(worlds: WorldPool):
    expected = worlds.run(4, follow, (4,), "hybrid(2)")
    assert worlds.run(4, follow, (2, 2), "hybrid(2)") == expected
    assert worlds.run(4, follow, (2, 2), "full", 2) == expected  # for the ranks that share alone


def refused(shape: tuple[int, ...], strategies: str) -> str:
    with pytest.raises(dshard.PlanError) as told:
        follow(shape, strategies)
    return str(told.value)


@pytest.mark.parametrize(
    ("shape", "strategies", "says"),
    [((2, 2), "full", "full, which is for 4"), ((1, 4), "hybrid(2)", "hybrid(2), which is for 2")],
)
def test_a_plan_whose_strategies_a_mesh_cannot_have_is_refused(worlds: WorldPool, shape, strategies, says):
    for text in worlds.run(4, refused, shape, strategies):
        assert f"on a mesh of shape {shape} {shape[1]} ranks share a parameter, but the plan has {says}" in text


def misplanned() -> tuple[str, str]:
    with pytest.raises(dshard.PlanError) as dims:
        dshard.plan(build(), tokens(), mesh=mesh_of((1, 2, 1)), memory="1GiB")
    planned, cluster = PlannedMesh.of(mesh_of((2, 1))), cluster_of("titan-rtx", 2)
    with pytest.raises(dshard.PlanError) as within:
        planned.strategies(["hybrid(2)"], cluster)
    return str(dims.value), str(within.value)


def test_what_a_mesh_cannot_have_is_refused(worlds: WorldPool):
    for dims, within in worlds.run(2, misplanned):
        assert "it has 3 (shape (1, 2, 1)). Pass some of its dims" in dims
        assert "how many ranks share a parameter (1), but strategies has hybrid(2)" in within


def test_what_is_whole_is_reduced_over_one_dim_and_then_over_the_other():
    near, far = Link(1e-5, 1e-9), Link(3e-5, 4e-9, 1e-6)
    cluster = Cluster(
        8, 4, Links.of(near), Links.of(far), shards={4: Links.of(near)}, replicas={4: Links.of(far), 1: Links.of(far)}
    )
    staged = in_stages(cluster, 4)
    num_bytes = 1 << 20
    expected = near.time_s(num_bytes, 4, 2) + far.time_s(num_bytes, 2, 2)
    assert staged.all_reduce_s(num_bytes) == pytest.approx(expected)
    assert staged.all_reduce_s(num_bytes, 4) == cluster.all_reduce_s(num_bytes, 4)
