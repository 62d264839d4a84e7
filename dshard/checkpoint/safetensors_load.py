"""Read safetensors files into a sharded model: every rank its own rows, out of the mapped file."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dshard.checkpoint.agreement import group_of, together
from dshard.checkpoint.file_format import Entry, files_of, read_entries, read_shard
from dshard.errors import CheckpointError
from dshard.layout import ShardLayout
from dshard.runtime.modes import outside_autograd
from dshard.runtime.moves import allocate
from dshard.tensor import ShardedTensor
from dshard.tensor.inner import inner_of, part_of

__all__ = ["IncompatibleKeys", "load_safetensors"]

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

    Each rank maps the files into memory and reads the rows of its own shards, and no more, in the parameter's dtype. A
    model on the meta device gets memory for its shards as they are loaded. Nothing is changed unless all of it fits.

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
        CheckpointError: No such file, a damaged one, or one of another model; names the tensors. On every rank alike.

    Communicates:
        Two all-reduces of 8 bytes, and no values.
    """
    group = group_of(module)
    target, found = Path(path_or_dir), list[_Match]()
    what = f"{target}: loading needs safetensors files that can be read"
    state: dict[str, Any] = module.state_dict(keep_vars=True)

    def match() -> None:
        entries = [entry for file in files_of(target) for entry in read_entries(file)]
        found.append(_match(target, _renamed(target, entries, rename), state, strict=strict))
        _refuse_plain_meta(found[0].entries, state)

    def read() -> None:
        entries = found[0].entries
        allocate(module, dict.fromkeys(entries, torch.device(group.device_type)))
        _read_all(entries, module.state_dict(keep_vars=True))

    together(group, match, what)
    together(group, read, what)
    return found[0].keys


def _renamed(target: Path, entries: Sequence[Entry], rename: Any) -> dict[str, Entry]:
    """The entries by the names that they have in the module."""
    by_name: dict[str, Entry] = {}
    for entry in entries:
        if rename is None:
            name: str | None = entry.name
        else:
            name = rename.get(entry.name, entry.name) if isinstance(rename, Mapping) else rename(entry.name)
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


def _match(target: Path, entries: Mapping[str, Entry], state: Mapping[str, Any], *, strict: bool) -> _Match:
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
    return _Match(fitting, IncompatibleKeys(missing, unexpected))


def _listed(names: Sequence[str], what: str, *, quoted: bool = True) -> list[str]:
    """One problem with its first names, or none."""
    if not names:
        return []
    shown = ", ".join(repr(name) if quoted else name for name in names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return [f"{what} {len(names)}: {shown}{more}"]


def _refuse_plain_meta(entries: Mapping[str, Entry], state: Mapping[str, Any]) -> None:
    """Parameters that `fully_shard` was told to ignore are no objects of ours to give memory to."""
    for name in entries:
        value = state[name]
        if value.is_meta and isinstance(value, nn.Parameter) and not isinstance(value, ShardedTensor):
            raise CheckpointError(
                f"{name}: loading gives memory to sharded parameters, but this one is plain and on the meta device. "
                "Move it with to_empty first."
            )


def _read_all(entries: Mapping[str, Entry], state: Mapping[str, Any]) -> None:
    """Copy this rank's part of every value; one file is mapped at a time."""
    by_file: dict[Path, list[tuple[str, Entry]]] = {}
    for name, entry in entries.items():
        by_file.setdefault(entry.file, []).append((name, entry))
    with outside_autograd():
        for file, items in by_file.items():
            mapped = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
            for name, entry in items:
                _read_into(state[name], mapped, entry)


def _read_into(value: Tensor, mapped: Tensor, entry: Entry) -> None:
    if isinstance(value, ShardedTensor):
        layout, rank = value._layout, value._group.rank
        if inner_of(layout) is None:
            value.overwrite_shard(read_shard(mapped, entry, layout, rank))
        else:  # a view of the mapped file, so that no more is read here either
            full = read_shard(mapped, entry, ShardLayout(entry.shape, None, 1), 0)
            value.overwrite_shard(part_of(full, layout, rank))
    else:
        value.copy_(read_shard(mapped, entry, ShardLayout(entry.shape, None, 1), 0))
