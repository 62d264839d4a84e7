"""Checkpoints of a run: where the newest one lies, saving the next, and the checks before it is read."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dshard import CheckpointError, checkpoint
from dshard.cli.options import TrainOptions
from dshard.cli.usage import UsageError

_POINTER = "latest.json"
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
    return {**curve, "world_size": world_size, "data": digest}


def find_saved(options: TrainOptions) -> Saved:
    """Finds the checkpoint that ``--resume`` continues and checks that these options can.

    Raises:
        UsageError: there is none, it is unreadable, its model has another shape, or it is past this run's end.

    Communicates: nothing.
    """
    pointer = options.out / _POINTER
    try:
        value = json.loads(pointer.read_text())
        saved = Saved(path=options.out / value["checkpoint"], step=int(value["step"]), options=dict(value["options"]))
    except FileNotFoundError:
        raise UsageError(
            f"--resume needs a checkpoint in --out, but there is none in {options.out}. Run without --resume first."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--resume needs a readable {_POINTER}, but {pointer} is damaged ({error}). Run without --resume."
        ) from error
    if not saved.path.is_dir():
        raise UsageError(f"--resume needs the folder in {pointer}, but {saved.path} is gone. Run without --resume.")
    for name in _SHAPE_OPTIONS:
        wanted, found = getattr(options, name), saved.options.get(name)
        if wanted != found:
            option = "--" + name.replace("_", "-")
            remedy = f"Pass {option} {found}" if name != "tie_head" else "Pass or leave out --tie-head as before"
            raise UsageError(
                f"--resume needs the model of the checkpoint, but {option} is {wanted} and {saved.path} has {found}. "
                f"{remedy}, or run without --resume."
            )
    if saved.step >= options.end:
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
        chosen[0] = next(name for name in names if not (out / name).exists())
    dist.broadcast_object_list(chosen, src=0)
    assert chosen[0] is not None
    return chosen[0]


def save(
    out: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    options: dict[str, Any],
    extra: dict[str, Any],
) -> Path:
    """Saves a checkpoint, points to it, and only then removes the older ones.

    Killed at any moment, the pointer names a complete checkpoint.

    Returns:
        The checkpoint's folder.

    Raises:
        UsageError: it cannot be written; alike on every rank.

    Communicates: what `dshard.checkpoint.save` does, a short name, and a barrier.
    """
    name = _fresh_name(out, step)
    try:
        checkpoint.save(out / name, model, optimizer, extra=extra)
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    if dist.get_rank() == 0:
        draft = out / (_POINTER + ".part")
        draft.write_text(json.dumps({"checkpoint": name, "step": step, "options": options}, indent=1) + "\n")
        os.replace(draft, out / _POINTER)
        for older in out.glob("step-*"):
            if older.name != name and older.is_dir():
                shutil.rmtree(older, ignore_errors=True)
    dist.barrier()
    return out / name


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
