"""The shipped profile: intervals of runs that were kept aside, source by source, and that it is what its runs make."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.calibration.fitting import RUNS, across_s, holding, main, profile_of, spread_of
from benchmarks.calibration.spent import spent
from dshard.cli.calibrate import read_runs
from dshard.planner.calibration import predicted_s
from dshard.planner.rates import PRIORS, Interval, Rates, Spread, around_one, published
from dshard.planner.robust import across_s as across_of_plan
from tests.planner.test_rates import ROW, ROWS, SHIPPED, simulated, table_of


def test_an_interval_is_of_as_many_runs_as_it_takes():
    assert holding([float(n) for n in range(8)]) is None
    assert holding([3.0, *(float(n) for n in range(10, 17)), 99.0]) == Interval(3.0, 99.0)
    assert holding([float(n) for n in range(19)]) == Interval(1.0, 17.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=10, max_size=60))
def test_an_interval_holds_8_of_10_runs_that_it_did_not_see(values):
    inside = 0
    for i, value in enumerate(values):
        others = holding(values[:i] + values[i + 1 :])
        inside += others.low <= value <= others.high
    assert inside >= 0.8 * len(values)


def test_few_pairs_say_nothing():
    found = spread_of([1.0] * 20, ["a"] * 10 + ["b"] * 10, [0.5] * 9)
    assert found == Spread(Interval(1.0, 1.0), 20, {"a": 1.0, "b": 1.0}, Interval(0.0, 0.5), 9, 2)
    assert spread_of([1.0] * 20, ["a"] * 10 + ["b"] * 10, [0.5] * 8).pairs is None


def test_sources_count_alike_however_many_runs_they_have():
    few, many = [1.3, 1 / 1.3], [1.02, 1 / 1.02] * 100
    found = spread_of([*few, *many], ["few"] * 2 + ["many"] * 200, [])
    square = (math.log(1.3) ** 2 + math.log(1.02) ** 2) / 2
    assert found.steps == around_one(square)
    assert math.log(found.steps.high) == pytest.approx(1.2816 * math.sqrt(square), rel=1e-4)
    assert found.covered == {"few": 0.0, "many": 1.0}  # in what the other alone says
    assert (found.num_runs, found.num_sources) == (202, 2)


def test_the_interval_for_a_source_that_was_not_seen_holds_8_in_10_whichever_sources_have_the_runs():
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(400):  # sources are off by 6 % each, and their runs by 8 %
        sizes = [200, 30, 10, 10, 4, 4, 2, 40]
        *seen, new = [random.normal(0, 0.06) + random.normal(0, 0.08, size) for size in sizes]
        names = [str(i) for i, each in enumerate(seen) for _ in each]
        found = spread_of(np.exp(np.concatenate(seen)).tolist(), names, []).steps
        inside += np.mean((found.low <= np.exp(new)) & (np.exp(new) <= found.high))
    assert 0.75 < inside / 400 < 0.85


@pytest.mark.parametrize(
    "changed",
    [{}, {"sharding": "hybrid"}, {"sharding": "keep", "grad_accum": 2}, {"n_gpus": 8}],
    ids=str,
)
def test_what_crosses_hosts_is_the_same_of_a_run_and_of_a_plan(changed, tmp_path):
    row = {**ROW, "n_gpus": 64, **changed}
    (run,) = read_runs(table_of([row], tmp_path / "runs.tsv"))
    plan = simulated(row, run)
    expected = across_of_plan(plan.model, plan.strategies, plan.cluster)
    assert across_s(run, SHIPPED.values) == pytest.approx(expected, rel=1e-3, abs=1e-12)
    assert (expected > 0) == (row["n_gpus"] > 8)


def test_calibration_counts_intervals_from_runs_that_it_kept_aside(tmp_path):
    rows = [
        {**ROW, "id": f"{sharding} {ranks}", "n_gpus": ranks, "sharding": sharding, "source": f"of {ranks % 3}",
         "d_model": 1024, "heads": 8}
        for ranks in range(16, 176, 8) for sharding in ("full", "hybrid")
    ]  # fmt: skip
    truth = {name: constant.value for name, constant in PRIORS.items()}
    runs = read_runs(table_of(rows, tmp_path / "runs.tsv"))

    def spread_with(extra):
        made = [
            replace(run, seconds=predicted_s(run, truth) + extra * across_s(run, truth))
            for run in runs
        ]  # fmt: skip
        return profile_of(made).spread

    exact = spread_with(0.0)
    assert (exact.steps.low, exact.steps.high) == pytest.approx((1, 1), abs=1e-3)
    assert (exact.pairs.low, exact.pairs.high) == pytest.approx((0, 0), abs=1e-3)
    assert (exact.num_runs, exact.num_pairs) == (len(runs), len(runs) // 2)
    longer = spread_with(0.5)
    assert longer.pairs.high > 0.05
    assert longer.steps.high - longer.steps.low > 10 * (exact.steps.high - exact.steps.low)
    assert set(longer.covered) == {"of 0", "of 1", "of 2"}


def test_the_shipped_profile_is_of_the_shipped_runs():
    rates = published()
    assert rates.source == "274 published runs"
    assert sum(each.num_runs for each in rates.misses if each.source != "all") == 274
    assert len(RUNS.read_text().splitlines()) == 1 + 274


@pytest.mark.slow
def test_the_shipped_profile_is_what_the_command_makes(tmp_path, capsys):
    out = tmp_path / "rates.json"
    main(["--out", str(out)])
    assert "the faster one told in 9 of 9" in capsys.readouterr().out
    made, shipped = Rates.load(out), published()
    assert made.source == shipped.source
    for name in PRIORS:
        one, other = made.constants[name], shipped.constants[name]
        assert one.value == pytest.approx(other.value, rel=1e-3)
        assert one.uncertainty == pytest.approx(other.uncertainty, rel=1e-2)
    for one, other in ((made.spread.steps, shipped.spread.steps), (made.spread.pairs, shipped.spread.pairs)):
        assert (one.low, one.high) == pytest.approx((other.low, other.high), rel=1e-2)
    for one, other in zip(made.misses, shipped.misses, strict=True):
        assert (one.source, one.num_runs) == (other.source, other.num_runs)
        assert (one.mean, one.p90) == pytest.approx((other.mean, other.p90), rel=1e-2)


@pytest.mark.parametrize("row", ROWS)
def test_a_measured_run_is_told_apart_as_a_plan_is(row, tmp_path):
    (run,) = read_runs(table_of([row], tmp_path / "runs.tsv"))
    plan, found = simulated(row, run), spent(run, SHIPPED.values)
    assert sum(found.values()) == pytest.approx(predicted_s(run, SHIPPED.values), rel=1e-9)
    waits = {"waiting within hosts": 0.0, "waiting between hosts": 0.0}
    terms = dict(plan.time_by_term)
    for term in list(terms):
        if term.startswith("waiting"):
            waits[f"waiting {' '.join(term.split()[-2:])}"] += terms.pop(term)
    if run.sharding != "hybrid":  # where part of a collective is between hosts, the two divide it in another way
        terms |= {term: seconds for term, seconds in waits.items() if seconds}
        assert found.keys() == terms.keys()
    else:
        assert sum(found.pop(term) for term in waits) == pytest.approx(sum(waits.values()), rel=1e-2)
    for term, seconds in terms.items():
        assert found[term] == pytest.approx(seconds, rel=1e-2, abs=1e-3 * plan.step_s)
