"""Links measured on real groups: alike on all ranks, kept in a file, and planned with."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dshard
from dshard.cli.models import GPT, GPTConfig
from dshard.planner import Cluster, Link, Links
from dshard.planner.files import to_record
from dshard.planning.links import measure_links
from dshard.testing import WorldPool

SIZES = (1 << 12, 1 << 16, 1 << 18)


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def measured(path, within=(), again=False):
    """As a record, so that ranks can be compared."""
    found = measure_links(mesh(), sizes=SIZES, num_rounds=2, within=within, path=path, again=again)
    return to_record(found)


def test_all_ranks_get_the_same_figures_for_all_groups(worlds: WorldPool, tmp_path):
    first, *others = worlds.run(4, measured, tmp_path / "links.json", (2,))
    assert all(other == first for other in others)
    assert (first["num_ranks"], first["ranks_per_host"], first["keeps_received_rows"]) == (4, 4, True)
    assert set(first["shards"]) == {"2", "4"}
    assert set(first["replicas"]) == {"1", "2"}
    for links in (*first["shards"].values(), *first["replicas"].values()):
        for link in links.values():
            assert link is not None, links
            assert link["alpha_s"] + link["seconds_per_byte"] * SIZES[-1] > 0
            assert link["source"] == "measured over gloo, 4 ranks"


def test_a_later_call_reads_what_an_earlier_one_kept(worlds: WorldPool, tmp_path):
    path = tmp_path / "new" / "links.json"
    worlds.run(2, measured, path)
    record = json.loads(path.read_text())
    assert len(record["seconds"][0]) == 4
    record["seconds"] = [[[1.0 + size for size in SIZES]] * 4]  # a second to start, two per byte on the wire
    path.write_text(json.dumps(record))
    for found in worlds.run(2, measured, path):
        assert found["inside"]["all_gather"]["alpha_s"] == pytest.approx(1.0)
        assert found["inside"]["all_gather"]["seconds_per_byte"] == pytest.approx(2.0)
        assert found["inside"]["all_reduce"]["seconds_per_byte"] == pytest.approx(1.0)
        assert found["inside"]["in_place"]["seconds_per_byte"] == pytest.approx(2.0)
    for found in worlds.run(2, measured, path, again=True):
        assert found["inside"]["all_gather"]["seconds_per_byte"] < 1.0


def test_whether_ranks_share_memory_is_found_out_and_figures_of_the_one_are_none_of_the_other(
    worlds: WorldPool, messaging: WorldPool, tmp_path
):
    path, known = tmp_path / "links.json", []
    for pool, shares in ((worlds, True), (messaging, False), (worlds, True)):
        for found in pool.run(2, measured, path):
            assert (found["inside"]["in_place"] is not None) == shares
            assert (found["replicas"]["1"]["in_place"] is not None) == shares
        known.append(path.read_text())
    assert known[0] != known[2]


def measured_on_hosts_of_one(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        return measured(path)


def test_hosts_of_one_rank_each_are_measured(worlds: WorldPool, tmp_path):
    found, other = worlds.run(2, measured_on_hosts_of_one, tmp_path / "links.json")
    assert found == other
    assert (found["num_ranks"], found["ranks_per_host"]) == (2, 1)
    assert set(found["shards"]) == {"2"}
    assert found["across"] == found["shards"]["2"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"seconds": 3}'])
def test_a_file_of_something_else_is_measured_anew(worlds: WorldPool, tmp_path, text):
    path = tmp_path / "links.json"
    path.write_text(text)
    worlds.run(2, measured, path)
    assert json.loads(path.read_text())["num_ranks"] == 2


def refused(within, has_two_dims):
    own = init_device_mesh("cpu", (1, dist.get_world_size())) if has_two_dims else mesh()
    try:
        measure_links(own, within=within)
    except (dshard.PlanError, dshard.ArgumentError) as error:
        return str(error)
    return "no error"


def test_groups_that_there_are_not_are_refused(worlds: WorldPool):
    for args in (((3,), False), ((), True)):
        for said in worlds.run(2, refused, *args):
            assert said.startswith("links: need a mesh of one dim, and numbers above 1 that divide its 2 ranks")
    for said in worlds.run(2, refused, (1,), False):
        assert said.startswith("measure_links: within must be numbers of neighbouring ranks, above 1, but ")


def plan_and_train(home):
    """A plan of measured times and links, and a step under it."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(16, 2, 32, 4, 64))
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "home", lambda: Path(home))
        plan = dshard.plan(model, tokens, mesh=mesh(), strategies=("ddp", "zero1", "keep", "full"))
    dshard.fully_shard(model, plan=plan)
    model(tokens).sum().backward()
    return plan.to_json()


def test_all_ranks_plan_alike_with_what_they_measured(worlds: WorldPool, tmp_path):
    first, second = worlds.run(2, plan_and_train, str(tmp_path), timeout_s=240.0)  # it measures, maybe beside others
    assert first == second
    plan = dshard.Plan.from_json(first)
    assert plan.model.source == "measured"
    assert isinstance(plan.cluster, Cluster)
    assert plan.cluster.source == "measured over gloo, 2 ranks"
    assert list((tmp_path / ".cache" / "dshard").iterdir())


def memory_when(path: Path, sharing: tuple[int, ...]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(sharing[dist.get_rank()]))
        return measure_links(mesh(), sizes=SIZES, num_rounds=2, path=path).memory_bytes


@pytest.mark.parametrize("sharing", [(2, 2), (2, 4), (4, 2)])
def test_without_a_device_the_memory_is_that_of_the_rank_with_the_least_of_its_host(
    worlds: WorldPool, tmp_path, sharing
):
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for found in worlds.run(2, memory_when, tmp_path / "links.json", sharing):
        assert found == int(total // max(sharing) * 0.95)


def test_a_cluster_of_no_known_memory_needs_to_be_told_it():
    cluster = Cluster(2, 2, Links.of(Link(0.0, 0.0)))
    with pytest.raises(dshard.PlanError, match=r"^plan: memory must be given .* Pass memory='16GiB'"):
        dshard.plan(torch.nn.Linear(2, 2), torch.ones(1, 2), cluster=cluster)
    assert dshard.plan(torch.nn.Linear(2, 2), torch.ones(1, 2), cluster=cluster, memory="1MiB").peak_bytes < 1 << 20


def test_one_of_cluster_and_mesh_says_which_ranks_there_are():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(dshard.PlanError, match="but neither is given"):
        dshard.plan(model, torch.ones(1, 2))
