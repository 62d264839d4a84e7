"""Runs beside predictions, by source, and the worst of them."""

import json

import numpy as np
import pytest

from benchmarks.calibration import published
from benchmarks.calibration.fitting import RUNS as SHIPPED_RUNS
from benchmarks.calibration.spent import spent
from dshard.cli.calibrate import read_runs
from dshard.planner import rates
from dshard.planner.calibration import errors_of, misses_of, predicted_s
from tests.cli.launch import REPO
from tests.planner.test_rates import ROW, table_of

RUNS = (
    *({**ROW, "id": f"a{n}", "n_gpus": n, "source": "https://github.com/of/one/blob/x", "model": "m"} for n in (8, 16)),
    *({**ROW, "id": f"b{n}", "micro_batch": n, "source": "two", "tokens_s_gpu": 3e5} for n in range(2, 11)),
    {**ROW, "id": "tall", "seq": 512, "source": "two", "tokens_s_gpu": 1e6},
)


@pytest.fixture
def runs(tmp_path):
    return table_of(RUNS, tmp_path / "runs.tsv")


def cells(text, first):
    """The cells of the line of a table that starts so."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_runs_are_beside_their_predictions_by_source_and_the_worst_with_what_they_are(runs, tmp_path, capsys):
    out = tmp_path / "rows.json"
    published.main(["--runs", str(runs), "--out", str(out)])
    text, record = capsys.readouterr().out, json.loads(out.read_text())
    known, shipped = read_runs(runs), rates.published()
    assert text.startswith(f"12 runs; profile: {shipped.source}\n")
    for name, source in (("of/one", "https://github.com/of/one/blob/x"), ("two", "two"), ("all", None)):
        found = misses_of(errors_of([run for run in known if source in (None, run.source)], shipped.constants), name)
        assert cells(text, name) == [name, str(found.num_runs), f"{found.mean:.1%}", f"{found.p90:.1%}"]
    errors = dict(zip([run.name for run in known], errors_of(known, shipped.constants), strict=True))
    worst = sorted(errors, key=lambda name: -abs(errors[name]))
    table = text[text.index("the 10 runs that are missed most:") :]
    assert [line.split()[1] for line in table.splitlines()[4:14]] == worst[:10]
    for run, row in zip(known, record["rows"], strict=True):
        assert (row["name"], row["measured_s"]) == (run.name, run.seconds)
        assert row["predicted_s"] == pytest.approx(predicted_s(run, shipped.values))
        assert row["error"] == pytest.approx(errors[run.name])
        assert row["terms"] == pytest.approx({k: s / row["predicted_s"] for k, s in spent(run, shipped.values).items()})
        assert sum(row["terms"].values()) == pytest.approx(1)
        assert row["waits"] == sum(part for term, part in row["terms"].items() if term.startswith("waiting"))
        bytes_of_states = 16 * run.gather_bytes.sum() / 2 / run.within
        assert row["states"] == pytest.approx(bytes_of_states / run.device.memory_bytes)
    rows = {row["name"]: row for row in record["rows"]}
    assert rows["tall"]["tokens_s_gpu"] == pytest.approx(1e6)
    assert set(rows["tall"]["rare"]) == {"512 tokens per sample", "6.16M parameters"}  # positions are parameters
    assert "16 GPUs" in rows["a16"]["rare"]
    assert rows["a8"]["others_error"] == pytest.approx(errors["a16"])
    assert rows["b5"]["rare"] == []


def test_errors_are_told_by_what_runs_have(runs, tmp_path, capsys):
    out = tmp_path / "rows.json"
    published.main(["--runs", str(runs), "--out", str(out)])
    text, rows = capsys.readouterr().out, json.loads(out.read_text())["rows"]
    for term in {next(iter(row["terms"])) for row in rows}:
        errors = np.array([row["error"] for row in rows if max(row["terms"], key=row["terms"].get) == term])
        figures = (f"{abs(errors).mean():.1%}", f"{errors.mean():+.1%}", f"{np.quantile(abs(errors), 0.9):.1%}")
        assert cells(text, f"most of the predicted step: {term}")[1:] == [str(len(errors)), *figures]
    between = [row for row in rows if row["waits"] >= 0.1]
    assert between
    assert cells(text, "waiting: 10% or more of it")[1] == str(len(between))
    assert cells(text, "16 bytes per parameter fill less than 10% of the memory")[1] == str(len(rows))


@pytest.mark.slow
def test_the_docs_show_what_the_command_prints():
    text = published.text_of(published.report_of(SHIPPED_RUNS, rates.published()))
    page = REPO / "benchmarks" / "calibration" / "README.md"
    assert text in page.read_text(), "put in what python -m benchmarks.calibration.published prints"
