"""Times of real steps at any batch size: measured at some, told from these at others, on all ranks alike."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dshard
from dshard.planner import Cluster, Link, Links, cluster_of
from dshard.planner.costs import CHECKPOINTING, UnitKind
from dshard.planner.measuring import measure
from dshard.planner.profiles import UnitTimes
from dshard.planning import measured_steps, meshes
from dshard.planning.links import measure_links
from dshard.testing import WorldPool
from tests.models import ResidualMlp
from tests.planning.small import build, tokens

TWO = Cluster(2, 2, Links.of(Link(1e-5, 1e-9)), memory_bytes=1 << 30)
AUTO = {"cluster": TWO, "batch": "auto", "margin": 0}


class Clock:
    """In place of steps: of each part a time that grows with the batch, and of some batches none.

    Args:
        start_s: That a part takes however small the batch is.
        most: Samples that fit into memory.
    """

    def __init__(self, start_s: float = 1e-3, most: int = 1 << 30) -> None:
        self.start_s, self.most, self.measured = start_s, most, list[int]()

    def __call__(self, model: nn.Module, sample: Tensor, parts: Any, **_: Any) -> list[UnitTimes]:
        batch = len(sample)
        self.measured.append(batch)
        if batch > self.most:
            torch.empty(1 << 60)  # more than there is
        forward_s = [self.start_s + 1e-4 * batch * (1 + place) for place, _ in enumerate(parts)]
        return [UnitTimes(each, 2 * each) for each in forward_s]


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clock]:
    def clocked(**kwargs: Any) -> Clock:
        clock = Clock(**kwargs)
        monkeypatch.setattr(measured_steps, "measure", clock)
        monkeypatch.setattr(measured_steps, "optimizer_seconds_per_byte", lambda _: 1e-9)
        return clock

    return clocked


@pytest.mark.parametrize("checkpointing", ["none", "auto"])
@pytest.mark.parametrize("limit", [600_000, 850_000, 1_050_000])
def test_auto_takes_the_batch_of_most_samples_per_second_and_measures_none_that_cannot_fit(
    clocked: Callable[..., Clock], limit: int, checkpointing: str
):
    clock, rates = clocked(), dict[int, float]()
    given: dict[str, Any] = {"cluster": TWO, "margin": 0, "checkpointing": checkpointing, "memory": limit}
    try:
        for batch in range(1, 17):
            rates[batch] = dshard.plan(build(), tokens(), **given, batch=batch).samples_per_s
    except dshard.PlanError:
        most = max(rates)
    clock.measured.clear()
    found = dshard.plan(build(), tokens(), **given, batch="auto")
    assert found.peak_bytes <= limit
    assert found.model.batch_size == max(rates, key=rates.__getitem__)
    assert found.samples_per_s == pytest.approx(max(rates.values()))
    assert found.model.source == "measured"
    sizes = {size for size in (1, 2, 4, 8) if 2 * size <= most} | {most}
    assert sorted(clock.measured) == sorted([*sizes] * (3 if checkpointing == "auto" else 1))


def test_computing_again_takes_time_whatever_a_busy_machine_says(clocked: Callable[..., Clock]):
    clocked()  # of which a step takes as long whatever is computed again
    plan = dshard.plan(build(), tokens(), cluster=TWO, margin=0, checkpointing="auto")
    kinds = {kind: plan.model.under(UnitKind(kind)).units[1] for kind in CHECKPOINTING}
    assert {kind: unit.checkpointing for kind, unit in kinds.items()} == {kind: kind for kind in CHECKPOINTING}
    assert len({unit.forward_s for unit in kinds.values()}) == 1
    forward_s = kinds["none"].forward_s
    more = {kind: (unit.backward_s - kinds["none"].backward_s) / forward_s for kind, unit in kinds.items()}
    assert more["selective"] == 0  # its products are kept
    assert 0.3 < more["full"] <= 0.5
    assert "full" not in plan.checkpointing  # there is room for what is kept


def test_where_steps_run_out_of_memory_larger_ones_are_told_and_the_plan_says_so(clocked: Callable[..., Clock]):
    whole = clocked()
    expected = dshard.plan(build(), tokens(), **AUTO)
    assert expected.model.batch_size == max(whole.measured) == 256
    clock = clocked(most=5)
    found = dshard.plan(build(), tokens(), **AUTO)
    assert clock.measured == [1, 2, 4, 8]
    assert found.model.batch_size == 256
    assert found.step_s == pytest.approx(expected.step_s)  # the clock runs on a line
    assert found.model.source == "measured up to 4 samples"
    assert "costs: measured up to 4 samples" in found.explain()


def test_steps_that_the_memory_does_not_hold_before_the_model_is_sharded_are_not_run(clocked: Callable[..., Clock]):
    clocked()
    small = replace(TWO, memory_bytes=1_050_000)
    expected = dshard.plan(build(), tokens(), **{**AUTO, "memory": small.memory_bytes})
    clock = clocked()
    found = dshard.plan(build(), tokens(), **{**AUTO, "cluster": small})
    assert clock.measured == [1, 2]
    assert found.model.batch_size == expected.model.batch_size > 2
    assert found.step_s == pytest.approx(expected.step_s)
    assert found.model.source == "measured up to 2 samples"


@pytest.mark.parametrize(("batch", "said"), [("auto", "1 sample ran"), (4, "4 samples ran")])
def test_a_step_that_cannot_be_measured_is_refused_by_the_way_out(clocked: Callable[..., Clock], batch, said):
    clocked(most=0)
    with pytest.raises(dshard.PlanError, match=rf"^plan: a step must fit into the memory of cpu .* {said} .* device="):
        dshard.plan(build(), tokens(), **{**AUTO, "batch": batch})


def test_what_fails_for_other_reasons_is_not_taken_for_a_lack_of_memory(clocked: Callable[..., Clock], monkeypatch):
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("shapes cannot be multiplied")

    clocked()
    monkeypatch.setattr(measured_steps, "measure", broken)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        dshard.plan(build(), tokens(), **AUTO)


@pytest.mark.parametrize("device", [None, "titan-rtx"])
def test_where_no_batch_holds_what_is_reserved_the_plan_says_so(clocked: Callable[..., Clock], device):
    clocked()
    cluster = replace(cluster_of("titan-rtx", 2), memory_bytes=1 << 30)
    given: dict[str, Any] = {"cluster": cluster, "device": device, "strategies": "full"}
    limit = dshard.plan(build(), tokens()[:1], **given).peak_bytes + 1000
    with pytest.raises(dshard.PlanError, match="must fit into"):
        dshard.plan(build(), tokens(), **given, batch="auto", memory=limit, memory_of="reserved")


def quick(patch: pytest.MonkeyPatch, home: str) -> None:
    patch.setattr(Path, "home", lambda: Path(home))
    patch.setattr(
        meshes, "measure_links", lambda *a, **k: measure_links(*a, sizes=(1 << 14, 1 << 18), num_rounds=2, **k)
    )
    patch.setattr(measured_steps, "measure", lambda *a, **k: measure(*a, **{**k, "num_steps": 1, "min_s": 0.0}))


def out_of_memory_on_one(home: str) -> tuple[str, int]:
    """A plan where the last rank's memory does for one sample alone."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build()
    with pytest.MonkeyPatch.context() as patch:
        quick(patch, home)
        if dist.get_rank() == dist.get_world_size() - 1:
            patch.setattr(measured_steps, "measure", Clock(most=1))
        plan = dshard.plan(model, tokens(), mesh=mesh, batch="auto", memory="1MiB")
    dshard.fully_shard(model, mesh=mesh, plan=plan)
    model(torch.cat([tokens()] * 8)[: plan.model.batch_size]).sum().backward()
    return plan.to_json(), plan.model.batch_size


def test_ranks_take_one_batch_where_memory_runs_out_on_one_of_them(worlds: WorldPool, tmp_path):
    (first, batch), *others = worlds.run(2, out_of_memory_on_one, str(tmp_path))
    assert all(other == (first, batch) for other in others)
    plan = dshard.Plan.from_json(first)
    assert plan.peak_bytes <= 1 << 20
    assert plan.model.source == ("measured" if batch == 1 else "measured up to 1 sample")


def batch_of_cut_layers(home: str, checkpointing: str) -> tuple[str, float]:
    """A plan of layers that are cut over ranks which measure other times, and a step under it."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(*(ResidualMlp(32, 64) for _ in range(3)))
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with pytest.MonkeyPatch.context() as patch:
        quick(patch, home)
        if mesh.get_local_rank("tp"):
            timed = measured_steps.measure
            slower = lambda *a, **k: [UnitTimes(3 * t.forward_s, t.backward_s / 3) for t in timed(*a, **k)]  # noqa: E731
            patch.setattr(measured_steps, "measure", slower)
        given: dict[str, Any] = {"mesh": mesh["dp"], "batch": "auto", "checkpointing": checkpointing}
        plan = dshard.plan(model, torch.ones(4, 32), **given, memory="128KiB")
    dshard.fully_shard(model, mesh=mesh["dp"], plan=plan)
    loss = model(torch.ones(plan.model.batch_size, 32)).sum()
    loss.backward()
    return plan.to_json(), loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "auto"])
def test_ranks_over_which_layers_are_cut_take_one_batch(worlds: WorldPool, tmp_path, checkpointing):
    first, *others = worlds.run(4, batch_of_cut_layers, str(tmp_path), checkpointing)
    assert all(other == first for other in others)
    assert dshard.Plan.from_json(first[0]).peak_bytes <= 128 << 10
