"""Intervals of predictions: what 8 of 10 measured steps take."""

import json
import math
from dataclasses import replace

import pytest
import torch

from dshard.cli.models import GPT, GPTConfig
from dshard.errors import PlanError
from dshard.planner import DEVICES, Cluster, Link, Links, Measured, ModelCosts, ParamCosts, Plan, Training, UnitCosts
from dshard.planner.rates import Interval, Rates, around_one, cluster_of, published, variance_of, widened
from dshard.planning.plan import Profile
from dshard.policies import Strategy
from tests.planner.test_rates import SHIPPED


def test_a_factor_more_widens_an_interval_and_none_leaves_it():
    same = widened(Interval(0.9, 1.2), 0.0)
    assert (same.low, same.high) == pytest.approx((0.9, 1.2))
    found = widened(Interval(0.9, 1.2), 0.2)
    assert math.log(found.high) == pytest.approx(math.hypot(math.log(1.2), 1.2816 * 0.2), rel=1e-4)
    assert math.log(found.low) == pytest.approx(-math.hypot(math.log(0.9), 1.2816 * 0.2), rel=1e-4)
    assert variance_of(around_one(0.04)) == pytest.approx(0.04)


def planned(spread):
    units = tuple(UnitCosts(f"u{i}", (ParamCosts("p", 1000, 1000),), 7e-3, 14e-3) for i in range(4))
    cluster = Cluster(8, 4, Links.of(Link(1e-6, 1e-12)), Links.of(Link(1e-6, 1e-9)), 1 << 40)
    return Plan(ModelCosts(units), cluster, (Strategy.of("full"),) * 4, spread=spread)


def test_what_was_kept_aside_says_how_long_a_step_takes():
    plan = planned(Interval(0.5, 2.0))
    assert plan.step_interval_s == Interval(plan.step_s * 0.5, plan.step_s * 2)
    assert " in 8 of 10), of which" in str(plan)
    assert " in 8 of 10), of which" in plan.explain()
    without = replace(plan, spread=None)
    assert without.step_interval_s is None
    assert "in 8 of 10" not in str(without) + without.explain()


def test_a_plan_and_a_profile_keep_their_intervals(tmp_path):
    plan = planned(Interval(0.9, 1.2))
    assert Plan.from_json(plan.to_json()) == plan
    record = {**json.loads(plan.to_json()), "spread": {"low": 1.0}}
    with pytest.raises(PlanError, match=r"plan\.spread: must have the fields"):
        Plan.from_json(json.dumps(record))
    path = tmp_path / "profile.json"
    replace(published(), spread=None).save(path)
    assert Rates.load(path) == replace(published(), spread=None)


def test_a_plan_by_a_profile_has_its_interval():
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=512, num_layers=4, width=1024, num_heads=8, vocab_size=4096))
    sample, device = torch.zeros(32, 512, dtype=torch.int64), DEVICES["a100-80g"]
    training = Training(torch.bfloat16, torch.bfloat16)
    profile = Profile(model, sample, device=device, training=training, rates=SHIPPED)
    found = profile.plan(cluster_of(device, 64, profile=SHIPPED), strategies=("full", "hybrid(8)"))
    assert found.spread == SHIPPED.spread.steps
    assert found.step_interval_s.low < found.step_s < found.step_interval_s.high
    assert found.replanned(Measured(found.step_s * 2)).spread is None


def test_the_shipped_intervals_are_of_runs_that_were_kept_aside():
    spread = SHIPPED.spread
    assert spread.num_runs == sum(each.num_runs for each in SHIPPED.misses if each.source != "all")
    assert spread.steps.low < 1 < spread.steps.high
    assert set(spread.covered) == {each.source for each in SHIPPED.misses if each.source != "all"}
