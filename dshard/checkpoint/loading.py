"""Load a checkpoint: every rank reads and compares all that it needs before any rank changes anything."""

import logging
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
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
from dshard.checkpoint.manifest import Manifest, StoredTensor, read_manifest
from dshard.checkpoint.reading import Reader, Source, put, set_extra_states, write_values
from dshard.checkpoint.saving import lineage_of
from dshard.checkpoint.values import same_kind
from dshard.collectives import ReduceOp, ShardGroup
from dshard.errors import CheckpointError
from dshard.tensor import ShardedTensor
from dshard.tensor.storage import ShardStorage
from dshard.tensor.subclass_shards import subclass_gathers
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
            tensor and both values. Or a module raised in `set_extra_state`. On every rank alike; nothing was changed.
        StateError: Something refers to a parameter on the meta device, which cannot get memory then. On the other
            ranks it is a CheckpointError; nothing was changed.
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
    what = f"{directory}: a checkpoint must be readable, and as save wrote it"

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


@dataclass(slots=True)
class _Load:
    """The changes that a load makes when everything was read; none of them can fail, but for `set_extra_state`.

    Args:
        facts: Of the manifest.
        extra: What `load` returns.
        read: This rank's part of each tensor of the model, by name.
        commits: What to do after these were written, in order.
        extra_states: Modules with what their `set_extra_state` is to get, which may raise.
        groups: Options of the group of each parameter that is trained, by identity.
    """

    facts: Mapping[str, Any]
    extra: Any = None
    read: dict[str, Tensor] = field(default_factory=dict)
    commits: list[Callable[[], object]] = field(default_factory=list)
    extra_states: list[tuple[nn.Module, Any]] = field(default_factory=list)
    groups: dict[int, Mapping[str, Any]] = field(default_factory=dict)


def _read_all(
    folder: Path, token: str, known: Manifest | None, model: nn.Module, optimizer: Any, group: ShardGroup
) -> _Load:
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
        source, job = Source(folder, manifest, reader, group), _Load(manifest.facts)
        _prepare_model(source, model, job)
        _prepare_optimizers(source, model, optimizers, job)
        _prepare_own(source, job)
        for name in sorted(reader.rebuilt):
            _LOG.warning(
                "%s: damaged or missing, so read from parity. dshard check --repair restores it.", folder / name
            )
    return job


def _finish(job: _Load, model: nn.Module, optimizer: Any, group: ShardGroup) -> None:
    """Write the values that were read into the model and its optimizers.

    Raises:
        CheckpointError: A module raised in `set_extra_state`, or a tensor cannot get memory. On every rank alike;
            nothing was changed.
        StateError: As `load`.

    Communicates:
        Two all-reduces of 8 bytes, and one where there is extra state.
    """
    with outside_autograd():
        who = "checkpoint.load"
        put(model, job.read, group, partial(set_extra_states, group, job.extra_states, who), who)
        for commit in job.commits:
            commit()
    _count_alike(model, optimizer, group)
    lineage = lineage_of(model)
    lineage.run, lineage.sequence = job.facts["run"], job.facts["sequence"]


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


def _prepare_model(source: Source, model: nn.Module, job: _Load) -> None:
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
    names: dict[int, str] = {}  # of tied tensors the first
    for name, tensor in tensors.items():
        contents.refuse_plain_meta(name, tensor)
        values = source.read(f"model.{name}", contents.box_of(tensor), contents.dtype_of(tensor))
        first = names.setdefault(id(tensor), name)
        if first == name:
            job.read[name] = values
        elif not torch.equal(bytes_of(values), bytes_of(job.read[first])):
            raise source.refusal(
                f"'{name}' and '{first}' are one tensor of the model and must have one value, but the checkpoint has "
                "two"
            )
    _prepare_extra_state(source, model, set(state) - set(tensors), job)


def _prepare_extra_state(source: Source, model: nn.Module, names: set[str], job: _Load) -> None:
    saved = source.facts["extra_state"]
    if set(saved) != names:
        differing = sorted(set(saved) ^ names)[0]
        raise source.refusal(
            f"the extra state of modules must be that of the model, but '{differing}' is in one of them alone"
        )
    for name, value in saved.items():
        job.extra_states.append((model.get_submodule(name.rpartition(".")[0]), source.decoded(value)))


def _prepare_own(source: Source, job: _Load) -> None:
    """Prepare the random states and the `extra` of this rank."""
    facts = source.manifest.facts
    states = _random_states(source.decoded(source.own["random"]))
    job.extra = source.decoded(facts["extra"] if facts["are_alike"] else source.own["extra"])
    if source.is_same_size:
        job.commits.append(lambda: _set_random_states(states, source.group.device_type))
        return
    different = [
        *(["extras"] if not facts["are_alike"] else []),
        *(["numbers of optimizers or modules"] if source.own["facts"] else []),
    ]
    if different:
        warnings.warn(
            f"checkpoint.load: {source.manifest.world_size} ranks saved different {' and '.join(different)}, and "
            f"{source.group.world_size} read: all get those of rank 0.",
            stacklevel=6,
        )


def _random_states(saved: Any) -> dict[str, Any]:
    """Decode random states and try them on other generators, which raise for states that they refuse."""
    states = {**saved, "numpy": {**saved["numpy"], "state": dict(saved["numpy"]["state"])}}
    numpy_state = states["numpy"]["state"]
    if "key" in numpy_state:
        numpy_state["key"] = np.array(numpy_state["key"], dtype=np.uint32)
    torch.Generator("cpu").set_state(states["torch"])
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


# --------------------------------------------------------------------------------------------------- optimizers


def _prepare_optimizers(source: Source, model: nn.Module, optimizers: Mapping[str, Optimizer], job: _Load) -> None:
    """Read and check the states of the optimizers that were passed: as many as were saved, or none.

    Raises:
        CheckpointError: They are others than those that were saved, or the files are damaged.
    """
    saved = source.facts["optimizers"]
    if len(optimizers) and len(saved) != len(optimizers):
        raise source.refusal(
            f"optimizers must be as many as were saved, but it has {len(saved)} and {len(optimizers)} were passed",
            "Pass those that were saved, in their order, or none to load the model alone",
        )
    names = contents.name_of_params(model, optimizers)
    for optimizer, facts in zip(optimizers.values(), saved, strict=False):
        if facts["kind"] != type(optimizer).__name__:
            raise source.refusal(
                f"the optimizer must be of the class that was saved, but that is {facts['kind']} and this is "
                f"{type(optimizer).__name__}",
                "Pass one of that class, or none to load the model alone",
            )
        _prepare_groups(source, optimizer, facts["groups"], names, job)
        _prepare_state(source, optimizer, facts, names, job)


def _prepare_groups(
    source: Source, optimizer: Optimizer, saved: Sequence[Any], names: Mapping[int, str], job: _Load
) -> None:
    if len(saved) != len(optimizer.param_groups):
        raise source.refusal(
            f"param_groups must be as many as were saved, but those are {len(saved)} and the optimizer has "
            f"{len(optimizer.param_groups)}"
        )
    for i, (facts, group) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        own_names = [names[id(p)] for p in group["params"]]
        if facts["params"] != own_names:
            raise source.refusal(
                f"param_groups[{i}] must hold the parameters that were saved, but those are "
                f"{str(facts['params'])[:120]} and the optimizer's are {str(own_names)[:120]}"
            )
        options = source.decoded(facts["options"])
        own = {key: value for key, value in group.items() if key != "params"}
        _check_options(source, i, options, own)
        job.commits.append(partial(_set_options, group, options))
        job.groups.update(dict.fromkeys(map(id, group["params"]), options))


def _check_options(source: Source, i: int, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if missing := sorted(set(own) - saved.keys()):
        raise source.refusal(
            f"param_groups[{i}] must have the options of the optimizer, but '{missing[0]}' was not saved"
        )
    for key, value in saved.items():
        if key in own and not same_kind(value, own[key]):
            raise source.refusal(
                f"param_groups[{i}]['{key}'] must be of the kind that the optimizer has, {own[key]!r:.40}, but it is "
                f"{value!r:.40}"
            )


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        own = group.get(key)
        if isinstance(own, Tensor) and value is not None:
            own.fill_(value)
        else:
            group[key] = value.item() if isinstance(value, Tensor) and isinstance(own, (int, float)) else value


def _prepare_state(
    source: Source, optimizer: Optimizer, facts: Mapping[str, Any], names: Mapping[int, str], job: _Load
) -> None:
    params = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    foreign = next((name for name in facts["state"] if name not in params), None)
    if foreign is not None:
        raise source.refusal(f"the optimizer must hold every parameter that has a state, but not '{foreign}'")
    states = [value for param in params.values() for value in optimizer.state.get(param, {}).values()]
    held = [each for each in (*params.values(), *states) if isinstance(each, ShardedTensor)]
    num_holders = Counter(id(each.shard_storage) for each in held)
    for name, param in params.items():
        saved = facts["state"].get(name)
        if saved is None:
            job.commits.append(partial(optimizer.state.pop, param, None))
            continue
        old, values = optimizer.state.get(param, {}), {}
        place = _Place(source, param, job.groups[id(param)], facts["whole"], num_holders, job.commits)
        for key, value in saved.items():
            is_tensor = isinstance(value, dict) and value.keys() == {"$named"}
            values[key] = source.decoded(value, partial(place.take, key, old.get(key) if is_tensor else None))
        job.commits.append(partial(optimizer.state.__setitem__, param, values))
    common = dict(source.decoded(facts["common"]))
    gone = [key for key in optimizer.state if not isinstance(key, Tensor) and key not in common]
    job.commits += [partial(optimizer.state.pop, key, None) for key in gone]
    job.commits.append(partial(optimizer.state.update, common))


@dataclass(frozen=True, slots=True)
class _Place:
    """The destination of a parameter's state."""

    source: Source
    param: Tensor
    options: Mapping[str, Any]  # of its group
    whole: Collection[Any]  # names of states that are no shards, whatever their shape
    num_holders: Mapping[int, int]  # how many parameters and states have each shard storage, by its identity
    commits: list[Callable[[], object]]

    def take(self, key: str, old: Any, name: str, stored: StoredTensor) -> Tensor:
        """Return the optimizer's own tensor, to be written to later, or a new one on the device where torch puts it.

        On the host, a shard that was read takes the place of the old one, as with torch's own load_state_dict: a copy
        would double the time of a load from memory.
        """
        param, shape, dtype = self.param, stored.shape, stored.dtype
        if isinstance(old, Tensor) and not old.is_meta and old.shape == shape and contents.dtype_of(old) == dtype:
            values = self.source.read(name, contents.box_of(old), dtype)
            if isinstance(old, ShardedTensor) and self._is_replaced(old, values.device):
                return old.like(ShardStorage(values, old.shard_layout, is_shared=True), dtype=dtype)
            self.commits.append(partial(write_values, old, values))
            return old
        own = param.storage_device if isinstance(param, ShardedTensor) else param.device
        device = self.source.group.device_type if own.type == "meta" else own
        if shape and shape == tuple(param.shape) and isinstance(param, ShardedTensor) and name not in self.whole:
            shard = self.source.read(name, contents.box_of(param), dtype).to(device)
            return param.like(ShardStorage(shard, param.shard_layout, is_shared=True), dtype=dtype)
        values = self.source.read(name, Box.whole(shape), dtype)
        is_on_host = key == "step" and not (self.options.get("capturable") or self.options.get("fused"))
        return values if is_on_host else values.to(device)  # as torch's own load_state_dict places them

    def _is_replaced(self, old: ShardedTensor, device: torch.device) -> bool:
        if old.is_view or self.num_holders[id(old.shard_storage)] > 1:
            return False
        shard = old.shard_storage.resolve()
        is_plain = not subclass_gathers(shard) and shard.is_contiguous() and not shard.is_pinned()
        return is_plain and shard.device == device
