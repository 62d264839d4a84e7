"""What the command line writes and deletes is its own alone; what it reads may be anything, and is told in one line."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from dshard import Plan, PlanError
from dshard.cli import data, main, runs
from dshard.cli.history import History
from dshard.cli.usage import UsageError
from dshard.cli.writable import write_whole
from tests.cli.launch import RANK_VARIABLES, TEXT

OPTIONS = {"layers": 4, "width": 448, "heads": 7, "block_size": 64, "tie_head": False}


def write_run(out: Path, *steps: int) -> None:
    """What runs leave there."""
    for step in steps:
        folder = out / f"step-{step:06d}"
        folder.mkdir(parents=True)
        for name in (".metadata", "dshard.json", "__0_0.distcp"):
            (folder / name).write_text("ours")
        runs.mark(folder, {"step": step, "options": OPTIONS})
    History([1.0], [2.0], {0: 3.0}).write(out / "history.jsonl")
    pointer = {"checkpoint": f"step-{steps[-1]:06d}", "step": steps[-1], "options": OPTIONS}
    (out / runs.POINTER).write_text(json.dumps(pointer))


@pytest.mark.parametrize("delete", [lambda out: runs.delete_older(out, "step-000003"), runs.delete_earlier])
def test_a_users_files_and_links_survive_wherever_they_are(tmp_path, delete):
    out, outside = tmp_path / "out", tmp_path / "outside"
    write_run(out, 1, 2, 3)
    write_run(outside, 7)
    kept = {
        out / "step-000001" / "notes.md",
        out / "step-000002" / "more" / "dshard.json",
        out / "step-000099" / "weights.bin",
        out / "step-by-step" / "x",
    }
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (out / "step-000050").symlink_to(outside / "step-000007")
    (out / "step-000002" / "__0_0.distcp").unlink()
    (out / "step-000002" / "__0_0.distcp").symlink_to(outside / "history.jsonl")
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    delete(out)
    assert {path for path in kept if path.read_text() == "mine"} == kept
    assert {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()} == before
    assert (out / "step-000050").is_symlink()
    assert (out / "step-000002" / "__0_0.distcp").is_symlink()
    assert os.listdir(out / "step-000001") == ["notes.md"]
    assert (out / "step-000003").exists() == (delete is not runs.delete_earlier)


@pytest.mark.parametrize("name", [runs.POINTER, *runs.HISTORIES])
@pytest.mark.parametrize("content", [b"mine", b"", b'{"my": 1}\n', b"[" * 100_000, None])
def test_overwriting_refuses_a_file_that_no_run_wrote_and_deletes_nothing(tmp_path, name, content):
    write_run(tmp_path / "in", 1)
    out = tmp_path / "in"
    (out / name).unlink(missing_ok=True)
    if content is None:
        (tmp_path / "mine").write_text("mine")
        (out / name).symlink_to(tmp_path / "mine")
    else:
        (out / name).write_bytes(content)
        runs.delete_older(out, "none")  # of a run that left no checkpoint: nothing says that the file is a damaged one
    before = sorted(out.iterdir())
    with pytest.raises(UsageError, match=f"{name} is something else. Move it"):
        runs.delete_earlier(out)
    assert sorted(out.iterdir()) == before


def test_a_damaged_file_beside_a_checkpoint_of_ours_is_ours(tmp_path):
    write_run(tmp_path, 1)
    (tmp_path / runs.POINTER).write_text("{")
    assert runs.delete_earlier(tmp_path) is not None
    assert not list(tmp_path.iterdir())


def test_links_by_names_that_can_be_guessed_are_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("history.jsonl", "history.jsonl.part", ".history.jsonl.partial"):
        (tmp_path / name).symlink_to(victim)
    History([1.0], [2.0], {}).write(tmp_path / "history.jsonl")
    assert victim.read_text() == "mine"
    assert not (tmp_path / "history.jsonl").is_symlink()
    with pytest.raises(OSError, match="No such file"):
        write_whole(tmp_path / "gone" / "x", "")


def test_two_runs_that_start_at_once_get_folders_of_their_own(tmp_path, monkeypatch):
    runs.make_fresh(tmp_path)
    monkeypatch.setattr(runs, "_numbered", lambda folder: {})
    assert runs.make_fresh(tmp_path).name == "run-002"


def write_odd(path: Path, content: Any) -> None:
    path.unlink(missing_ok=True)
    if content == "a pipe":
        os.mkfifo(path)
    elif content == "a folder":
        path.mkdir()
    elif content == "a link to nothing":
        path.symlink_to(path.parent / "gone")
    elif content == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(content)


ODD = [
    b"", b"[]", b"null", b"1" * 10_000, b"[" * 100_000, b'{"a":' * 100_000, b"NaN", b"\xff", b'{"\\ud800": 1}', b"{}",
    b'{"schema": NaN}', b"{" + b'"checkpoint": "../x", "step": 1, "options": {}}',
    b'{"checkpoint": "step-000001", "step": true, "options": {}}', b'{"checkpoint": 3, "step": 1, "options": {}}',
    b'{"checkpoint": "step-000001", "step": 1, "options": []}', b'{"model_type": []}', b'{"model_type": "x"}',
    b'{"model_type": "gpt2", "n_layer": -1e30, "n_embd": "x"}', b'{"model_type": "llama", "hidden_size": 1e300}',
    "a pipe", "a folder", "a link to nothing", "a device",
]  # fmt: skip


@pytest.mark.parametrize("content", ODD, ids=lambda content: repr(content)[:30])
def test_whatever_is_in_the_place_of_a_file_is_told_in_one_line(tmp_path, monkeypatch, capsys, content):
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    write_run(tmp_path, 1)
    write_odd(tmp_path / runs.POINTER, content)
    assert main(["train", "--resume", "--out", str(tmp_path)]) == 2
    write_odd(tmp_path / "config.json", content)
    assert main(["plan", str(tmp_path / "config.json"), "--world", "2", "--device", "a100-40g"]) == 2
    write_odd(tmp_path / "plan.json", content)
    with pytest.raises(PlanError, match=r"plan\.json"):
        Plan.load(tmp_path / "plan.json")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2, lines
    assert runs.POINTER in lines[0] or "none in" in lines[0]
    assert "config.json" in lines[1]


def test_a_pipe_among_the_texts_is_told_and_not_waited_for(tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXT)
    os.mkfifo(tmp_path / "b.txt")
    for path in (tmp_path, tmp_path / "b.txt"):
        with pytest.raises(UsageError, match=r"b\.txt: must be a file, but it is a pipe"):
            data.read_text(path)


def odd_value(draw: random.Random) -> Any:
    return draw.choice([None, True, -1, 10**400, 1.5, "x", [], {}, [[]], {"a": 1}])


def test_losses_of_another_shape_are_a_value_error():
    good = History([1.0], [2.0], {0: 3.0}).to_json()
    draw = random.Random(1)
    for _ in range(200):
        value = {
            **good,
            draw.choice(["losses", "norms", "validation"]): draw.choice([odd_value(draw), [odd_value(draw)]]),
        }
        try:
            History.from_json(value)
        except ValueError:
            continue
    with pytest.raises(ValueError, match="no losses"):
        History.from_json(draw)  # type: ignore[arg-type]
