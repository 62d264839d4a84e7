"""What tools look at: ruff leaves out folders of some names by default, and a test that is renamed leaves its list."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.slow import DEEP, ONE_IN, SLOW, marks

ROOT = Path(__file__).resolve().parents[2]


def test_no_file_is_left_out():
    command = [sys.executable, "-m", "ruff", "check", "--show-files", "."]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    looked_at = {Path(line) for line in ran.stdout.splitlines()}
    folders = ("dshard", "tests", "benchmarks", "examples", "docs")
    written = {path for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert written
    assert written - looked_at == set()


@pytest.mark.parametrize("entry", [*SLOW, *DEEP, *ONE_IN])
def test_every_entry_of_the_slow_and_the_deep_tests_is_the_start_of_a_tests_name(entry):
    file, _, name = entry.partition("::")
    path = ROOT / "tests" / file
    assert path.exists()
    name, _, case = name.partition("[")
    assert not name or f"\ndef {name}" in path.read_text()
    assert (ROOT / case.partition(":")[0]).exists()


def test_one_in_so_many_cases_is_not_deep():
    start = "tests/mutants/test_mutants.py::test_a_mutant_is_killed"
    ids = [
        "tests/unit/test_a.py::test_b",
        *(f"{start}[{i}]" for i in range(33)),
        f"tests/{DEEP[0]}",
        "tests/cli/a.py::b",
    ]
    found = marks(ids)
    assert found[0] == ()
    assert [i for i, each in enumerate(found[1:34]) if each == ("slow",)] == [0, 16, 32]
    assert set(found[1:34]) == {("slow",), ("slow", "deep")}
    assert found[34:] == [("slow", "deep"), ("slow",)]
