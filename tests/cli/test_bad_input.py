"""Bad input: one line on stderr, exit code 2, no process group."""

import subprocess
import sys
import tomllib

import pytest
import torch
import torch.distributed as dist

import dshard
from tests.cli.launch import RANK_VARIABLES, REPO, code_of


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No rank variables, and a working folder of our own."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ([], "dshard: error: the following arguments are required: COMMAND"),
        (["check", ".", "--frobnicate"], "dshard: error: unrecognized arguments: --frobnicate"),
        (
            ["trace", "m:f", "--ranks", "x"],
            "dshard trace: error: argument --ranks: must be a whole number of at least 1",
        ),
        (["trace", "m:f", "--out", "file/below.json"], "dshard trace: --out must be a file in a folder that exists"),
        (["check", "nowhere"], "dshard check: DIR: "),
        (["explain-hang", "."], "dshard explain-hang: DIR must hold flight records, but . has none."),
    ],
)
def test_bad_input_is_refused_with_exit_code_2(tmp_path, capsys, args, line):
    (tmp_path / "file").write_text("in the way")
    assert code_of(*args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith(line)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "command", [["-m", "dshard"], ["-c", "import sys; from dshard.cli import main; sys.exit(main())"]]
)
def test_the_version_is_told_with_that_of_torch(command):
    ran = subprocess.run([sys.executable, *command, "--version"], capture_output=True, text=True, check=True, cwd=REPO)
    assert (ran.stdout, ran.stderr) == (f"dshard {dshard.__version__}, torch {torch.__version__}\n", "")
    assert dshard.__version__ == tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"]
