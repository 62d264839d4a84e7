"""Bad input: one line on stderr, exit code 2, no process group."""

import json
import subprocess
import sys
import tomllib

import pytest
import torch
import torch.distributed as dist

import dshard
from dshard.cli import main, runs, usage
from tests.cli.launch import RANK_VARIABLES, REPO, TEXT, own_lines, start, start_below_torchrun

BAD_OPTIONS = [
    (["--steps", "-5"], "--steps must be at least 1, but it is -5."),
    (["--steps", "0"], "--steps must be at least 1, but it is 0."),
    (["--steps", "many"], "argument --steps: invalid int value: 'many'. See dshard train --help."),
    (["--batch-size", "0"], "--batch-size must be at least 1, but it is 0."),
    (["--block-size", "0"], "--block-size must be at least 1, but it is 0."),
    (["--layers", "0"], "--layers must be at least 1, but it is 0."),
    (["--eval-every", "0"], "--eval-every must be at least 1, but it is 0."),
    (["--stop-after", "0"], "--stop-after must be at least 1, but it is 0."),
    (["--seed", "-1"], "--seed must be at least 0, but it is -1."),
    (["--seed", str(2**63)], f"--seed must be below 2**63, but it is {2**63}."),
    (["--lr", "0"], "--lr must be a finite number above 0, but it is 0.0."),
    (["--lr", "nan"], "--lr must be a finite number above 0, but it is nan."),
    (["--weight-decay", "-1"], "--weight-decay must be a finite number, 0 or above, but it is -1.0."),
    (["--prompt", ""], "--prompt must hold at least one byte, but it is empty. Pass some text, or --sample-tokens 0."),
    (
        ["--width", "100", "--heads", "3"],
        "--width must be divisible by --heads, but they are 100 and 3. Use --width 99.",
    ),
    (["--frobnicate"], "unrecognized arguments: --frobnicate. See dshard train --help."),
    (["--device", "abacus"], "argument --device: invalid choice: 'abacus' (choose from "),
    (["--plot", "losses.doc"], "--plot must end in one of .png, .svg, .pdf, but it is losses.doc."),
    (["--resume"], "--resume needs a run to continue, but there is none in runs/train. Run without --resume first,"),
    (["--resume", "--out", "x"], "--resume needs a checkpoint in --out, but there is none in x. Run without --resume"),
    (
        ["--overwrite"],
        "--overwrite deletes an earlier run in --out, but --out is missing: each run has a folder of its o",
    ),
    (
        ["--overwrite", "--resume", "--out", "x"],
        "--overwrite and --resume say opposite things of an earlier run, but bo",
    ),
]

BAD_ENVIRONMENTS = [
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE in the environment must be an integer of at least 1, but it is '0'."),
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE in the environment must be an integer of at least 1, but it is 'two'."),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE in the environment needs RANK too, but it is not set. Start with torchrun."),
    ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK in the environment must be an integer from 0 to 1, but it is '2'."),
    ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK in the environment must be an integer from 0 to 1, but it is '-1'."),
    ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE in the environment needs MASTER_PORT too, but it is not set."),
    (
        {"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "29500"},
        "WORLD_SIZE above 1 needs MASTER_ADDR, but it is not set. Start with torchrun.",
    ),
]


def _short(value):
    """A test id for a list of options or a dict of variables; none for a message."""
    if isinstance(value, str):
        return "refused"
    return " ".join(value) if isinstance(value, list) else " ".join(f"{name}={text}" for name, text in value.items())


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No rank variables, and a working folder of our own."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refused(capsys):
    """Runs main in this process and returns its one line."""

    def run(*args):
        assert main(["train", *map(str, args)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert line.startswith("dshard train: ")
        assert not dist.is_initialized()
        return line.removeprefix("dshard train: ")

    return run


@pytest.mark.parametrize(("args", "message"), BAD_OPTIONS, ids=_short)
def test_a_bad_option_is_refused_in_one_line(refused, args, message):
    assert refused(*args).startswith(message)


@pytest.mark.parametrize(("environ", "message"), BAD_ENVIRONMENTS, ids=_short)
def test_a_bad_environment_is_refused_in_one_line(refused, monkeypatch, environ, message):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert refused().startswith(message)


def test_missing_data_is_refused(refused, tmp_path):
    line = refused("--data", tmp_path / "none.txt")
    assert line == (
        f"--data must be a text file or a folder of them, but reading {tmp_path}/none.txt failed: No such file or "
        "directory. Pass a path that exists, or leave --data out to train on Python's standard library."
    )


def test_data_shorter_than_two_windows_is_refused(refused, tmp_path):
    (tmp_path / "short.txt").write_bytes(b"x" * 65)
    line = refused("--data", tmp_path / "short.txt", "--block-size", 32)
    assert line.startswith(
        f"the data must hold at least 2 x (--block-size + 1) = 66 bytes, but {tmp_path}/short.txt has 65."
    )


def test_an_empty_folder_is_refused(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    assert " has 0. " in refused("--data", tmp_path / "empty")


@pytest.mark.parametrize("option", ["--out", "--plot"])
def test_a_folder_that_cannot_be_written_is_refused(refused, tmp_path, option):
    (tmp_path / "file").write_text("in the way")
    value = tmp_path / "file" / "below" / "x.png"
    assert refused(option, value).endswith("Not a directory. Pass another.")


def test_cuda_is_refused_where_there_is_none(refused, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert refused("--device", "cuda").startswith(
        "every local rank needs a CUDA device of its own, but local rank 0 finds 0."
    )


def _fake_checkpoint(out, **changed):
    folder = out / "step-000010"
    folder.mkdir(parents=True)
    options = {"layers": 4, "width": 448, "heads": 7, "block_size": 64, "tie_head": False, **changed}
    pointer = {"checkpoint": folder.name, "step": 10, "options": options}
    (out / runs.POINTER).write_text(json.dumps(pointer))
    return folder


def test_a_checkpoint_of_another_shape_is_refused_before_the_ranks_meet(refused, tmp_path):
    folder = _fake_checkpoint(tmp_path / "run", width=768)
    assert refused("--resume", "--out", tmp_path / "run") == (
        f"--resume needs the model of the checkpoint, but --width is 448 and {folder} has 768. "
        "Pass --width 768, or run without --resume."
    )


def test_resuming_a_finished_run_is_refused(refused, tmp_path):
    _fake_checkpoint(tmp_path / "run")
    line = refused("--resume", "--out", tmp_path / "run", "--steps", 10)
    assert "has finished 10 of 10. Pass a larger --steps." in line


def test_a_damaged_pointer_is_refused(refused, tmp_path):
    _fake_checkpoint(tmp_path / "run")
    (tmp_path / "run" / runs.POINTER).write_text("{")
    assert refused("--resume", "--out", tmp_path / "run").startswith("--resume needs a readable latest.json, but ")


def test_a_vanished_checkpoint_is_refused(refused, tmp_path):
    _fake_checkpoint(tmp_path / "run").rmdir()
    assert refused("--resume", "--out", tmp_path / "run").endswith("is gone. Pass --overwrite to start anew.")


def test_a_command_is_required(capsys):
    assert main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "dshard: the following arguments are required: COMMAND. See dshard --help."


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
    assert main(["train", "--steps", "-1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_the_process_exits_with_code_2_and_one_line(tmp_path):
    done = start("--data", tmp_path / "none.txt")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("dshard train: --data must be")


@pytest.mark.slow
def test_below_torchrun_one_rank_speaks_and_all_exit_with_code_2(tmp_path):
    (tmp_path / "short.txt").write_bytes(TEXT[:40])
    done = start_below_torchrun("--data", tmp_path / "short.txt", ranks=2)
    assert done.returncode != 0
    assert len(own_lines(done.stderr)) == 1
    assert "exitcode  : 2" in done.stderr


def test_help_works_without_a_process_group():
    done = start("--help", environ={"WORLD_SIZE": "0"})
    assert done.returncode == 0, done.stderr
    assert "--compare" in done.stdout
