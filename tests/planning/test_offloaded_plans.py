"""Plans for parameters that are kept in the CPU's memory: what that saves and costs, and that they are followed."""

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

import dshard
from dshard.cli import main
from dshard.planner import DEVICES, Cluster, Link, Links, Plan, Training, cluster_of, step_time
from dshard.planner.profiles import home_of
from dshard.policies import Strategy
from dshard.setup import planned as following
from dshard.testing import WorldPool
from tests.planning.small import build, losses, tokens

TITAN = DEVICES["titan-rtx"]
HOME = home_of(TITAN)


def planned(offload: str, cluster: Cluster | None = None, strategies: Any = "full", **given: Any) -> Plan:
    given["cluster"] = cluster if cluster is not None else cluster_of(TITAN, 4)
    return dshard.plan(build(), tokens(), device=TITAN, strategies=strategies, offload=offload, **given)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "keep", "full"])
def test_copies_come_ahead_of_gathers_and_the_optimizer_steps_on_the_cpu(strategy):
    free = Cluster(4, 4, Links.of(Link(0.0, 0.0)), memory_bytes=1 << 34)
    plain, away = (planned(offload, free, strategy) for offload in ("none", "all"))
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
    assert away.time_by_term["waiting for copies of what is kept in the CPU's memory"] == pytest.approx(away.exposed_s)
    assert not any("copies of" in term or "within hosts" in term for term in plain.time_by_term)
    assert away.step_s > plain.step_s
    assert away.peak_bytes < plain.peak_bytes
    assert plain.deferred_step_s is None
    assert away.deferred_step_s is not None
    assert away.step_s - sum(stepped) < away.deferred_step_s < away.step_s
    assert [line for line in away.explain().splitlines() if line.startswith("deferred: ")]
    assert "deferred: " not in plain.explain()


def test_one_device_holds_copies_alone():
    one = cluster_of(TITAN, 1)
    plain, away = (planned(offload, one) for offload in ("none", "all"))
    of_model = sum(unit.param_bytes + unit.state_bytes for unit in plain.model.units)
    assert plain.memory_at_peak.by_category["optimizer"] > 0
    assert away.memory_at_peak.by_category["optimizer"] == 0
    assert away.peak_bytes < plain.peak_bytes - of_model / 2
    limit = (plain.peak_bytes + away.peak_bytes) // 2
    assert away.peak_bytes <= limit < plain.peak_bytes


def mixed(num_ranks: int = 2, **given: Any) -> Plan:
    """A plan of which some units are kept in the CPU's memory: half of what that saves is needed."""
    cluster = cluster_of(TITAN, num_ranks)
    most, least = (planned(offload, cluster).peak_bytes for offload in ("none", "all"))
    return planned("auto", cluster, memory=(most + least) // 2, margin=0, **given)


def test_where_half_of_what_offload_saves_is_needed_some_units_are_offloaded():
    for num_ranks in (1, 2):
        cluster = cluster_of(TITAN, num_ranks)
        none, every = (planned(offload, cluster) for offload in ("none", "all"))
        plan = mixed(num_ranks)
        assert set(plan.is_offloaded) == {False, True}
        assert plan.certificate is not None
        assert plan.certificate.gap == 0
        assert none.step_s < plan.step_s < every.step_s
        assert every.peak_bytes < plan.peak_bytes <= plan.certificate.limit_bytes < none.peak_bytes
        assert 0 < plan.home_bytes < every.home_bytes
        text = f"{sum(plan.is_offloaded)} of {len(plan.is_offloaded)} units in the CPU's memory"
        assert text in plan.explain()
        assert f"{plan.strategies[0]} + offload" in plan.explain()
    assert not any(planned("auto", cluster_of(TITAN, 2)).is_offloaded)  # where all fit


def test_where_nothing_fits_what_was_no_choice_is_advised():
    for offload, checkpointing, strategies, held, advice in (
        ("none", "none", "full", "bytes, full)", "activation checkpointing, split(q), offload, or units"),
        ("auto", "none", "full", "bytes, full + offload)", "more ranks, activation checkpointing, split(q), or units"),
        ("auto", "auto", ("full", "split(2)"), "bytes, split(2) + full checkpointing)", "more ranks, or units of"),
    ):
        with pytest.raises(dshard.PlanError) as told:
            planned(offload, strategies=strategies, checkpointing=checkpointing, memory="1KiB")
        assert held in str(told.value)
        assert advice in str(told.value)


def test_what_is_kept_at_home_is_told_by_hand():
    plan = planned("all", cluster_of(TITAN, 1))
    assert plan.home_bytes == sum(16 * unit.numel for unit in plan.model.units)  # with gradients, and two states
    assert planned("none").home_bytes == 0


def test_with_checkpointing_as_a_choice_each_unit_has_both():
    plan = mixed(checkpointing="auto")
    kinds = {unit.kind for unit in plan.model.units} | {
        each.kind for unit in plan.model.units for each in unit.alternatives
    }
    assert {kind.is_offloaded for kind in kinds} == {False, True}
    assert {kind.checkpointing for kind in kinds} > {"none"}
    assert plan.step_s <= mixed().step_s


def test_the_optimizer_does_not_touch_what_is_frozen():
    def optimizer_s(freezes: bool) -> float:
        model = build()
        for name, param in model.named_parameters():
            param.requires_grad_(not (freezes and name.startswith("blocks.1.")))
        plan = dshard.plan(model, tokens(), cluster=cluster_of(TITAN, 1), device=TITAN, offload="all")
        return sum(unit.optimizer_s for unit in plan.model.units if "blocks.1" in unit.name)

    assert optimizer_s(freezes=True) == 0 < optimizer_s(freezes=False)


def test_a_plan_is_kept_with_what_it_says_of_homes(tmp_path):
    for plan in (planned("all"), mixed()):
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan
        assert step_time(plan.model, plan.strategies, plan.cluster) == pytest.approx(plan.step_s)


def test_a_plan_says_where_its_rates_are_from_and_that_nobody_measured_them():
    costs = next(line for line in planned("all").explain().splitlines() if line.startswith("costs: "))
    assert HOME.source in costs
    assert "is not measured" in costs


def test_a_compiled_model_computes_faster_and_its_copies_take_as_long():
    cluster = cluster_of(TITAN, 4, profile="published")
    eager, compiled = (
        planned("all", cluster, profile="published", training=Training(is_compiled=is_compiled))
        for is_compiled in (False, True)
    )
    assert compiled.step_s < eager.step_s
    assert [unit.home_s_per_byte for unit in compiled.model.units] == [
        unit.home_s_per_byte for unit in eager.model.units
    ]


def test_times_that_are_measured_here_tell_nothing_of_copies():
    for offload in ("all", "auto"):
        with pytest.raises(dshard.PlanError, match=f"offload='{offload}' needs a device"):
            dshard.plan(build(), tokens(), cluster=cluster_of(TITAN, 2), offload=offload)


def follow(offload: str, policy: Any) -> list[float]:
    model = build()
    plan = planned(offload, cluster_of(TITAN, 2), ["keep", "full", "ddp"]) if offload != "some" else mixed()
    dshard.fully_shard(model, plan=Plan.from_json(plan.to_json()), offload_policy=policy)
    return losses(model, dist.get_rank())


def refused(offload: str, policy: Any) -> str:
    with pytest.raises(dshard.PlanError) as told:
        follow(offload, policy)
    return str(told.value)


def warnings(offload: str) -> list[str]:
    """Of a plan that keeps all on the device, followed with offload."""
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(following.log, "warning", found.append)
        assert follow(offload, CPUOffloadPolicy()) == follow("all", CPUOffloadPolicy())
    return found


def test_a_plan_is_followed_under_the_policy_that_it_was_made_for(worlds: WorldPool):
    plain = worlds.run(2, follow, "none", OffloadPolicy())
    assert (
        worlds.run(2, follow, "all", CPUOffloadPolicy()) == worlds.run(2, follow, "some", CPUOffloadPolicy()) == plain
    )
    for offload, policy in (("all", None), ("all", OffloadPolicy()), ("some", None)):
        for text in worlds.run(2, refused, offload, policy):
            assert "is for parameters in the CPU's memory, but there is no offload_policy that keeps them there" in text
    for warned in worlds.run(2, warnings, "none"):
        assert ["the plan is for parameters on the device" in text for text in warned] == [True]
    assert worlds.run(2, warnings, "auto") == [[], []]  # it has chosen to keep all of them there


def test_the_command_plans_for_one_device_what_it_cannot_hold(capsys, tmp_path):
    given = ["plan", "gpt2-xl", "--world", "1", "--device", "rtx-4090", "--batch", "1", "--optimizer", "adamw"]
    assert main(given) == 2
    assert "the peak must fit into" in capsys.readouterr().err
    assert main([*given, "--offload", "--out", str(tmp_path / "plan.json")]) == 0
    plan = Plan.load(tmp_path / "plan.json")
    assert set(plan.strategies) == {Strategy.of("ddp")}
    assert all(plan.is_offloaded)
    assert main([*given, "--offload", "auto", "--out", str(tmp_path / "some.json")]) == 0
    some = Plan.load(tmp_path / "some.json")
    assert set(some.is_offloaded) == {False, True}
    assert some.step_s < plan.step_s
    assert f"{sum(some.is_offloaded)} of {len(some.is_offloaded)} units in the CPU's memory" in capsys.readouterr().out
