"""The shipped profile: intervals of runs that were kept aside, source by source, and that it is what its runs make."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.calibration.fitting import RUNS, holding, main, profile_of, spread_of
from benchmarks.calibration.spent import spent
from dshard.cli.calibrate import read_runs
from dshard.planner.calibration import predicted_s
from dshard.planner.rates import PRIORS, Interval, Rates, around_one, published
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


def test_sources_count_alike_however_many_runs_they_have():
    few, many = [1.3, 1 / 1.3], [1.02, 1 / 1.02] * 100
    found = spread_of([*few, *many], ["few"] * 2 + ["many"] * 200)
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
        found = spread_of(np.exp(np.concatenate(seen)).tolist(), names).steps
        inside += np.mean((found.low <= np.exp(new)) & (np.exp(new) <= found.high))
    assert 0.75 < inside / 400 < 0.85


def test_calibration_counts_intervals_from_runs_that_it_kept_aside(tmp_path):
    rows = [
        {**ROW, "id": f"{sharding} {ranks}", "n_gpus": ranks, "sharding": sharding, "source": f"of {ranks % 3}",
         "d_model": 1024, "heads": 8}
        for ranks in range(16, 176, 8) for sharding in ("full", "hybrid")
    ]  # fmt: skip
    truth = {name: constant.value for name, constant in PRIORS.items()}
    runs = read_runs(table_of(rows, tmp_path / "runs.tsv"))

    def spread_with(noise):
        factors = np.exp(noise * np.random.default_rng(0).normal(size=len(runs)))
        return profile_of(
            [replace(run, seconds=predicted_s(run, truth) * factor) for run, factor in zip(runs, factors, strict=True)]
        ).spread

    exact = spread_with(0.0)
    assert (exact.steps.low, exact.steps.high) == pytest.approx((1, 1), abs=1e-3)
    assert exact.num_runs == len(runs)
    noisy = spread_with(0.1)
    assert noisy.steps.high - noisy.steps.low > 10 * (exact.steps.high - exact.steps.low)
    assert set(noisy.covered) == {"of 0", "of 1", "of 2"}


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
    one, other = made.spread.steps, shipped.spread.steps
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
