"""Read safetensors files into a sharded model: every rank its own rows, all of them before any is put in its place."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dshard.agreement.same import check_same
from dshard.arguments import call_given, read
from dshard.autograd.modes import outside_autograd
from dshard.checkpoint.agreement import group_of, together
from dshard.checkpoint.contents import check_kept
from dshard.checkpoint.file_format import Entry
from dshard.checkpoint.model_files import Found, find
from dshard.checkpoint.parts import read_part, unchanged
from dshard.errors import CheckpointError
from dshard.optimizer.moves import allocate, convert
from dshard.tensor import ShardedTensor
from dshard.tensor.tp_layout import part_of

_MAX_NAMED = 5  # in an error


class IncompatibleKeys(NamedTuple):
    """What `load_safetensors` found no counterpart for, in the fields that `load_state_dict` has.

    Args:
        missing_keys: Tensors of the module that no file holds under any of their names.
        unexpected_keys: Tensors of the files that the module has no place for.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True, slots=True)
class _Match:
    """What of the files goes where."""

    found: Found
    entries: dict[str, Entry]  # by name in the module
    keys: IncompatibleKeys


def load_safetensors(
    module: nn.Module,
    path_or_dir: str | os.PathLike[str],
    *,
    strict: bool = True,
    rename: Mapping[str, str] | Callable[[str], str | None] | None = None,
) -> IncompatibleKeys:
    """Read parameters and persistent buffers from safetensors, to be called on every rank.

    Each rank reads the rows of its own shards into memory of the host, in the dtype that the file has: while it loads,
    a rank holds its part of the model twice. Only when all of it has been read on every rank are values put in their
    places, converted to the parameter's dtype, and does a model on the meta device get memory for its shards: after an
    error the model is as it was.

    Args:
        module: A sharded module, also one on the meta device.
        path_or_dir: A safetensors file, a directory with `model.safetensors` or `model.safetensors.index.json`, or
            such an index. Every rank must see it.
        strict: Whether the names must be those of the module; else what has no counterpart is left out. Shapes must
            fit in any case. A tied weight may be there under any of its names.
        rename: Gives the module's name for a name in the files: a function, whose None leaves a tensor out, or a
            mapping, which leaves names that it does not have as they are.

    Returns:
        The names that had no counterpart; equal on all ranks.

    Raises:
        CheckpointError: No such file, a damaged one, one that changed while it was read, or one of another model; names
            the tensors. On every rank alike, before anything is changed.
        DivergenceError: The ranks would load different tensors, as by another `rename`. On every rank alike, before
            anything is changed.

    Communicates:
        Two all-reduces of 8 bytes and one of 48, and no values.
    """
    read("load_safetensors", {"module": module})
    group = group_of(module)
    given: dict[str, Any] = {"path_or_dir": path_or_dir, "strict": strict, "rename": rename}
    what = f"{path_or_dir}: loading needs safetensors files that can be read"
    state: dict[str, Any] = module.state_dict(keep_vars=True)

    def match() -> _Match:
        given.update(read("load_safetensors", given))
        target = given["target"] = Path(path_or_dir)
        found = find(target)
        renamed = _renamed(target, found.entries, rename)
        matched = _match(target, found, renamed, state, strict=given["strict"])
        _refuse_unwritable(matched.entries, state)
        check_kept("load_safetensors", module, {name: state[name] for name in matched.entries})
        return matched

    def stage() -> dict[str, Tensor]:
        # It begins when every rank has looked: what is put there later is noticed by one that had.
        target = given["target"]
        if find(target).sources != matched.found.sources:
            raise CheckpointError(
                f"{target}: files must not change while they are read, but others are in their place. Load again when "
                "nobody saves there."
            )
        return _read_all(matched, state)

    matched = together(group, match, what)
    goes_to = [f"'{entry.name}' to '{name}'" for name, entry in matched.entries.items()]
    check_same("load_safetensors", {"rename": goes_to, "strict": repr(given["strict"])}, group)
    staged = together(group, stage, what)
    _allocate(module, dict.fromkeys(staged, torch.device(group.device_type)))
    state = module.state_dict(keep_vars=True)
    with outside_autograd():
        for name in list(staged):
            _put(state[name], staged.pop(name))
    return matched.keys


def _renamed(target: Path, entries: Sequence[Entry], rename: Any) -> dict[str, Entry]:
    """The entries by the names that they have in the module."""
    by_name: dict[str, Entry] = {}
    for entry in entries:
        if rename is None:
            name: str | None = entry.name
        else:
            name = (
                rename.get(entry.name, entry.name)
                if isinstance(rename, Mapping)
                else call_given("load_safetensors", "rename", rename, entry.name, about=f"for '{entry.name}'")
            )
        if name is None:
            continue
        if name in by_name:
            raise CheckpointError(
                f"{target}: every tensor must go to a place of its own, but '{by_name[name].name}' (in "
                f"{by_name[name].file.name}) and '{entry.name}' (in {entry.file.name}) both go to '{name}'. Have "
                "rename return None for one of them."
            )
        by_name[name] = entry
    return by_name


def _match(
    target: Path, found: Found, entries: Mapping[str, Entry], state: Mapping[str, Any], *, strict: bool
) -> _Match:
    """Compare what is there with what is needed."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    loaded = {id(tensors[name]) for name in entries if name in tensors}
    missing = [name for name, value in tensors.items() if id(value) not in loaded]
    unexpected = [name for name in entries if name not in tensors]
    fitting = {name: entry for name, entry in entries.items() if name in tensors}
    problems = []
    if strict:
        problems += _listed(missing, "the files lack")
        problems += _listed(unexpected, "the module has no place for")
    shapes = [
        f"'{name}' ({entry.shape} in the file, {tuple(tensors[name].shape)} in the module)"
        for name, entry in fitting.items()
        if entry.shape != tuple(tensors[name].shape)
    ]
    problems += _listed(shapes, "shapes differ for", quoted=False)
    kinds = [
        f"'{name}' ({entry.dtype} in the file, {tensors[name].dtype} in the module)"
        for name, entry in fitting.items()
        if not torch.can_cast(entry.dtype, tensors[name].dtype)
    ]
    problems += _listed(kinds, "values cannot be converted for", quoted=False)
    if problems:
        raise CheckpointError(
            f"{target}: the files must hold what the module has, but {'; '.join(problems)}. Build the model as it was "
            "saved, map names with rename=, or pass strict=False to load those names that are in both."
        )
    return _Match(found, fitting, IncompatibleKeys(missing, unexpected))


def _listed(names: Sequence[str], what: str, *, quoted: bool = True) -> list[str]:
    """One problem with its first names, or none."""
    if not names:
        return []
    shown = ", ".join(repr(name) if quoted else name for name in names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return [f"{what} {len(names)}: {shown}{more}"]


def _refuse_unwritable(entries: Mapping[str, Entry], state: Mapping[str, Any]) -> None:
    """What values could not be put into must be known before they are put into others."""
    for name in entries:
        value = state[name]
        is_sharded = isinstance(value, ShardedTensor)
        if value.is_meta and isinstance(value, nn.Parameter) and not is_sharded:
            raise CheckpointError(
                f"{name}: loading gives memory to sharded parameters, but this one is plain and on the meta device. "
                "Move it with to_empty first."
            )
        if value.is_view if is_sharded else torch._debug_has_internal_overlap(value) == 1:
            raise CheckpointError(
                f"{name}: loading writes to tensors that own their memory, but this one is a view. Load it under the "
                "name of the tensor that it is a view of, or leave it out with rename=."
            )
        if not is_sharded and isinstance(value, DTensor):
            raise CheckpointError(
                f"{name}: loading writes to sharded or plain tensors, but this one is a DTensor that fully_shard did "
                "not take. Leave it out with rename=, and load it by torch's own means."
            )


def _read_all(match: _Match, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """This rank's part of every value, in the file's dtype."""
    by_file: dict[Path, list[tuple[str, Entry]]] = {}
    for name, entry in match.entries.items():
        by_file.setdefault(entry.file, []).append((name, entry))
    read = {}
    for source in match.found.sources:
        with unchanged(source) as opened:
            for name, entry in by_file.get(source.path, ()):
                read[name] = read_part(opened, entry, _part(state[name], entry))
    return read


def _allocate(module: nn.Module, devices: Mapping[str, torch.device]) -> None:
    """Give memory to what has none, or after an error to nothing."""
    on_meta = [param for param in module.parameters() if param.is_meta]
    try:
        allocate(module, devices)
    except BaseException:
        for param in on_meta:
            if not param.is_meta and isinstance(param, ShardedTensor):
                convert(param, partial(torch.empty_like, device="meta"))
        raise


def _part(value: Tensor, entry: Entry) -> Tensor:
    """What this rank holds of a tensor, as a view of one without memory."""
    full = torch.empty(entry.shape, device="meta")
    return part_of(full, value.shard_layout, value.shard_group.rank) if isinstance(value, ShardedTensor) else full


def _put(value: Tensor, read: Tensor) -> None:
    if isinstance(value, ShardedTensor):
        value.overwrite_shard(read)
    else:
        value.copy_(read)
