"""What tools look at: ruff leaves out folders of some names by default, and a test that is renamed leaves its list."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.slow import SLOW

ROOT = Path(__file__).resolve().parents[2]


def test_no_file_is_left_out():
    command = [sys.executable, "-m", "ruff", "check", "--show-files", "."]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    looked_at = {Path(line) for line in ran.stdout.splitlines()}
    folders = ("dshard", "tests", "benchmarks", "examples", "docs")
    written = {path for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert written
    assert written - looked_at == set()


@pytest.mark.parametrize("entry", SLOW)
def test_every_entry_of_the_slow_tests_is_the_start_of_a_tests_name(entry):
    file, _, name = entry.partition("::")
    path = ROOT / "tests" / file
    assert path.exists()
    assert not name or f"\ndef {name}" in path.read_text()
