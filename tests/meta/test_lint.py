"""The linter looks at every file: by default ruff leaves out folders of some names, `dist` among them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_no_file_is_left_out():
    command = [sys.executable, "-m", "ruff", "check", "--show-files", "."]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    looked_at = {Path(line) for line in ran.stdout.splitlines()}
    folders = ("dshard", "tests", "benchmarks", "examples", "docs")
    written = {path for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert written
    assert written - looked_at == set()
