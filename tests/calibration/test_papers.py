"""Runs of papers beside their simulation: one set of constants, fitted to one row, and the table of the docs."""

import dataclasses
import json

import pytest

from benchmarks.calibration import papers
from dshard.planner import DEVICES, EFFICIENCY
from tests.cli.launch import REPO

RESULT = REPO / "benchmarks" / "results" / "papers.json"


def test_one_set_of_constants_is_fitted_to_one_row():
    assert {device.efficiency for device in DEVICES.values()} == {EFFICIENCY}
    (fitted,) = [row for row in papers.ROWS if row.is_fitted]
    assert f"{fitted.name}, {fitted.world} A100-80GB, batch {fitted.batch}" in EFFICIENCY.source


def test_the_committed_result_is_of_these_rows_and_constants_and_its_table_is_in_the_docs():
    record = json.loads(RESULT.read_text())
    assert record["efficiency"] == dataclasses.asdict(EFFICIENCY)
    assert [each["row"] for each in record["rows"]] == [dataclasses.asdict(row) for row in papers.ROWS]
    found = [papers.Found(papers.Row(**each.pop("row")), **each) for each in record["rows"]]
    assert papers.table(found) in (REPO / "benchmarks" / "calibration" / "README.md").read_text()
    (fitted,) = [each for each in found if each.row.is_fitted]
    assert abs(fitted.error) < 0.01


def test_rows_are_simulated_and_compared(monkeypatch, tmp_path, capsys):
    row = dataclasses.replace(papers.ROWS[0], preset="gpt-nano", world=16, sequence=64, figure=10.0)
    falls = dataclasses.replace(row, since=8, figure=0.05)
    monkeypatch.setattr(papers, "ROWS", (row, falls))
    papers.main(["--out", str(tmp_path / "rows.json")])
    first, second = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert first["error"] == pytest.approx(first["predicted"] / 10 - 1)
    assert second["error"] == pytest.approx(second["predicted"] - 0.05)
    assert second["predicted"] > 0  # the network between two hosts is slower than within one
    assert first["step_s"] > 0
    assert "| -5% since 8 |" in capsys.readouterr().out
