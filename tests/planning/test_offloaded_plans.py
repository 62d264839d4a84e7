"""Plans for parameters that are kept in the CPU's memory: what that saves and costs, and that they are followed."""

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

import dshard
from dshard.cli import main
from dshard.planner import DEVICES, Cluster, Link, Links, Plan, Training, cluster_of, step_time
from dshard.planner.hosts import home_of
from dshard.policies import Strategy
from dshard.setup import planned_units
from dshard.testing import WorldPool
from tests.planning.small import build, losses, tokens

TITAN = DEVICES["titan-rtx"]
HOME = home_of(TITAN)


def planned(*, offloads: bool, cluster: Cluster | None = None, strategies: Any = "full", **training: Any) -> Plan:
    given = cluster if cluster is not None else cluster_of(TITAN, 4)
    kind = Training(is_offloaded=offloads, **training)
    return dshard.plan(build(), tokens(), cluster=given, device=TITAN, strategies=strategies, training=kind)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "keep", "full"])
def test_copies_come_ahead_of_gathers_and_the_optimizer_steps_on_the_cpu(strategy):
    free = Cluster(4, 4, Links.of(Link(0.0, 0.0)), memory_bytes=1 << 34)
    plain, away = (planned(offloads=offloads, cluster=free, strategies=strategy) for offloads in (False, True))
    units = away.model.units
    assert all(unit.home_s_per_byte == HOME.seconds_per_byte for unit in units)
    within = 1 if strategy == "ddp" else 4
    copied = [4 * sum(p.shard_numel(within) for p in unit.params) * HOME.seconds_per_byte for unit in units]
    stepped = [7 * 4 * unit.numel / within * HOME.step_seconds_per_byte for unit in units]
    # What communicates is copies alone, so that the step is this, by hand: copies of the next, or home of the last.
    again = strategy == "full" or strategy == "ddp"
    ahead = [*copied[1:], 0.0]
    forward = copied[0] + sum(max(unit.forward_s, next_s) for unit, next_s in zip(units, ahead, strict=True))
    backward = copied[0] + (copied[-1] if again else 0.0) * units[-1].is_used_in_backward
    for i, unit in enumerate(units):
        before = copied[i - 1] * units[i - 1].is_used_in_backward if i and again else 0.0
        backward += max(unit.backward_s, before + (copied[i + 1] if i + 1 < len(units) else 0.0))
    expected = forward + backward + sum(stepped)
    assert away.step_s == pytest.approx(expected, rel=1e-3)  # shards of 4 ranks are not quite a quarter
    assert away.step_s > plain.step_s
    assert away.peak_bytes < plain.peak_bytes


def test_one_device_holds_copies_alone():
    one = cluster_of(TITAN, 1)
    plain, away = (planned(offloads=offloads, cluster=one) for offloads in (False, True))
    of_model = sum(unit.param_bytes + unit.state_bytes for unit in plain.model.units)
    assert plain.memory_at_peak.by_category["optimizer"] > 0
    assert away.memory_at_peak.by_category["optimizer"] == 0
    assert away.peak_bytes < plain.peak_bytes - of_model / 2
    limit = (plain.peak_bytes + away.peak_bytes) // 2
    assert away.peak_bytes <= limit < plain.peak_bytes


def test_a_plan_is_kept_with_what_it_says_of_homes(tmp_path):
    plan = planned(offloads=True)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert step_time(plan.model, plan.strategies, plan.cluster) == pytest.approx(plan.step_s)


def test_a_plan_says_where_its_rates_are_from_and_that_nobody_measured_them():
    costs = next(line for line in planned(offloads=True).explain().splitlines() if line.startswith("costs: "))
    assert HOME.source in costs
    assert "is not measured" in costs


def test_what_torch_compile_cannot_take_is_not_planned_for():
    cluster = cluster_of(TITAN, 4, profile="published")
    training = Training(is_offloaded=True, is_compiled=True)
    with pytest.raises(dshard.PlanError, match="is_compiled and is_offloaded do not go together"):
        dshard.plan(build(), tokens(), cluster=cluster, device=TITAN, profile="published", training=training)


def test_times_that_are_measured_here_tell_nothing_of_copies():
    with pytest.raises(dshard.PlanError, match="is_offloaded needs a device"):
        dshard.plan(build(), tokens(), cluster=cluster_of(TITAN, 2), training=Training(is_offloaded=True))


def follow(offloads: bool, policy: Any) -> list[float]:
    model = build()
    plan = planned(offloads=offloads, cluster=cluster_of(TITAN, 2), strategies=["keep", "full", "ddp"])
    dshard.fully_shard(model, plan=Plan.from_json(plan.to_json()), offload_policy=policy)
    return losses(model, dist.get_rank())


def refused(offloads: bool, policy: Any) -> str:
    with pytest.raises(dshard.PlanError) as told:
        follow(offloads, policy)
    return str(told.value)


def warnings() -> list[str]:
    """Of a plan that knows nothing of offload, followed with it."""
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned_units.log, "warning", found.append)
        assert follow(False, CPUOffloadPolicy()) == follow(True, CPUOffloadPolicy())
    return found


def test_a_plan_is_followed_under_the_policy_that_it_was_made_for(worlds: WorldPool):
    assert worlds.run(2, follow, True, CPUOffloadPolicy()) == worlds.run(2, follow, False, OffloadPolicy())
    for policy in (None, OffloadPolicy()):
        for text in worlds.run(2, refused, True, policy):
            assert "is for parameters in the CPU's memory, but there is no offload_policy that keeps them there" in text
    for warned in worlds.run(2, warnings):
        assert ["the plan is for parameters on the device" in text for text in warned] == [True]


def test_the_command_plans_for_one_device_what_it_cannot_hold(capsys, tmp_path):
    given = ["plan", "gpt2-xl", "--world", "1", "--device", "rtx-4090", "--batch", "1", "--optimizer", "adamw"]
    assert main(given) == 2
    assert "the peak must fit into" in capsys.readouterr().err
    assert main([*given, "--offload", "--out", str(tmp_path / "plan.json")]) == 0
    plan = Plan.load(tmp_path / "plan.json")
    assert set(plan.strategies) == {Strategy.of("ddp")}
    assert all(unit.is_offloaded for unit in plan.model.units)
