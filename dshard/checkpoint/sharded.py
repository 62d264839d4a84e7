"""Save and load a model and its optimizer, sharded, by torch's distributed checkpoint (DCP)."""

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from dshard.checkpoint.agreement import group_of, together
from dshard.errors import CheckpointError
from dshard.runtime.full_values import refuse_meta
from dshard.runtime.replace import repoint_optimizer
from dshard.tensor import ShardedTensor
from dshard.tensor.extended import exact_values, is_extended

__all__ = ["load", "save"]

_FACTS = "dshard.json"  # written last but one: what is in the checkpoint, and the caller's own facts
_FORMAT = 1


def save(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, *, extra: Any = None
) -> None:
    """Write a checkpoint: parameters, buffers, optimizer state, and each rank's random state.

    Every rank writes its own shards; no full tensor is put together. The directory appears under its name only when
    it is complete; one that was there before is replaced.

    Args:
        path: Directory to make. Must be on a file system that all ranks see.
        model: A sharded module.
        optimizer: Its optimizer.
        extra: Whatever JSON can hold, for example the step and the options; rank 0's is kept.

    Raises:
        CheckpointError: The directory cannot be written. On every rank alike.
        StateError: A tensor is on the meta device. On every rank alike.

    Communicates:
        A few all-reduces of one byte, and what DCP exchanges: sizes and names, no values.
    """
    target = Path(path)
    group = group_of(model)
    partial = target.with_name(target.name + ".partial")
    tensors = _tensors_of(model, optimizer)
    refuse_meta("checkpoint.save", list(tensors.items()))
    tensors = _plain_ones(tensors)
    facts = {
        "format": _FORMAT,
        "world_size": group.world_size,
        "tensors": {name: [list(t.shape), str(t.dtype)] for name, t in tensors.items()},
        "param_groups": _param_groups(model, optimizer),
        "extra": extra,
    }
    rng = {f"rng.{group.world_rank}": torch.get_rng_state()}

    def prepare() -> None:
        if group.world_rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            (partial / _FACTS).write_text(json.dumps(facts))

    def publish() -> None:
        if group.world_rank == 0:
            old = target.with_name(target.name + ".old")
            shutil.rmtree(old, ignore_errors=True)
            if target.exists():
                target.rename(old)
            partial.rename(target)
            shutil.rmtree(old, ignore_errors=True)

    together(group, prepare, f"{target}: a checkpoint needs a directory that can be written")
    together(group, lambda: _dcp_save({**tensors, **rng}, partial), f"{target}: writing the checkpoint failed")
    together(group, publish, f"{target}: putting the checkpoint in its place failed")


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> Any:
    """Read a checkpoint into a model and an optimizer, also one that another number of ranks wrote.

    Each rank reads the parts of the files that its shards need. The random state comes back if the number of ranks
    is the same.

    Args:
        path: Directory that `save` made.
        model: A sharded module of the same parameters.
        optimizer: Its optimizer, with parameter groups as when it was saved.

    Returns:
        What was passed to `save` as `extra`.

    Raises:
        CheckpointError: No checkpoint there, or one of another model; names the tensor and both shapes. On every rank
            alike.

    Communicates:
        A few all-reduces of one byte, and what DCP exchanges: sizes and names, no values.
    """
    target = Path(path)
    group = group_of(model)
    facts: dict[str, Any] = {}
    together(group, lambda: facts.update(read_facts(target)), f"{target}: reading the checkpoint failed")
    if optimizer is not None:
        repoint_optimizer(optimizer)
        _make_state(optimizer, model, facts)
    tensors = _tensors_of(model, optimizer)
    _check_fit(target, tensors, facts["tensors"])
    rng: dict[str, Tensor] = {}
    if facts["world_size"] == group.world_size:
        rng = {f"rng.{group.world_rank}": torch.get_rng_state()}
    plain = _plain_ones(tensors)
    together(group, lambda: _dcp_load({**plain, **rng}, target), f"{target}: reading the checkpoint failed")
    with torch.no_grad():
        for name, tensor in tensors.items():
            if plain[name] is not tensor:
                tensor.copy_(plain[name])
    for state in rng.values():
        torch.set_rng_state(state)
    if optimizer is not None:
        for own, saved in zip(optimizer.param_groups, facts["param_groups"], strict=True):
            own.update({k: tuple(v) if isinstance(v, list) else v for k, v in saved.items() if k != "params"})
    return facts["extra"]


def read_facts(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: There is none at `path`, or it is damaged.
    """
    file = path / _FACTS
    if not file.is_file():
        raise CheckpointError(
            f"{path}: a checkpoint is a directory with a {_FACTS}, but there is none. Check the path."
        )
    try:
        facts: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file}: must be JSON, but {error}. The checkpoint is damaged; use another.") from error
    if not isinstance(facts, dict) or not {"world_size", "tensors", "param_groups", "extra"} <= facts.keys():
        raise CheckpointError(f"{file}: facts must be complete, but some are missing. It is damaged; use another.")
    if facts.get("format") != _FORMAT:
        raise CheckpointError(
            f"{file}: the format must be {_FORMAT}, but it is {facts.get('format')}. Load it with the version that "
            "wrote it."
        )
    return facts


@contextmanager
def _by_torch(path: Path) -> Iterator[None]:
    """What torch's checkpoints raise is a BaseException, which `except Exception` does not catch."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # DCP warns of its own deprecated calls
        try:
            yield
        except dcp.CheckpointException as error:
            rank, (reason, _) = next(iter(error.failures.items()))
            raise CheckpointError(
                f"{path}: all parts of a checkpoint must be there and whole, but on rank {rank} "
                f"{type(reason).__name__}: {reason}. Use another checkpoint."
            ) from error


def _dcp_save(tensors: dict[str, Tensor], path: Path) -> None:
    with _by_torch(path):
        dcp.save(tensors, checkpoint_id=str(path))


def _dcp_load(tensors: dict[str, Tensor], path: Path) -> None:
    with _by_torch(path):
        dcp.load(tensors, checkpoint_id=str(path))


def _names_of(model: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in model.named_parameters()}


def _tensors_of(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, by name; parameters under their own, without autograd."""
    tensors: dict[str, Tensor] = {f"model.{k}": v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    if optimizer is not None:
        names = _names_of(model)
        for param, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{_name_of(param, names)}.{key}"] = value
    return tensors


def _plain_ones(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with plain exact values in the place of those that say themselves how they are gathered."""
    return {
        name: tensor.like(exact_values(tensor.to_local(), name))
        if isinstance(tensor, ShardedTensor) and is_extended(tensor.to_local())
        else tensor
        for name, tensor in tensors.items()
    }


def _name_of(param: Tensor, names: dict[int, str]) -> str:
    name = names.get(id(param))
    if name is None:
        raise CheckpointError(
            f"checkpoint: the optimizer may hold parameters of the model alone, but one of shape {tuple(param.shape)} "
            "is not among them. Pass the model whose parameters the optimizer was made with."
        )
    return name


def _param_groups(model: nn.Module, optimizer: Optimizer | None) -> list[dict[str, Any]]:
    if optimizer is None:
        return []
    names = _names_of(model)
    return [
        {
            **{k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"},
            "params": [_name_of(p, names) for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]


def _make_state(optimizer: Optimizer, model: nn.Module, facts: dict[str, Any]) -> None:
    """Give a fresh optimizer empty state tensors of the shapes that the checkpoint has."""
    saved = facts["tensors"]
    for name, param in model.named_parameters():
        prefix = f"optimizer.{name}."
        for key, (shape, dtype_name) in saved.items():
            state_key = key.removeprefix(prefix)
            if not key.startswith(prefix) or "." in state_key or state_key in optimizer.state.get(param, {}):
                continue
            dtype = getattr(torch, dtype_name.removeprefix("torch."))
            if tuple(shape) == tuple(param.shape) and shape:
                value = torch.zeros_like(param, dtype=dtype)
            else:
                value = torch.zeros(shape, dtype=dtype)
            optimizer.state[param][state_key] = value


def _check_fit(path: Path, tensors: dict[str, Tensor], saved: dict[str, Any]) -> None:
    """Raise unless the checkpoint has every tensor in the shape that the model has."""
    for name, tensor in tensors.items():
        if name not in saved:
            raise CheckpointError(
                f"{path}: the checkpoint must hold every tensor of the model, but '{name}' (shape "
                f"{tuple(tensor.shape)}) is not in it. Build the model as it was when it was saved."
            )
        shape = tuple(saved[name][0])
        if shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{path}: tensors must have the shapes that were saved, but '{name}' is {shape} in the checkpoint and "
                f"{tuple(tensor.shape)} in the model. Build the model as it was when it was saved."
            )
    extra = [name for name in saved if name not in tensors]
    if extra:
        raise CheckpointError(
            f"{path}: the checkpoint must hold nothing beyond the model, but it has '{extra[0]}' and {len(extra) - 1} "
            "more. Build the model, and pass an optimizer, as when it was saved."
        )
