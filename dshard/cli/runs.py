"""Folders of runs: one of its own for each run, and what an earlier run left in one."""

from __future__ import annotations

import json
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dshard.cli.usage import UsageError
from dshard.cli.writable import read_json, read_whole, write_whole

POINTER, HISTORIES = "latest.json", ("history.jsonl", "history-unsharded.jsonl")
RUNS = Path("runs/train")  # where each run gets a folder of its own, if --out names none
MARK = "dshard-train.json"  # in a folder of a checkpoint that dshard train wrote: nothing else is ever deleted
_RUN = re.compile(r"run-(\d{3,})")
_ROW = {"step", "loss", "norm", "validation_loss"}
_POINTER = {"checkpoint", "step", "options"}
_CHECKPOINT = re.compile(r"step-(\d{6,})(-\d+)?")


@dataclass(frozen=True, slots=True)
class Earlier:
    """What an earlier run left in a folder.

    Attributes:
        checkpoints: folders by the names that ``dshard train`` gives, whoever made them.
        files: the pointer and the losses.
    """

    checkpoints: tuple[Path, ...]
    files: tuple[Path, ...]

    @classmethod
    def found(cls, out: Path) -> Earlier:
        """What there is in a folder; it need not exist."""
        children = sorted(out.iterdir()) if out.is_dir() else []
        checkpoints = (each for each in children if _CHECKPOINT.fullmatch(each.name) and _is_folder(each))
        files = (each for each in children if each.name in (POINTER, *HISTORIES))
        return cls(tuple(checkpoints), tuple(files))

    def __bool__(self) -> bool:
        return bool(self.checkpoints or self.files)

    def __str__(self) -> str:
        steps = [int(found[1]) for each in self.checkpoints if (found := _CHECKPOINT.fullmatch(each.name))]
        kept = [f"a checkpoint of step {max(steps)}"] if steps else []
        return " and ".join([*kept, *(each.name for each in self.files if each.name != POINTER or not steps)])


def check_empty(out: Path) -> str | None:
    """What to say of a folder that holds an earlier run; None if it holds none."""
    earlier = Earlier.found(out)
    if not earlier:
        return None
    return (
        f"--out must be a folder without an earlier run, but {out} holds {earlier}. Pass --resume to continue that "
        "run, --overwrite to delete it, or another --out."
    )


def mark(folder: Path, facts: dict[str, Any]) -> None:
    """Marks a checkpoint as one of ``dshard train``, with the names of its files: those that a later run may delete.

    Raises:
        OSError: it cannot be written.
    """
    names = sorted(each.name for each in folder.iterdir() if _is_file(each))
    write_whole(folder / MARK, json.dumps({**facts, "files": names}, indent=1) + "\n")


def is_own(folder: Path) -> bool:
    """Whether ``dshard train`` wrote a folder, as a checkpoint."""
    return _is_folder(folder) and _is_file(folder / MARK)


def _is_file(path: Path) -> bool:
    return _mode(path, stat.S_ISREG)


def _is_folder(path: Path) -> bool:
    return _mode(path, stat.S_ISDIR)


def _mode(path: Path, is_kind: Any) -> bool:
    """What a path is, where a link is a link."""
    try:
        return bool(is_kind(path.lstat().st_mode))
    except OSError:
        return False


def _delete(folder: Path) -> None:
    """Deletes a checkpoint's own files, the mark last, and the folder if nothing else is in it."""
    try:
        named = read_json(folder / MARK)["files"]
    except (OSError, ValueError, TypeError, LookupError):
        return
    for each in sorted(folder.iterdir()):
        if isinstance(named, list) and each.name in named and each.name != MARK and _is_file(each):
            each.unlink(missing_ok=True)
    (folder / MARK).unlink(missing_ok=True)
    with suppress(OSError):  # what is left is not ours
        folder.rmdir()


def _is_written_by_a_run(path: Path) -> bool:
    """Whether a file by the name of a pointer or of losses is one, and no user's own."""
    try:
        text = read_whole(path)
        first = json.loads(text if path.name == POINTER else text.partition(b"\n")[0])
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(first, dict):
        return False
    return first.keys() >= _POINTER if path.name == POINTER else "step" in first and first.keys() <= _ROW


def delete_earlier(out: Path) -> str | None:
    """Deletes what ``dshard train`` wrote into a folder, and nothing else; says what, or None if there was nothing.

    Raises:
        UsageError: a file of somebody else's is where this run would write; nothing has been deleted.
        OSError: a file cannot be deleted.
    """
    earlier = Earlier.found(out)
    own = Earlier(tuple(filter(is_own, earlier.checkpoints)), earlier.files)
    others = [path.name for path in own.files if not _is_written_by_a_run(path)]
    if others and not (own.checkpoints and all(_is_file(out / name) for name in others)):  # else ours, and damaged
        raise UsageError(
            f"--overwrite deletes what dshard train wrote, but {out / others[0]} is something else. Move it, or pass "
            "another --out."
        )
    for path in own.files:  # the pointer first: it never names what is gone
        path.unlink(missing_ok=True)
    for folder in own.checkpoints:
        _delete(folder)
    return str(own) if own else None


def delete_older(out: Path, newest: str) -> None:
    """Deletes checkpoints that ``dshard train`` wrote, but for one."""
    for folder in Earlier.found(out).checkpoints:
        if folder.name != newest and is_own(folder):
            _delete(folder)


def read_pointer(out: Path) -> dict[str, Any]:
    """What a folder's pointer says: ``checkpoint``, a name beside it, ``step`` and ``options``.

    Raises:
        OSError: there is none, or it cannot be read.
        ValueError: it is damaged.
    """
    value = read_json(out / POINTER)
    if not isinstance(value, dict) or not value.keys() >= _POINTER:
        raise ValueError(f"it must have the fields {', '.join(sorted(_POINTER))}")
    name, step, options = value["checkpoint"], value["step"], value["options"]
    if not isinstance(name, str) or not _CHECKPOINT.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a checkpoint")
    if type(step) is not int or step < 0 or not isinstance(options, dict):
        raise ValueError("its step must be a number and its options an object")
    return value


def _numbered(runs: Path) -> dict[int, Path]:
    """Folders of runs, by their numbers."""
    children = sorted(runs.iterdir()) if runs.is_dir() else []
    return {int(found[1]): each for each in children if (found := _RUN.fullmatch(each.name)) and _is_folder(each)}


def make_fresh(runs: Path) -> Path:
    """Makes the folder of the next run, also where another one makes its own."""
    runs.mkdir(parents=True, exist_ok=True)
    number = max(_numbered(runs), default=0)
    while True:
        number += 1
        with suppress(FileExistsError):
            folder = runs / f"run-{number:03d}"
            folder.mkdir()
            return folder


def newest_of(runs: Path) -> Path | None:
    """The folder of the last run that has a checkpoint, if there is one."""
    able = [folder for _, folder in sorted(_numbered(runs).items()) if (folder / POINTER).is_file()]
    return able[-1] if able else None


def find_newest(runs: Path) -> Path:
    """The folder of the last run that has a checkpoint.

    Raises:
        UsageError: there is none.
    """
    found = newest_of(runs)
    if found is None:
        raise UsageError(
            f"--resume needs a run to continue, but there is none in {runs}. Run without --resume first, or pass its "
            "--out."
        )
    return found
