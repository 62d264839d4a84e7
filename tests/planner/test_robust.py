"""Intervals of predictions, and the choice among those that they leave open."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dshard.cli.models import GPT, GPTConfig
from dshard.errors import PlanError
from dshard.planner import (
    DEVICES,
    Cluster,
    Link,
    Links,
    Measured,
    ModelCosts,
    ParamCosts,
    Plan,
    Training,
    UnitCosts,
    peak_bytes,
    solve,
    step_time,
)
from dshard.planner.rates import (
    Interval,
    Rates,
    Spread,
    around_one,
    published,
    variance_of,
    widened,
)
from dshard.planner.robust import Close, Doubt, across_s, close_of, doubt_lines, robust
from dshard.planning.plan import Profile
from dshard.policies import Strategy
from tests.planner.cases import STRATEGIES, clusters, models
from tests.planner.test_rates import SHIPPED

MARGIN = 0.03
PAIRS = Interval(-0.1, 1.0)
seconds = st.integers(1, 1000).map(lambda ms: ms / 997)
intervals = st.builds(Interval, seconds.map(lambda s: -s), seconds)


def test_a_factor_more_widens_an_interval_and_none_leaves_it():
    same = widened(Interval(0.9, 1.2), 0.0)
    assert (same.low, same.high) == pytest.approx((0.9, 1.2))
    found = widened(Interval(0.9, 1.2), 0.2)
    assert math.log(found.high) == pytest.approx(math.hypot(math.log(1.2), 1.2816 * 0.2), rel=1e-4)
    assert math.log(found.low) == pytest.approx(-math.hypot(math.log(0.9), 1.2816 * 0.2), rel=1e-4)
    assert variance_of(around_one(0.04)) == pytest.approx(0.04)


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(seconds, seconds), min_size=1),
    intervals,
    st.sampled_from([0.0, MARGIN, 0.5]),
    st.sampled_from([0.0, MARGIN, 0.5, None]),
)
def test_worst_cases_are_those_of_the_ends_of_the_interval(drawn, pairs, margin, most):
    steps_s, across = ({name: pair[i] for name, pair in drawn.items()} for i in (0, 1))

    def longer(one, other):
        return [steps_s[one] - steps_s[other] + t * (across[one] - across[other]) for t in (0.0, pairs.low, pairs.high)]

    close = {each.name: each for each in close_of(steps_s, across, pairs, margin, most)}
    fastest = min(steps_s, key=lambda name: steps_s[name])
    for name, step_s in steps_s.items():
        is_open = min(longer(name, fastest)) <= 0 or step_s <= steps_s[fastest] * (1 + margin)
        assert (name in close) == (is_open and (most is None or step_s <= steps_s[fastest] * (1 + most)))
    for name, each in close.items():
        worst = max(max(longer(name, other)) / steps_s[other] for other in close)
        assert each.worst == pytest.approx(max(0.0, worst), abs=1e-12)
    assert [each.worst for each in close.values()] == sorted(each.worst for each in close.values())


@st.composite
def cases(draw):
    model, cluster = draw(models(max_units=2)), draw(clusters())
    known = tuple(Strategy.of(name).on(cluster.num_ranks) for name in STRATEGIES)
    known = tuple(dict.fromkeys(known))
    peaks = sorted(peak_bytes(model, (each,) * len(model.units), cluster) for each in known)
    limit = max(1, peaks[draw(st.integers(0, len(peaks) - 1))])
    margin = draw(st.sampled_from([0.0, MARGIN]))
    return model, cluster, known, solve(model, cluster, known, limit, tolerance=margin)


@given(cases())
@settings(max_examples=30, deadline=None)
def test_where_nothing_is_in_doubt_the_choice_is_that_of_the_solver(case):
    model, cluster, known, solution = case
    for spread in (Spread(), Spread(Interval(0.5, 2.0), 30, {}, Interval(0.0, 0.0), 30)):
        margin = solution.certificate.margin
        assert robust(model, cluster, solution, known, spread, margin=margin)[0] == solution


@given(cases(), intervals)
@settings(max_examples=50, deadline=None)
def test_no_choice_that_is_left_open_has_a_smaller_worst_case_by_more_than_the_margin(case, pairs):
    model, cluster, known, solution = case
    assume(solution.certificate.fastest_s > 0)
    margin = solution.certificate.margin
    found, doubt = robust(model, cluster, solution, known, Spread(pairs=pairs, num_pairs=9), margin=margin)
    told = found.certificate
    taken = next(each for each in doubt.close if each.name == doubt.taken)
    assert taken.worst <= min(each.worst for each in doubt.close) + margin
    assert told.peak_bytes == peak_bytes(model, found.strategies, cluster) <= told.limit_bytes
    assert told.step_s == pytest.approx(step_time(model, found.strategies, cluster), rel=1e-9)
    assert told.step_s <= taken.step_s * (1 + 1e-9)
    assert -1e-9 <= told.slower_by <= told.margin + 1e-9
    before = solution.certificate
    assert (told.fastest, told.lower_bound_s) == (before.fastest, before.lower_bound_s)


def crossing(num_units=32):
    """Alike units on two hosts of four; under full, half of the step's seconds cross hosts, nearly all of it hidden."""
    param = ParamCosts("p", 1000, 1000, gather_itemsize=4, grad_itemsize=4)
    units = tuple(UnitCosts(f"u{i}", (param,), 7e-3, 14e-3) for i in range(num_units))
    across = Links.of(Link(1e-6, 1e-9))  # 3.5 ms for the million of elements
    return ModelCosts(units), Cluster(8, 4, Links.of(Link(1e-6, 1e-12)), across, 1 << 40)


def test_of_full_and_hybrid_that_cannot_be_told_apart_the_one_that_crosses_hosts_less_is_taken():
    model, cluster = crossing()
    known = tuple(map(Strategy.of, ("full", "hybrid(4)")))
    limit = 1 << 40
    solution = solve(model, cluster, known, limit, tolerance=MARGIN)
    assert set(map(str, solution.strategies)) == {"full"}
    found, doubt = robust(model, cluster, solution, known, Spread(pairs=PAIRS, num_pairs=16), margin=MARGIN)
    assert set(map(str, found.strategies)) == {"hybrid(4)"}
    worst = {each.name: each.worst for each in doubt.close}
    assert {"full", "hybrid(4)"} <= worst.keys()
    assert worst["hybrid(4)"] + MARGIN < worst["full"]
    text = Plan(model, cluster, found.strategies, known, found.certificate, doubt=doubt).explain()
    assert "cannot be told apart" in text
    assert "hybrid(4) (taken)" in text
    assert "0.1 s shorter to 1 s longer than predicted in 8 of 10 (16 pairs)" in text
    capped, _ = robust(model, cluster, solution, known, Spread(pairs=PAIRS, num_pairs=16), margin=0.0, most=0.0)
    assert capped == solution


def test_what_was_kept_aside_says_how_long_a_step_takes():
    plan = Plan(*crossing(), (Strategy.of("full"),) * 32, doubt=Doubt(Interval(0.5, 2.0)))
    assert plan.step_interval_s == Interval(plan.step_s * 0.5, plan.step_s * 2)
    assert " in 8 of 10), of which" in str(plan)
    assert " in 8 of 10), of which" in plan.explain()
    without = replace(plan, doubt=None)
    assert without.step_interval_s is None
    assert "in 8 of 10" not in str(without) + without.explain()
    assert doubt_lines(plan.doubt) == []


def test_a_plan_and_a_profile_keep_what_is_in_doubt(tmp_path):
    model, cluster = crossing()
    doubt = Doubt(Interval(0.9, 1.2), PAIRS, 16, (Close("full", 1.0, 0.5, 0.1),), "full")
    plan = Plan(model, cluster, (Strategy.of("full"),) * 32, doubt=doubt)
    assert Plan.from_json(plan.to_json()) == plan
    record = {**json.loads(plan.to_json()), "doubt": {"steps": 1}}
    with pytest.raises(PlanError, match=r"plan\.doubt: must have the fields"):
        Plan.from_json(json.dumps(record))
    path = tmp_path / "profile.json"
    published().save(path)
    record = json.loads(path.read_text())
    del record["spread"]
    path.write_text(json.dumps(record))
    assert Rates.load(path) == replace(published(), spread=None)


def test_a_plan_by_a_profile_is_the_robust_one_and_says_so():
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=512, num_layers=4, width=1024, num_heads=8, vocab_size=4096))
    sample, device = torch.zeros(32, 512, dtype=torch.int64), DEVICES["a100-80g"]
    training = Training(torch.bfloat16, torch.bfloat16)

    described = SHIPPED.cluster(device, 64)
    cluster = replace(described, inside=Links.of(Link(1e-5, 5e-11)))  # so slow that staying inside takes longer

    def planned(rates, **given):
        profile = Profile(model, sample, device=device, training=training, rates=rates)
        return profile.plan(cluster, strategies=("full", "hybrid(8)"), **given)

    sure, robust_one = planned(replace(SHIPPED, spread=None)), planned(SHIPPED)
    assert sure.doubt is None
    assert robust_one.doubt.taken
    crossed = [across_s(each.model, each.strategies, each.cluster) for each in (robust_one, sure)]
    assert crossed[0] <= crossed[1]
    assert robust_one.step_interval_s.low < robust_one.step_s < robust_one.step_interval_s.high
    fastest = planned(SHIPPED, margin=0)
    assert fastest.strategies == fastest.certificate.fastest
    assert fastest.certificate.gap == 0
    doubtful = replace(SHIPPED, spread=Spread(SHIPPED.spread.steps, 274, {}, Interval(-0.1, 100.0), 16))
    slower_by = planned(doubtful).certificate.slower_by
    assert slower_by > 0
    assert planned(doubtful, margin=slower_by * 0.9).certificate.slower_by <= slower_by * 0.9
    assert robust_one.replanned(Measured(robust_one.step_s * 2)).doubt is None


def test_the_shipped_intervals_are_of_runs_that_were_kept_aside():
    spread = SHIPPED.spread
    assert spread.num_runs == sum(each.num_runs for each in SHIPPED.misses if each.source != "all")
    assert spread.steps.low < 1 < spread.steps.high
    assert spread.pairs.low <= 0 <= spread.pairs.high
    assert set(spread.covered) == {each.source for each in SHIPPED.misses if each.source != "all"}
