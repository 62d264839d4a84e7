"""What the command line reads may be anything, and is told in one line."""

import os
from pathlib import Path
from typing import Any

import pytest

from dshard import Plan, PlanError
from dshard.cli import main
from tests.cli.launch import RANK_VARIABLES


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
    b'{"schema": NaN}', b'{"model_type": []}', b'{"model_type": "x"}',
    b'{"model_type": "gpt2", "n_layer": -1e30, "n_embd": "x"}', b'{"model_type": "llama", "hidden_size": 1e300}',
    "a pipe", "a folder", "a link to nothing", "a device",
]  # fmt: skip


@pytest.mark.parametrize("content", ODD, ids=lambda content: repr(content)[:30])
def test_whatever_is_in_the_place_of_a_file_is_told_in_one_line(tmp_path, monkeypatch, capsys, content):
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    write_odd(tmp_path / "config.json", content)
    assert main(["plan", str(tmp_path / "config.json"), "--world", "2", "--device", "a100-40g"]) == 2
    write_odd(tmp_path / "plan.json", content)
    with pytest.raises(PlanError, match=r"plan\.json"):
        Plan.load(tmp_path / "plan.json")
    (line,) = capsys.readouterr().err.splitlines()
    assert "config.json" in line
