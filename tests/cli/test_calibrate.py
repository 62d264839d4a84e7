"""``dshard calibrate`` and ``--profile``, as they are typed."""

import pytest

from dshard.cli import main
from dshard.planner.rates import PRIORS, Rates, published
from tests.planner.test_rates import ROW, table_of

TINY = ("gpt-nano", "--world", "16", "--device", "a100-80g", "--sequence", "64")


def refused(capsys, *args):
    assert main(list(map(str, args))) == 2
    return capsys.readouterr().err


def test_runs_of_few_columns_make_a_profile_that_plan_and_simulate_take(tmp_path, capsys):
    rows = [{**ROW, "n_gpus": ranks, "tokens_s_gpu": 2e5} for ranks in (8, 16)] + [{**ROW, "gpu": "abacus"}]
    runs, out = table_of(rows, tmp_path / "runs.tsv"), tmp_path / "profile.json"
    assert main(["calibrate", str(runs), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "2 runs; 1 not used: unknown device abacus" in text
    assert "| product.a100 |" in text
    assert "| given | 2 |" in text
    found, known = Rates.load(out), published().spread
    steps = f"{found.spread.steps.low:.2f} to {found.spread.steps.high:.2f}"
    assert f"steps of the source take {steps} of the predicted time in 8 of 10 (2 runs kept aside)" in text
    (part,) = found.spread.covered.values()
    assert f"in the interval known before: {part:.0%} of given" in text
    assert found.spread.pairs == known.pairs
    assert found.source == "2 runs of runs.tsv"
    assert found != published()
    steps = []
    for profile in ((), ("--profile", "published"), ("--profile", str(out))):
        assert main(["simulate", *TINY, *profile, "--strategy", "full"]) == 0
        steps.append(capsys.readouterr().out)
    assert len(set(steps)) == 3
    assert ["8 in 10" in text for text in steps] == [False, True, True]
    assert main(["plan", *TINY, "--profile", str(out)]) == 0
    assert "rates of 2 runs of runs.tsv" in capsys.readouterr().out


def test_what_is_no_table_or_profile_is_refused(tmp_path, capsys):
    path = tmp_path / "runs.tsv"
    assert "cannot be read" in refused(capsys, "calibrate", path)
    path.write_text("gpu\tn_gpus\n")
    assert "has no rows" in refused(capsys, "calibrate", path)
    path.write_text("gpu\tn_gpus\na100_80gb\t8\n")
    assert "has no column 'layers'" in refused(capsys, "calibrate", path)
    assert "has none: unknown device abacus" in refused(capsys, "calibrate", table_of([{**ROW, "gpu": "abacus"}], path))
    assert "line 2 of" in refused(capsys, "calibrate", table_of([{**ROW, "layers": "few"}], path))
    assert "--profile must be what dshard calibrate wrote, but reading" in refused(
        capsys, "plan", *TINY, "--profile", path
    )


def test_the_shipped_profile_is_of_the_shipped_runs():
    rates = published()
    assert rates.source == "274 published runs"
    assert sum(each.num_runs for each in rates.misses if each.source != "all") == 274


@pytest.mark.slow
def test_the_shipped_profile_is_what_the_command_makes(tmp_path, capsys):
    out = tmp_path / "rates.json"
    assert main(["calibrate", "published", "--from-priors", "--out", str(out)]) == 0
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
