"""Load a checkpoint: every rank reads and compares all that it needs before any rank changes anything."""

import copy
import json
import logging
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dshard import arguments, collectives
from dshard.agreement import check_same, refused_together
from dshard.autograd import outside_autograd
from dshard.checkpoint import contents
from dshard.checkpoint.agreement import group_of, share, together
from dshard.checkpoint.files import Box
from dshard.checkpoint.folders import find
from dshard.checkpoint.manifest import Manifest, StoredTensor, read_manifest
from dshard.checkpoint.reading import Reader
from dshard.checkpoint.saving import lineage_of, pending_save
from dshard.collectives import ReduceOp, ShardGroup
from dshard.errors import CheckpointError
from dshard.optimizer.replace import allocate, convert, forget_flat_weights
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
        DivergenceError: The ranks pass different folders or optimizers, or one of them no optimizer. On every rank
            alike; nothing was changed.

    Communicates:
        Some all-reduces of a few bytes, and no values.
    """
    group = group_of(arguments.module("checkpoint.load", "model", model))
    with refused_together("checkpoint.load", ["directory", "optimizer"], group):
        arguments.path("checkpoint.load", "directory", directory)
        arguments.optimizers("checkpoint.load", "optimizer", optimizer)
        described = contents.described_optimizers(optimizer)
        path = str(Path(directory).absolute())
    check_same("checkpoint.load", {"directory": path, "optimizer": described}, group)
    if (earlier := pending_save(group)) is not None:
        earlier.result()
    what = f"{directory}: a checkpoint must be readable, and as save wrote it"

    def choose() -> tuple[str, Manifest | None]:
        if group.world_rank:
            return "", None
        path, manifest, passed_over = find(Path(directory))
        for why in passed_over:
            warnings.warn(f"checkpoint.load: a newer checkpoint was passed over: {why}", stacklevel=4)
        return f"{manifest.facts['token']}/{path.name if path != Path(directory) else ''}", manifest

    chosen, known = together(group, choose, what)
    token, _, name = share(group, chosen).partition("/")
    folder = Path(directory) / name if name else Path(directory)

    def read() -> _Load:
        manifest = known or read_manifest(folder)
        if manifest.facts["token"] != token:
            raise CheckpointError(
                f"{folder}: all ranks must read one checkpoint, but another save has replaced it meanwhile. Load it "
                "again."
            )
        with outside_autograd(), Reader(folder, manifest) as reader:
            job = _Load(folder, manifest, reader, group)
            job.read_everything(model, optimizer)
        for name in sorted(reader.rebuilt):
            _LOG.warning(
                "%s: damaged or missing, so read from parity. dshard check --repair restores it.", folder / name
            )
        return job

    job = together(group, read, what)
    put("checkpoint.load", model, job.values, job.extra_states, group)
    with outside_autograd():
        for commit in job.commits:
            commit()
    _count_alike(model, optimizer, group)
    lineage = lineage_of(model)
    lineage.run, lineage.sequence = job.manifest.facts["run"], job.manifest.facts["sequence"]
    return job.extra


class _Load:
    """A checkpoint as one rank reads it, and the changes that the load makes when everything was read.

    None of the changes can fail, but for `set_extra_state`.

    Args:
        folder: Of the checkpoint.
        manifest: What it says of itself.
        reader: Of its files.
        group: The ranks that read it.
    """

    def __init__(self, folder: Path, manifest: Manifest, reader: Reader, group: ShardGroup) -> None:
        self.manifest, self._folder, self._reader, self._group = manifest, folder, reader, group
        self._is_same_size = manifest.world_size == group.world_size  # whether as many ranks read as wrote
        self._rank = group.world_rank if self._is_same_size else 0  # whose own values this rank reads
        self.extra: Any = None  # what `load` returns
        self.values: dict[str, Tensor] = {}  # this rank's part of each tensor of the model, by name
        self.commits: list[Callable[[], object]] = []  # what to do after these were written, in order
        self.extra_states: dict[str, Any] = {}  # what the `set_extra_state` of modules is to get
        self._options: dict[int, Mapping[str, Any]] = {}  # of the group of each parameter that is trained, by identity
        self._whole: set[str] = set()  # names of states that are no shards, whatever their shape

    def read_everything(self, model: nn.Module, optimizer: Any) -> None:
        """Read and compare everything that goes into a model and its optimizers.

        Raises:
            CheckpointError: The checkpoint is of others, or damaged.
        """
        facts = self._json(contents.FACTS)
        self._read_model(model, facts["extra_state"])
        self._read_optimizers(model, contents.optimizers_by_prefix(optimizer), facts["optimizers"])
        self.extra = self._decoded(self._json(contents.EXTRA))
        states = _checked_states(self._decoded(self._json(contents.RANDOM)))
        if self._is_same_size:
            self.commits.append(lambda: _set_random_states(states, self._group.device_type))
            return
        differing = {contents.EXTRA: "extras", contents.FACTS: "numbers of optimizers or modules"}
        if different := [what for name, what in differing.items() if name not in self.manifest.tensors]:
            warnings.warn(
                f"checkpoint.load: {self.manifest.world_size} ranks saved different {' and '.join(different)}, and "
                f"{self._group.world_size} read: all get those of rank 0.",
                stacklevel=5,
            )

    def _refusal(self, what: str) -> CheckpointError:
        """Return an error that names the checkpoint."""
        return CheckpointError(
            f"{self._folder}: {what}. Build the model and the optimizer as they were when it was saved, or pass no "
            "optimizer to load the model alone."
        )

    def _require_same(self, what: str, saved: object, own: object) -> None:
        if saved != own:
            raise self._refusal(f"{what} must be as it was saved, but that is {saved!s:.120} and this is {own!s:.120}")

    def _require_same_names(self, what: str, saved: Set[str], own: Set[str]) -> None:
        if saved != own:
            lost, new = sorted(saved - own), sorted(own - saved)
            raise self._refusal(
                f"{what} must have the names that were saved, but {lost!s:.120} are missing and {new!s:.120} were not "
                "saved"
            )

    def _read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Read this rank's box of a tensor.

        Raises:
            CheckpointError: It is not there, of another shape or dtype, or damaged.
        """
        kept, stored = self._stored(name)
        if stored.shape != box.shape or stored.dtype != dtype:
            raise self._refusal(
                f"tensors must have the shapes and dtypes that were saved, but '{name}' is {stored.shape}, "
                f"{stored.dtype} in the checkpoint and {box.shape}, {dtype} in the model"
            )
        return self._reader.read(kept, box)

    def _decoded(self, value: Any, made: Callable[[str, StoredTensor], Tensor] | None = None) -> Any:
        """Decode a value of the checkpoint, with the tensors that it names; by default whole ones on the host.

        Raises:
            CheckpointError: A tensor that it names is damaged.
            ValueError, KeyError, TypeError: It is nothing that `encode` makes.
        """

        def named(name: str) -> Tensor:
            kept, stored = self._stored(name)
            return self._reader.read(kept, Box.whole(stored.shape)) if made is None else made(name, stored)

        return contents.decode(value, named)

    def _stored(self, name: str) -> tuple[str, StoredTensor]:
        """Find a tensor, and the name under which this rank's values are stored."""
        found = self.manifest.stored(name, self._rank)
        if found is None:
            raise self._refusal(f"'{name}' must be in the checkpoint, but it is not")
        return found

    def _json(self, name: str) -> Any:
        return json.loads(self._decoded({"$named": name}).numpy().tobytes())

    def _read_model(self, model: nn.Module, extra_state: Mapping[str, Any]) -> None:
        state = model.state_dict(keep_vars=True)
        contents.check_kept("checkpoint.load", model, state)
        tensors = {
            name: value for name, value in state.items() if isinstance(value, Tensor) and not contents.is_extra(name)
        }
        held = {name.removeprefix("model.") for name in self.manifest.names_below("model.")}
        self._require_same_names("the model", held, set(tensors))
        self._require_same_names("the extra state of modules", set(extra_state), set(state) - set(tensors))
        names: dict[int, str] = {}  # of tied tensors the first
        for name, tensor in tensors.items():
            contents.refuse_plain_meta(name, tensor)
            values = self._read(f"model.{name}", contents.box_of(tensor), contents.dtype_of(tensor))
            first = names.setdefault(id(tensor), name)
            if first == name:
                self.values[name] = values
            elif not torch.equal(bytes_of(values), bytes_of(self.values[first])):
                raise self._refusal(
                    f"'{name}' and '{first}' are one tensor of the model and must have one value, but the checkpoint "
                    "has two"
                )
        self.extra_states = {name: self._decoded(value) for name, value in extra_state.items()}

    def _read_optimizers(
        self, model: nn.Module, optimizers: Mapping[str, Optimizer], saved: Sequence[Mapping[str, Any]]
    ) -> None:
        """Read and check the states of the optimizers that were passed: as many as were saved, or none."""
        if optimizers:
            self._require_same("the number of optimizers", len(saved), len(optimizers))
        names = contents.name_of_params(model, optimizers)
        for optimizer, facts in zip(optimizers.values(), saved, strict=False):
            self._require_same("the class of the optimizer", facts["kind"], type(optimizer).__name__)
            self._require_same("the number of param_groups", len(facts["groups"]), len(optimizer.param_groups))
            self._read_groups(optimizer, facts["groups"], names)
            self._read_state(optimizer, facts, names)

    def _read_groups(self, optimizer: Optimizer, saved: Sequence[Any], names: Mapping[int, str]) -> None:
        for i, (facts, group) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
            options, params = self._decoded(facts), [names[id(p)] for p in group["params"]]
            self._require_same(f"the parameters of param_groups[{i}]", options.pop("params"), params)
            if missing := sorted(set(group) - {"params", *options}):
                raise self._refusal(
                    f"param_groups[{i}] must have the options of the optimizer, but '{missing[0]}' was not saved"
                )
            for key, value in options.items():
                if key in group and not contents.same_kind(value, group[key]):
                    raise self._refusal(
                        f"param_groups[{i}]['{key}'] must be of the kind that the optimizer has, {group[key]!r:.40}, "
                        f"but it is {value!r:.40}"
                    )
            self.commits.append(partial(_set_options, group, options))
            self._options.update(dict.fromkeys(map(id, group["params"]), options))

    def _read_state(self, optimizer: Optimizer, facts: Mapping[str, Any], names: Mapping[int, str]) -> None:
        params = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        foreign = next((name for name in facts["state"] if name not in params), None)
        if foreign is not None:
            raise self._refusal(f"the optimizer must hold every parameter that has a state, but not '{foreign}'")
        states = [value for param in params.values() for value in optimizer.state.get(param, {}).values()]
        held = [each for each in (*params.values(), *states) if isinstance(each, ShardedTensor)]
        num_holders = Counter(id(each.shard_storage) for each in held)
        self._whole.update(facts["whole"])
        for name, param in params.items():
            saved = facts["state"].get(name)
            if saved is None:
                self.commits.append(partial(optimizer.state.pop, param, None))
                continue
            old, values = optimizer.state.get(param, {}), {}
            for key, value in saved.items():
                own = old.get(key) if isinstance(value, dict) and value.keys() == {"$named"} else None
                is_shared = isinstance(own, ShardedTensor) and num_holders[id(own.shard_storage)] > 1
                values[key] = self._decoded(value, partial(self._state, param, key, own, is_shared))
            self.commits.append(partial(optimizer.state.__setitem__, param, values))
        common = dict(self._decoded(facts["common"]))
        gone = [key for key in optimizer.state if not isinstance(key, Tensor) and key not in common]
        self.commits += [partial(optimizer.state.pop, key, None) for key in gone]
        self.commits.append(partial(optimizer.state.update, common))

    def _state(self, param: Tensor, key: str, old: Any, is_shared: bool, name: str, stored: StoredTensor) -> Tensor:
        """Return the optimizer's own tensor, to be written to later, or a new one on the device where torch puts it.

        On the host, a shard that was read takes the place of the old one, as with torch's own load_state_dict: a copy
        would double the time of a load from memory.
        """
        shape, dtype = stored.shape, stored.dtype
        if isinstance(old, Tensor) and not old.is_meta and old.shape == shape and contents.dtype_of(old) == dtype:
            values = self._read(name, contents.box_of(old), dtype)
            if isinstance(old, ShardedTensor) and not is_shared and _is_replaceable(old, values.device):
                return old.like(ShardStorage(values, old.shard_layout, is_shared=True), dtype=dtype)
            self.commits.append(partial(write_values, old, values))
            return old
        own = param.storage_device if isinstance(param, ShardedTensor) else param.device
        device = self._group.device_type if own.type == "meta" else own
        if shape and shape == tuple(param.shape) and isinstance(param, ShardedTensor) and name not in self._whole:
            shard = self._read(name, contents.box_of(param), dtype).to(device)
            return param.like(ShardStorage(shard, param.shard_layout, is_shared=True), dtype=dtype)
        values, options = self._read(name, Box.whole(shape), dtype), self._options[id(param)]
        is_on_host = key == "step" and not (options.get("capturable") or options.get("fused"))
        return values if is_on_host else values.to(device)  # as torch's own load_state_dict places them


def _is_replaceable(old: ShardedTensor, device: torch.device) -> bool:
    """Return whether a shard that was read into memory of a device may take the place of a tensor's."""
    if old.is_view:
        return False
    shard = old.shard_storage.resolve()
    is_plain = not subclass_gathers(shard) and shard.is_contiguous() and not shard.is_pinned()
    return is_plain and shard.device == device


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        own = group.get(key)
        if isinstance(own, Tensor) and value is not None:
            own.fill_(value)
        else:
            group[key] = value.item() if isinstance(value, Tensor) and isinstance(own, (int, float)) else value


def _checked_states(states: dict[str, Any]) -> dict[str, Any]:
    """Try random states on other generators, which raise for states that they refuse."""
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


def write_values(tensor: Tensor, values: Tensor) -> None:
    """Write this rank's part of a tensor."""
    if isinstance(tensor, ShardedTensor) and not tensor.is_view:
        if subclass_gathers(tensor.shard_storage.resolve()):
            tensor.copy_(tensor.like(values.to(tensor.storage_device)))
        else:
            tensor.overwrite_shard(values)
    elif isinstance(tensor, DTensor) and not isinstance(tensor, ShardedTensor):
        tensor.to_local().copy_(values)
    else:
        tensor.copy_(values)


def put(
    who: str, model: nn.Module, values: dict[str, Tensor], extra_states: Mapping[str, Any], group: ShardGroup
) -> None:
    """Write values that were read into a model's tensors, and let go of each; set extra states of modules before.

    Args:
        who: The function that loads, for errors.
        model: A sharded module; what is on the meta device gets memory first.
        values: This rank's part of each tensor, by its name in the state dict.
        extra_states: What the `set_extra_state` of modules is to get, by names in the state dict.
        group: The ranks that share the model.

    Raises:
        CheckpointError: A tensor on the meta device cannot get memory on some rank, or a module raised in
            `set_extra_state`. On every rank alike; nothing was changed.
        StateError: The first, on a rank where something refers to a parameter there.

    Communicates:
        An all-reduce of 8 bytes, and one if there are extra states.
    """
    params = [param for param in model.parameters() if isinstance(param, ShardedTensor) and param.is_meta]
    buffers = {name: b for name, b in model.named_buffers(remove_duplicate=False) if b.is_meta}
    devices = dict.fromkeys(values, torch.device(group.device_type))
    with outside_autograd():
        try:
            together(group, lambda: allocate(model, devices), f"{who}: a model on the meta device needs memory")
            if extra_states:
                _set_extra_states(who, model, extra_states, group)
        except BaseException:
            _take_memory_back(model, params, buffers)
            raise
        state = model.state_dict(keep_vars=True)
        for name in list(values):
            write_values(state[name], values.pop(name))


def _take_memory_back(model: nn.Module, params: Sequence[ShardedTensor], buffers: Mapping[str, Tensor]) -> None:
    """Move parameters to the meta device again, and put the buffers that were there back in their places."""
    recurrent = forget_flat_weights(model)
    for param in params:
        if not param.is_meta:
            convert(param, partial(torch.empty_like, device="meta"))
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._buffers[attribute] = buffer
    for rnn in recurrent:
        rnn._init_flat_weights()


def _set_extra_states(who: str, model: nn.Module, extra_states: Mapping[str, Any], group: ShardGroup) -> None:
    """Set the extra states of modules; if one of them raises on any rank, set all old ones again."""
    before: list[tuple[nn.Module, Any]] = []

    def change() -> None:
        for name, value in extra_states.items():
            module = model.get_submodule(name.rpartition(".")[0])
            before.append((module, copy.deepcopy(module.get_extra_state())))
            module.set_extra_state(value)

    try:
        together(group, change, f"{who}: set_extra_state must take what was saved")
    except BaseException:
        for module, value in reversed(before):
            with suppress(Exception):  # one that refuses whatever it is given has kept what it had
                module.set_extra_state(value)
        raise
