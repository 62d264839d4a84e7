"""``dshard simulate --published`` and ``--runs``: runs beside predictions, by source, and the worst of them."""

import json

import numpy as np
import pytest

from dshard.cli import main, published, published_memory
from dshard.cli.measured import read_runs
from dshard.planner import rates
from dshard.planner.calibration import errors_of, misses_of, predicted_s
from dshard.planner.spent import spent
from tests.cli.launch import REPO
from tests.planner.test_rates import ROW, table_of

TINY = ("gpt-nano", "--world", "16", "--device", "a100-80g", "--sequence", "64", "--strategy", "full")
RUNS = (
    *({**ROW, "id": f"a{n}", "n_gpus": n, "source": "https://github.com/of/one/blob/x", "model": "m"} for n in (8, 16)),
    *({**ROW, "id": f"b{n}", "micro_batch": n, "source": "two", "tokens_s_gpu": 3e5} for n in range(2, 11)),
    {**ROW, "id": "tall", "seq": 512, "source": "two", "tokens_s_gpu": 1e6},
    {**ROW, "precision": "fp8"},
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
    assert main(["simulate", "--runs", str(runs), "--out", str(out)]) == 0
    text, record = capsys.readouterr().out, json.loads(out.read_text())
    known, shipped = read_runs(runs).runs, rates.published()
    assert text.startswith(f"12 runs; 1 not used: fp8; profile: {shipped.source}\n")
    for name, source in (("of/one", "https://github.com/of/one/blob/x"), ("two", "two"), ("all", None)):
        found = misses_of([run for run in known if source in (None, run.source)], shipped.constants, name)
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
    assert main(["simulate", "--runs", str(runs), "--out", str(out)]) == 0
    text, rows = capsys.readouterr().out, json.loads(out.read_text())["rows"]
    for term in {next(iter(row["terms"])) for row in rows}:
        errors = np.array([row["error"] for row in rows if max(row["terms"], key=row["terms"].get) == term])
        figures = (f"{abs(errors).mean():.1%}", f"{errors.mean():+.1%}", f"{np.quantile(abs(errors), 0.9):.1%}")
        assert cells(text, f"most of the predicted step: {term}")[1:] == [str(len(errors)), *figures]
    between = [row for row in rows if row["waits"] >= 0.1]
    assert between
    assert cells(text, "waiting: 10% or more of it")[1] == str(len(between))
    assert cells(text, "16 bytes per parameter fill less than 10% of the memory")[1] == str(len(rows))


def test_a_profile_of_the_same_runs_says_how_far_off_each_source_is_when_kept_aside(runs, tmp_path, capsys):
    profile = tmp_path / "profile.json"
    assert main(["calibrate", str(runs), "--out", str(profile)]) == 0
    capsys.readouterr()
    assert main(["simulate", "--runs", str(runs), "--profile", str(profile)]) == 0
    text, found = capsys.readouterr().out, rates.Rates.load(profile)
    assert f"profile: {found.source}" in text
    for each in found.misses:
        name = "of/one" if "one" in each.source else each.source
        assert cells(text, name)[-2:] == [f"{each.mean:.1%}", f"{each.p90:.1%}"]
    assert cells(text, "all")[2] == f"{misses_of(read_runs(runs).runs, found.constants, 'all').mean:.1%}"


def test_the_shipped_table_has_the_shipped_profile_and_peaks_of_memory(runs, monkeypatch, tmp_path, capsys):
    out, row = tmp_path / "rows.json", published_memory.MemoryRow("one", "max active", 4 << 30, 5 << 30, "eager")
    monkeypatch.setattr(rates, "runs_file", lambda: runs)
    monkeypatch.setattr(published_memory, "memory_rows", lambda: [row])
    assert main(["simulate", "--published", "--out", str(out)]) == 0
    shipped = capsys.readouterr().out
    assert main(["simulate", "--runs", str(runs), "--profile", "published"]) == 0
    times = capsys.readouterr().out.rstrip("\n")
    assert shipped.startswith(times)
    assert cells(shipped[len(times) :], "one") == ["one", "eager", "max active", "4.0 GiB", "5.00 GiB", "+25.0%"]
    assert json.loads(out.read_text())["memory"][0]["predicted_bytes"] == 5 << 30


def test_a_table_or_profile_that_is_none_is_refused(runs, tmp_path, capsys):
    assert main(["simulate", "--runs", str(tmp_path / "missing.tsv")]) == 2
    assert "RUNS must be a table of tab-separated values" in capsys.readouterr().err
    assert main(["simulate", "--runs", str(runs), "--profile", str(runs)]) == 2
    assert "--profile must be what dshard calibrate wrote" in capsys.readouterr().err


def test_compiled_models_move_fewer_bytes_by_a_profile_and_need_one(capsys):
    texts = []
    for more in ((), ("--compile",)):
        assert main(["simulate", *TINY, "--profile", "published", *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1]
    for command in ("simulate", "plan"):
        assert main([command, *TINY, "--compile"]) == 2
        assert "--compile needs --profile, which says" in capsys.readouterr().err


@pytest.mark.slow
def test_the_docs_show_what_the_command_prints():
    text = published.text_of(published.report_of(published.SHIPPED, rates.published()))
    assert text in (REPO / "docs" / "simulate.md").read_text(), "run: python docs/published_table.py"
