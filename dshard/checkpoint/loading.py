"""Load a checkpoint: every rank reads and compares all that it needs before any rank changes anything."""

import copy
import json
import logging
import os
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dshard import arguments, collectives
from dshard.agreement import check_same, refused_together
from dshard.autograd import outside_autograd
from dshard.checkpoint import contents
from dshard.checkpoint.agreement import group_of, share, together
from dshard.checkpoint.asynchronous import pending_save
from dshard.checkpoint.files import Box
from dshard.checkpoint.folders import find
from dshard.checkpoint.manifest import Manifest, own_name, read_manifest
from dshard.checkpoint.optimizers import prepare_optimizers
from dshard.checkpoint.reading import Load, Reader, Source, writer
from dshard.checkpoint.saving import lineage_of
from dshard.collectives import ReduceOp, ShardGroup
from dshard.errors import CheckpointError
from dshard.optimizer.replace import allocate
from dshard.tensor import ShardedTensor
from dshard.tensor.views import bytes_of

_LOG = logging.getLogger("dshard")


def load(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
) -> Any:
    """Read a checkpoint into a model and its optimizers, also one that other numbers of ranks wrote.

    Every rank reads the parts that its shards need, and compares each byte with what was saved, before any rank changes
    anything: afterwards the model is the old one or the new one. Until then what was read is kept on the host, so that
    a process needs room for its shards twice. Random states come back if as many ranks read as wrote. A model on the
    meta device gets memory for its shards.

    Args:
        directory: Folder that `save` made, or a folder of such, of which the newest complete one is taken.
        model: A sharded module of the same parameters, under any strategy.
        optimizer: Its optimizer, or a list of several, with parameter groups as when it was saved. May be fresh.

    Returns:
        What was passed to `save` as `extra`: by this rank, if as many ranks read as wrote, else by rank 0, with a
        warning where ranks had passed different ones.

    Raises:
        CheckpointError: No checkpoint there, a damaged one, or one of another model or optimizer; names the file, the
            tensor and both values. On every rank alike; nothing was changed.
        DivergenceError: The ranks pass different optimizers, or one of them none. On every rank alike; nothing was
            changed.

    Communicates:
        Some all-reduces of a few bytes, and no values.
    """
    group = group_of(arguments.module("checkpoint.load", "model", model))
    with refused_together("checkpoint.load", ["optimizer"], group):
        arguments.optimizers("checkpoint.load", "optimizer", optimizer)
        described = contents.described_optimizers(optimizer)
    check_same("checkpoint.load", {"optimizer": described}, group)
    if (earlier := pending_save(group)) is not None:
        earlier.result()
    what = f"{directory}: reading the checkpoint failed"

    def choose() -> tuple[str, Manifest | None]:
        arguments.path("checkpoint.load", "directory", directory)
        if group.world_rank:
            return "", None
        path, manifest, passed_over = find(Path(directory))
        for why in passed_over:
            warnings.warn(f"checkpoint.load: a newer checkpoint was passed over: {why}", stacklevel=4)
        return f"{manifest.facts['token']}/{path.name if path != Path(directory) else ''}", manifest

    chosen, known = together(group, choose, what)
    token, _, name = share(group, chosen).partition("/")
    folder = Path(directory) / name if name else Path(directory)
    job = together(group, lambda: _read_all(folder, token, known, model, optimizer, group), what)
    _finish(job, model, optimizer, group)
    return job.extra


def _read_all(
    folder: Path, token: str, known: Manifest | None, model: nn.Module, optimizer: Any, group: ShardGroup
) -> Load:
    """Read and compare everything that goes into a model and its optimizers.

    Raises:
        CheckpointError: The checkpoint is of others, or damaged.
    """
    optimizers = contents.optimizers_by_prefix(optimizer)
    manifest = known or read_manifest(folder)
    if manifest.facts["token"] != token:
        raise CheckpointError(
            f"{folder}: all ranks must read one checkpoint, but another save has replaced it meanwhile. Load it again."
        )
    with outside_autograd(), Reader(folder, manifest) as reader:
        source, job = Source(folder, manifest, reader, group), Load(manifest)
        source = replace(source, own=_read_own(source))
        _prepare_model(source, model, job)
        prepare_optimizers(source, model, optimizers, job)
        _prepare_own(source, job)
        for name in sorted(reader.rebuilt):
            _LOG.warning(
                "%s: damaged or missing, so read from parity. dshard check --repair restores it.", folder / name
            )
    return job


def _finish(job: Load, model: nn.Module, optimizer: Any, group: ShardGroup) -> None:
    """Write the values that were read into the model and its optimizers.

    Raises:
        CheckpointError: A module raised in `set_extra_state`. On every rank alike; nothing was changed.

    Communicates:
        Two all-reduces of 8 bytes.
    """
    _set_extra_states(group, job)
    with outside_autograd():
        allocate(model, dict.fromkeys(job.on_meta, torch.device(group.device_type)))
        for commit in job.commits:
            commit()
    _count_alike(model, optimizer, group)
    lineage = lineage_of(model)
    lineage.run, lineage.sequence = job.manifest.facts["run"], job.manifest.facts["sequence"]


def _count_alike(model: nn.Module, optimizer: Any, group: ShardGroup) -> None:
    """Set the number of writes of every shard alike on all ranks, whose histories may differ."""
    held = list(model.state_dict(keep_vars=True).values())
    for each in contents.optimizers_by_prefix(optimizer).values():
        held += [value for state in each.state.values() if isinstance(state, dict) for value in state.values()]
    storages = [value.shard_storage for value in held if isinstance(value, ShardedTensor)]
    most = torch.tensor([max((c.num_writes for c in storages), default=0)], device=group.device_type)
    most = collectives.all_reduce([most], group, ReduceOp.MAX, label="checkpoint", everywhere=True).wait()[0]
    for storage in storages:
        storage.tag, storage.num_writes = 0, int(most.item()) + 1


def _prepare_model(source: Source, model: nn.Module, job: Load) -> None:
    state = model.state_dict(keep_vars=True)
    contents.check_kept("checkpoint.load", model, state)
    tensors = {
        name: value for name, value in state.items() if isinstance(value, Tensor) and not contents.is_extra(name)
    }
    beyond = [name for name in source.manifest.names_below("model.") if name.removeprefix("model.") not in tensors]
    if beyond:
        raise source.refusal(
            f"the checkpoint must hold nothing beyond the model, but it has '{beyond[0]}' and {len(beyond) - 1} more"
        )
    read: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in tensors.items():
        values = source.read(f"model.{name}", contents.box_of(tensor), contents.dtype_of(tensor))
        known = read.get(id(tensor))
        if known is not None:
            _check_tie(source, name, values, *known)
            continue
        read[id(tensor)] = name, values
        if tensor.is_meta:
            job.on_meta.append(name)
            job.commits.append(partial(_write_by_name, model, name, values))
        else:
            job.commits.append(writer(tensor, values))
    _prepare_extra_state(source, model, set(state) - set(tensors), job)


def _check_tie(source: Source, name: str, values: Tensor, other: str, known: Tensor) -> None:
    if not torch.equal(bytes_of(values), bytes_of(known)):
        raise source.refusal(
            f"'{name}' and '{other}' are one tensor of the model and must have one value, but the checkpoint has two"
        )


def _write_by_name(model: nn.Module, name: str, values: Tensor) -> None:
    """Write values into a tensor that got its memory only now."""
    writer(model.state_dict(keep_vars=True)[name], values)()


def _prepare_extra_state(source: Source, model: nn.Module, names: set[str], job: Load) -> None:
    saved = source.fact("extra_state")
    if set(saved) != names:
        differing = sorted(set(saved) ^ names)[0]
        raise source.refusal(
            f"the extra state of modules must be that of the model, but '{differing}' is in one of them alone"
        )
    for name, value in saved.items():
        job.extra_states.append((model.get_submodule(name.rpartition(".")[0]), source.decoded(value, name)))


def _set_extra_states(group: ShardGroup, job: Load) -> None:
    """Set the extra states of modules; if one of them raises on any rank, set all old ones again."""
    before: list[tuple[nn.Module, Any]] = []

    def change() -> None:
        for module, value in job.extra_states:
            before.append((module, copy.deepcopy(module.get_extra_state())))
            module.set_extra_state(value)

    if job.manifest.facts["extra_state"]:
        try:
            together(group, change, "checkpoint.load: set_extra_state of a module failed")
        except CheckpointError:
            for module, value in reversed(before):
                module.set_extra_state(value)
            raise


def _read_own(source: Source) -> Mapping[str, Any]:
    """Read what one rank saved for itself: random states, and facts that differed between ranks."""
    name = own_name(source.rank, contents.OWN)
    found = source.manifest.tensors.get(name)
    if found is None:
        raise source.damage(name)
    values = source.reader.read(name, Box.whole(found.shape))
    try:
        own = json.loads(values.numpy().tobytes())
        facts = own.get("facts") or {"optimizers": [], "extra_state": {}}
        if not isinstance(facts["optimizers"], list) or not isinstance(facts["extra_state"], dict):
            raise TypeError(f"its facts are {facts!r:.40}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise source.damage(name, error) from error
    return dict(own)


def _prepare_own(source: Source, job: Load) -> None:
    """Prepare the random states and the `extra` of this rank."""
    facts = source.manifest.facts
    try:
        states = _random_states(source.decoded(source.own["random"], "the random states"))
        extra = facts["extra"] if facts["are_alike"] else source.own["extra"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise source.damage(own_name(source.rank, contents.OWN), error) from error
    job.extra = source.decoded(extra, "extra")
    if source.is_same_size:
        job.commits.append(lambda: _set_random_states(states, source.group.device_type))
        return
    different = [
        *(["extras"] if not facts["are_alike"] else []),
        *(["numbers of optimizers or modules"] if source.own.get("facts") else []),
    ]
    if different:
        warnings.warn(
            f"checkpoint.load: {source.manifest.world_size} ranks saved different {' and '.join(different)}, and "
            f"{source.group.world_size} read: all get those of rank 0.",
            stacklevel=7,
        )


def _random_states(saved: Any) -> dict[str, Any]:
    """Decode random states and try them on other generators; raises ValueError for states that these refuse."""
    states = {**saved, "numpy": {**saved["numpy"], "state": dict(saved["numpy"]["state"])}}
    numpy_state = states["numpy"]["state"]
    if "key" in numpy_state:
        numpy_state["key"] = np.array(numpy_state["key"], dtype=np.uint32)
    try:
        torch.Generator("cpu").set_state(states["torch"])
    except RuntimeError as error:
        raise ValueError(error) from error
    random.Random().setstate(states["python"])
    if states["numpy"]["bit_generator"] == "MT19937":
        np.random.RandomState().set_state(states["numpy"])
    return states


def _set_random_states(states: Mapping[str, Any], device_type: str) -> None:
    """Set the default random generators to saved states."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002 - the global one is what was kept
    if "device" in states and device_type != "cpu":
        torch.get_device_module(device_type).set_rng_state(states["device"])
