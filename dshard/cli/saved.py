"""Checkpoints of a run: where the newest one lies, saving the next, and the checks before it is read."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dshard import CheckpointError, checkpoint
from dshard.checkpoint.folders import discard
from dshard.cli.history import History
from dshard.cli.memory import local_bytes
from dshard.cli.options import TrainOptions
from dshard.cli.report import mega
from dshard.cli.runs import HISTORIES, MARK, POINTER, delete_older, mark, read_pointer
from dshard.cli.usage import RunError, UsageError
from dshard.cli.world import first_of, gather_ints
from dshard.cli.writable import write_whole

_SHAPE_OPTIONS = ("layers", "width", "heads", "block_size", "tie_head")
_CURVE_OPTIONS = ("steps", "batch_size", "lr", "weight_decay", "max_norm", "seed")


@dataclass(frozen=True, slots=True)
class Saved:
    """The newest checkpoint of a run, as its pointer file tells.

    Attributes:
        path: the checkpoint's folder.
        step: how many steps were finished.
        options: the run's options that shape its model and its loss curve, with ``world_size`` and ``data``.
    """

    path: Path
    step: int
    options: dict[str, Any]


def describe(options: TrainOptions, *, world_size: int, digest: str) -> dict[str, Any]:
    """What decides a loss curve, as a value that JSON holds exactly."""
    values = dataclasses.asdict(options)
    curve = {name: values[name] for name in (*_SHAPE_OPTIONS, *_CURVE_OPTIONS)}
    return {
        **curve,
        "world_size": world_size,
        "data": digest,
    }


def find_saved(out: Path, options: TrainOptions, *, may_be_over: bool = False) -> Saved:
    """Finds the checkpoint that ``--resume`` continues and checks that these options can.

    Args:
        out: the folder of its run.
        options: of the run that continues it.
        may_be_over: whether it may have finished all steps: then it was killed at the very end.

    Raises:
        UsageError: there is none, it is unreadable, its model has another shape, or it is past this run's end.

    Communicates: nothing.
    """
    pointer = out / POINTER
    try:
        value = read_pointer(out)
        saved = Saved(path=out / value["checkpoint"], step=value["step"], options=value["options"])
    except FileNotFoundError:
        raise UsageError(
            f"--resume needs a checkpoint in --out, but there is none in {out}. Run without --resume first."
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--resume needs a readable {POINTER}, but {pointer} is damaged ({error}). Pass --overwrite to start anew."
        ) from error
    if not saved.path.is_dir():
        raise UsageError(
            f"--resume needs the folder in {pointer}, but {saved.path} is gone. Pass --overwrite to start anew."
        )
    for name in _SHAPE_OPTIONS:
        wanted, found = getattr(options, name), saved.options.get(name)
        if wanted != found:
            option = "--" + name.replace("_", "-")
            remedy = f"Pass {option} {found}" if name != "tie_head" else "Pass or leave out --tie-head as before"
            raise UsageError(
                f"--resume needs the model of the checkpoint, but {option} is {wanted} and {saved.path} has {found}. "
                f"{remedy}, or run without --resume."
            )
    if saved.step >= options.end and not may_be_over:
        raise UsageError(
            f"--resume needs steps that are left to do, but {saved.path} has finished {saved.step} of {options.end}. "
            f"Pass a larger {'--steps' if options.end == options.steps else '--stop-after'}."
        )
    return saved


def differences(saved: Saved, now: dict[str, Any]) -> list[str]:
    """What differs from the saved run and will bend the loss curve, as ``name old -> new``."""
    before = saved.options
    return [f"{name} {before.get(name)} -> {value}" for name, value in now.items() if before.get(name) != value]


def _fresh_name(out: Path, step: int) -> str:
    """A folder name for this step that is not in use, chosen by rank 0."""
    chosen: list[str | None] = [None]
    if dist.get_rank() == 0:
        names = [f"step-{step:06d}", *(f"step-{step:06d}-{again}" for again in range(2, 1000))]
        chosen[0] = next(name for name in names if not os.path.lexists(out / name))
    dist.broadcast_object_list(chosen, src=0)
    assert chosen[0] is not None
    return chosen[0]


@dataclass(frozen=True, slots=True)
class Progressed:
    """How far a run is, for its checkpoint.

    Attributes:
        step: how many steps are finished.
        options: what decides its loss curve, as `describe` gives it.
        history: its losses.
    """

    step: int
    options: dict[str, Any]
    history: History


def save(out: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, run: Progressed) -> Path:
    """Saves a checkpoint, points to it, and only then removes the older ones of ``dshard train``.

    Killed at any moment, the pointer names a complete checkpoint; what could not be written whole is removed.

    Returns:
        The checkpoint's folder.

    Raises:
        RunError: it cannot be written; alike on every rank.

    Communicates: what `dshard.checkpoint.save` does, and two short texts.
    """
    folder = out / _fresh_name(out, run.step)
    extra = {"step": run.step, "history": run.history.to_json()}
    for action in (
        lambda: checkpoint.save(folder, model, optimizer, step=run.step, extra=extra),
        lambda: _publish(out, folder, run) if dist.get_rank() == 0 else None,
    ):
        failure = first_of(_failure_of(action))
        if failure is not None:
            needed = _bytes_of(model, optimizer)
            if dist.get_rank() == 0:
                (folder / MARK).unlink(missing_ok=True)
                discard(folder)  # to which nothing points
            raise RunError(
                f"--out needs room for a checkpoint of {mega(needed)}, but writing {folder} failed: {failure}. "
                f"{_what_is_left(out)}"
            )
    return folder


def _failure_of(action: Callable[[], object]) -> str | None:
    """Runs an action; in words why it failed, or None if it did not."""
    try:
        action()
    except Exception as error:
        return _words(error.__cause__ or error)
    return None


def _words(error: BaseException) -> str:
    """An error in one line: an operating system's in its own words, another's first line."""
    said = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
    return (said or type(error).__name__).rstrip(".")


def _publish(out: Path, folder: Path, run: Progressed) -> None:
    """Marks a checkpoint as one of ``dshard train``, points to it and removes the older ones; writes the losses."""
    mark(folder, {"step": run.step, "options": run.options})
    run.history.write(out / HISTORIES[0])
    pointer = {"checkpoint": folder.name, "step": run.step, "options": run.options}
    write_whole(out / POINTER, json.dumps(pointer, indent=1) + "\n")
    delete_older(out, folder.name)


def _bytes_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of a checkpoint, of all ranks, but for its names.

    Communicates: one small all-gather.
    """
    states = (
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    )
    return sum(gather_ints(local_bytes([*model.parameters(), *states])))


def _what_is_left(out: Path) -> str:
    """The last good checkpoint, and how to go on."""
    try:
        folder = out / read_pointer(out)["checkpoint"]
    except (OSError, ValueError):
        return "No checkpoint was saved before. Make room, or pass another --out."
    return f"The last good checkpoint is {folder}. Make room, and continue with --resume."


def load(saved: Saved, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Reads a checkpoint into a model and its optimizer.

    Returns:
        What `save` was given as ``extra``.

    Raises:
        UsageError: it does not fit or is damaged; alike on every rank.

    Communicates: what `dshard.checkpoint.load` does.
    """
    try:
        extra: dict[str, Any] = checkpoint.load(saved.path, model, optimizer)
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    return extra
