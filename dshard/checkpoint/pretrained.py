"""Read safetensors files into a sharded model: every rank reads its own rows before any rank changes anything."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dshard import arguments
from dshard.agreement import check_same
from dshard.arguments import call_given
from dshard.autograd import outside_autograd
from dshard.checkpoint.agreement import group_of, together
from dshard.checkpoint.contents import box_of, check_kept, is_extra, refuse_plain_meta
from dshard.checkpoint.disk import check_regular, open_regular
from dshard.checkpoint.files import DTYPES, Box
from dshard.checkpoint.reading import put, set_extra_states
from dshard.errors import CheckpointError
from dshard.tensor import ShardedTensor

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_MAX_NAMED = 5  # in an error
_MAX_SHOWN = 100  # letters of what a file says


class IncompatibleKeys(NamedTuple):
    """Names without a counterpart, in the fields that `load_state_dict` returns.

    Args:
        missing_keys: Tensors of the module that no file holds under any of their names.
        unexpected_keys: Tensors of the files that the module has no place for.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of a file."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


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
            the tensors. Or a module raised in `set_extra_state`. On every rank alike; nothing was changed.
        StateError: Something refers to a parameter on the meta device, which cannot get memory then. On the other
            ranks it is a CheckpointError; nothing was changed.
        DivergenceError: The ranks would load different tensors, as by another `rename`. On every rank alike, before
            anything is changed.

    Communicates:
        Three all-reduces of 8 bytes and one of 48, one of 8 more where there is extra state, and no values.
    """
    group = group_of(arguments.module("load_safetensors", "module", module))
    what = f"{path_or_dir}: loading needs safetensors files that can be read"
    state: dict[str, Any] = module.state_dict(keep_vars=True)

    versions: dict[Path, tuple[int, ...]] = {}  # of the files, as they were
    entries: dict[str, _Entry] = {}  # by name in the module

    def match() -> IncompatibleKeys:
        arguments.path("load_safetensors", "path_or_dir", path_or_dir)
        is_strict = arguments.boolean("load_safetensors", "strict", strict)
        _check_rename(rename)
        target = Path(path_or_dir)
        found_versions, found = _found_at(target)
        versions.update(found_versions)
        entries.update(_renamed(target, found, rename))
        keys = _compared(target, entries, state, strict=is_strict)
        for name in keys.unexpected_keys:
            del entries[name]
        _refuse_unwritable(entries, state)
        check_kept("load_safetensors", module, {name: state[name] for name in entries})
        return keys

    keys = together(group, match, what)
    goes_to = [f"'{entry.name}' to '{name}'" for name, entry in entries.items()]
    check_same("load_safetensors", {"rename": goes_to, "strict": repr(bool(strict))}, group)

    def read() -> tuple[dict[str, Tensor], list[tuple[nn.Module, Tensor]]]:
        staged = _read_all(Path(path_or_dir), versions, entries, state)
        extra_states = [
            (module.get_submodule(name.rpartition(".")[0]), staged.pop(name).to(state[name].dtype))
            for name in list(staged)
            if is_extra(name)
        ]
        return staged, extra_states

    staged, extra_states = together(group, read, what)
    with outside_autograd():
        who = "load_safetensors"
        put(module, staged, group, partial(set_extra_states, group, extra_states, who), who)
    return keys


def _check_rename(rename: Any) -> None:
    if callable(rename) and not isinstance(rename, type):
        return
    allowed, way = "a function of a name, or a mapping of names to names", "Pass one, as in lambda name: name."
    arguments.by_name("load_safetensors", "rename", rename, lambda x: isinstance(x, str), allowed, way, or_none=True)


def _chosen(path: Path) -> Path:
    """Return the file that is named, or in a folder the single file, or else the index.

    Links are followed, as Hugging Face's cache needs it; but an index can only name files that lie beside it.

    Raises:
        CheckpointError: There is none.
    """
    single, index = path / SINGLE_NAME, path / INDEX_NAME
    file = (single if os.path.lexists(single) else index) if path.is_dir() else path
    if os.path.lexists(file):
        return file
    raise CheckpointError(
        f"{path}: must be a safetensors file, or a directory with {SINGLE_NAME} or {INDEX_NAME}, but there is none. "
        "Check the path."
    )


def _found_at(path: Path) -> tuple[dict[Path, tuple[int, ...]], dict[str, _Entry]]:
    """Return the files of a model with their versions, an index first, and the tensors in them.

    Raises:
        CheckpointError: There are none, or what there is contradicts itself.
        OSError: It cannot be read.
    """
    file = _chosen(path)
    versions = {file: _version_of(file)}
    if file.suffix != ".json":
        return versions, {entry.name: entry for entry in _entries_in(file)}
    weight_map, found = weight_map_in(file), dict[str, _Entry]()
    where: dict[str, list[str]] = {name: [] for name in weight_map}
    for name in dict.fromkeys(weight_map.values()):
        versions[file.parent / name] = _version_of(file.parent / name)
        for entry in _entries_in(file.parent / name):
            found[entry.name] = entry
            where.setdefault(entry.name, []).append(name)
    for name, held_by in where.items():
        if held_by != [weight_map.get(name, held_by[0])]:
            found_in, named = " and in ".join(held_by) or "none of them", weight_map.get(name, "none")
            raise CheckpointError(
                f"{file}: every tensor must be in one file, the one that the index names, but {_shown(name)} is in "
                f"{found_in}, and the index names {named}. The files are of several models; use others."
            )
    return versions, found


def weight_map_in(index: Path) -> dict[str, str]:
    """Read an index: the file of each tensor.

    Raises:
        CheckpointError: It says no such thing, or is no file.
        OSError: It cannot be read.
    """
    try:
        with open(open_regular(index, follow=True), "rb") as opened:
            found = dict(json.load(opened).get("weight_map", {}))
        for name, file in found.items():
            if not isinstance(file, str) or file in ("", ".", "..") or set(file) & {"/", "\0"}:
                raise ValueError(f"{_shown(name)} lies in {_shown(file)}, which is no name of a file beside it")
        if not found:
            raise ValueError("it names none")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{index}: must be JSON with a weight_map of tensor names to files, but "
            f"{str(error)[:_MAX_SHOWN]}. The index is damaged; use another."
        ) from error
    return found


def _shown(value: Any) -> str:
    """Return a value of a file for an error, cut short."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file, mapped into memory.

    Raises:
        CheckpointError: It is no such file, or not whole.
        OSError: It cannot be read.
    """
    check_regular(file, follow=True)
    try:
        opened = safe_open(file, "pt")
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{file}: must be a whole safetensors file, but {str(error)[:_MAX_SHOWN]}. It is damaged or still being "
            "written; use another."
        ) from error
    with opened, torch.device("cpu"):  # whatever the default device is
        yield opened


def _entries_in(file: Path) -> list[_Entry]:
    """List the tensors of a file from its header; raises as `_opened`."""
    with _opened(file) as opened:
        found = []
        for name in sorted(opened.keys()):  # by offset, those without values come in any order
            one = opened.get_slice(name)
            if one.get_dtype() not in DTYPES:
                raise CheckpointError(f"{file}: {_shown(name)} has the dtype {one.get_dtype()}, which torch has not.")
            found.append(_Entry(name, file, DTYPES[one.get_dtype()], tuple(one.get_shape())))
        return found


def _version_of(file: Path) -> tuple[int, ...]:
    """Return a value that changes when somebody writes to a file or replaces it."""
    found = check_regular(file, follow=True)
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _renamed(target: Path, entries: Mapping[str, _Entry], rename: Any) -> dict[str, _Entry]:
    """Return the entries by their names in the module."""
    by_name: dict[str, _Entry] = {}
    for entry in entries.values():
        if rename is None or isinstance(rename, Mapping):
            name = (rename or {}).get(entry.name, entry.name)
        else:
            name = call_given("load_safetensors", "rename", rename, entry.name, about=f"for '{entry.name}'")
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


def _compared(
    target: Path, entries: Mapping[str, _Entry], state: Mapping[str, Any], *, strict: bool
) -> IncompatibleKeys:
    """Compare the tensors of the files with those of the module; raise one error for all that does not fit."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    loaded = {id(tensors[name]) for name in entries if name in tensors}
    missing = [name for name, value in tensors.items() if id(value) not in loaded]
    unexpected = [name for name in entries if name not in tensors]
    pairs = [(name, entry, tensors[name]) for name, entry in entries.items() if name in tensors]
    shapes = [
        f"'{name}' ({entry.shape} in the file, {tuple(tensor.shape)} in the module)"
        for name, entry, tensor in pairs
        if entry.shape != tuple(tensor.shape)
    ]
    kinds = [
        f"'{name}' ({entry.dtype} in the file, {tensor.dtype} in the module)"
        for name, entry, tensor in pairs
        if not torch.can_cast(entry.dtype, tensor.dtype)
    ]
    problems = {
        "the files lack": list(map(repr, missing)) if strict else [],
        "the module has no place for": list(map(repr, unexpected)) if strict else [],
        "shapes differ for": shapes,
        "values cannot be converted for": kinds,
    }
    if any(problems.values()):
        listed = [f"{what} {len(names)}: {_first(names)}" for what, names in problems.items() if names]
        raise CheckpointError(
            f"{target}: the files must hold what the module has, but {'; '.join(listed)}. Build the model as it was "
            "saved, map names with rename=, or pass strict=False to load those names that are in both."
        )
    return IncompatibleKeys(missing, unexpected)


def _first(names: Sequence[str]) -> str:
    """Return the first of some names, and the number of the rest."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _refuse_unwritable(entries: Mapping[str, _Entry], state: Mapping[str, Any]) -> None:
    """Raise for tensors that a load cannot write to, before it writes to others."""
    for name in entries:
        value = state[name]
        is_sharded = isinstance(value, ShardedTensor)
        refuse_plain_meta(name, value)
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


def _read_all(
    target: Path, versions: Mapping[Path, tuple[int, ...]], entries: Mapping[str, _Entry], state: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Read this rank's part of every tensor, in the file's dtype."""
    by_file: dict[Path, list[str]] = {}
    for name, entry in entries.items():
        by_file.setdefault(entry.file, []).append(name)
    staged = {}
    for file, names in by_file.items():
        with _opened(file) as opened:
            for name in names:
                entry, box = entries[name], box_of(state[name])
                if not entry.shape or not box.numel:
                    whole = opened.get_tensor(entry.name)
                    staged[name] = whole.clone() if not entry.shape else whole.new_empty(box.sizes)
                    continue
                rows = opened.get_slice(entry.name)[box.within(Box.whole(entry.shape))]
                staged[name] = rows.clone(memory_format=torch.contiguous_format)
    # The files are mapped, not read, when they are opened: what was put there meanwhile is noticed only now.
    is_same = all(_version_of(file) == version for file, version in versions.items())
    if not is_same or _chosen(target) not in versions:
        raise CheckpointError(
            f"{target}: files must not change while they are read, but others are in their place. Load again when "
            "nobody saves there."
        )
    return staged
