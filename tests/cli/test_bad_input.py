"""Bad input: one line on stderr, exit code 2, no process group."""

import subprocess
import sys
import tomllib

import pytest
import torch
import torch.distributed as dist

import dshard
from dshard.cli import main, usage
from tests.cli.launch import RANK_VARIABLES, REPO


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No rank variables, and a working folder of our own."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ([], "dshard: the following arguments are required: COMMAND. See dshard --help."),
        (
            ["check", ".", "--frobnicate"],
            "dshard check: unrecognized arguments: --frobnicate. See dshard check --help.",
        ),
        (["trace", "m:f", "--ranks", "x"], "dshard trace: argument --ranks: invalid int value: 'x'. See dshard trace"),
        (["trace", "m:f", "--out", "file/below.json"], "dshard trace: --out must be a folder that can be written, but"),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path, capsys, args, line):
    (tmp_path / "file").write_text("in the way")
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (said,) = captured.err.splitlines()
    assert said.startswith(line)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "command", [["-m", "dshard"], ["-c", "import sys; from dshard.cli import main; sys.exit(main())"]]
)
def test_the_version_is_told_with_that_of_torch(command):
    ran = subprocess.run([sys.executable, *command, "--version"], capture_output=True, text=True, check=True, cwd=REPO)
    assert (ran.stdout, ran.stderr) == (f"dshard {dshard.__version__}, torch {torch.__version__}\n", "")
    assert dshard.__version__ == tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"]


def test_other_local_ranks_are_silent_with_the_same_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(usage.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(usage.signal, "signal", lambda *_: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["check", "nowhere", "--frobnicate"]) == 2
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
