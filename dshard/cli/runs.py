"""Folders of runs: one of its own for each run, and what an earlier run left in one."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from dshard.cli.usage import UsageError

POINTER, HISTORIES = "latest.json", ("history.jsonl", "history-unsharded.jsonl")
RUNS = Path("runs/train")  # where each run gets a folder of its own, if --out names none
MARK = "dshard-train.json"  # in a folder of a checkpoint that dshard train wrote: nothing else is ever deleted
_RUN = re.compile(r"run-(\d{3,})")
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
        checkpoints = (each for each in children if _CHECKPOINT.fullmatch(each.name) and each.is_dir())
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


def is_own(folder: Path) -> bool:
    """Whether ``dshard train`` wrote a folder, as a checkpoint."""
    return (folder / MARK).is_file()


def delete_earlier(out: Path) -> str | None:
    """Deletes what ``dshard train`` wrote into a folder, and nothing else; says what, or None if there was nothing."""
    earlier = Earlier.found(out)
    own = Earlier(tuple(filter(is_own, earlier.checkpoints)), earlier.files)
    for path in own.files:  # the pointer first: it never names what is gone
        path.unlink(missing_ok=True)
    for folder in own.checkpoints:
        shutil.rmtree(folder, ignore_errors=True)
    return str(own) if own else None


def delete_older(out: Path, newest: str) -> None:
    """Deletes checkpoints that ``dshard train`` wrote, but for one."""
    for folder in Earlier.found(out).checkpoints:
        if folder.name != newest and is_own(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _numbered(runs: Path) -> dict[int, Path]:
    """Folders of runs, by their numbers."""
    children = sorted(runs.iterdir()) if runs.is_dir() else []
    return {int(found[1]): each for each in children if (found := _RUN.fullmatch(each.name)) and each.is_dir()}


def make_fresh(runs: Path) -> Path:
    """Makes the folder of the next run."""
    folder = runs / f"run-{max(_numbered(runs), default=0) + 1:03d}"
    folder.mkdir(parents=True)
    return folder


def find_newest(runs: Path) -> Path:
    """The folder of the last run that has a checkpoint.

    Raises:
        UsageError: there is none.
    """
    able = [folder for _, folder in sorted(_numbered(runs).items()) if (folder / POINTER).is_file()]
    if not able:
        raise UsageError(
            f"--resume needs a run to continue, but there is none in {runs}. Run without --resume first, or pass its "
            "--out."
        )
    return able[-1]
