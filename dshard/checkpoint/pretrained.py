"""Files that `from_pretrained` reads: load them into a sharded model, and write them from one or from a checkpoint.

A load has every rank read its own rows before any rank changes anything.

Files are made of shapes alone, and each value is put into its place when it is there, so that no more than a tensor or
two of the model are in memory at a time. When all of them are whole they take the place of the model that a folder
holds by one step. Readers take `model.safetensors` where it is, else what the index names; so that step is that one
file takes its name, or an index takes its name, or `model.safetensors` beside a new index goes. Names of parts that are
in use are never used again, and what is not read any more is removed afterwards: the other of the two, and the parts
that the older index named. Nothing else in the folder is touched.
"""

import json
import math
import os
import re
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
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
from dshard.arguments import call_given, shown
from dshard.checkpoint.agreement import group_of, together
from dshard.checkpoint.contents import box_of, check_kept, is_extra, left_out_of, refuse_plain_meta
from dshard.checkpoint.disk import (
    check_regular,
    locked,
    make_folder,
    open_regular,
    partial_name,
    sync_folder,
    write_whole,
)
from dshard.checkpoint.files import DTYPES, Box, check_dtype, tensor_file
from dshard.checkpoint.folders import find
from dshard.checkpoint.loading import put
from dshard.checkpoint.reading import Reader
from dshard.errors import CheckpointError
from dshard.gathering import full_values, refuse_meta
from dshard.tensor import ShardedTensor

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_MAX_NAMED = 5  # in an error
_MAX_SHOWN = 100  # letters of what a file says
_DEFAULT_SHARD_BYTES = 5_000_000_000
_WAY = "Leave it out for 5 GB."
_PART = re.compile(r"model-([0-9a-f]{16}-)?\d{5}-of-\d{5}\.safetensors")
_TOKEN_BYTES = 8
_PREFIX = "model."  # of a model's tensors in a checkpoint
Described = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # of a file: dtype and full shape of each tensor, by name


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
        who, allowed = "load_safetensors", "a function of a name, or a mapping of names to names"
        arguments.path(who, "path_or_dir", path_or_dir)
        is_strict = arguments.boolean(who, "strict", strict)
        if not callable(rename) or isinstance(rename, type):
            way = "Pass one, as in lambda name: name."
            arguments.by_name(who, "rename", rename, lambda x: isinstance(x, str), allowed, way, or_none=True)
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

    values = together(group, lambda: _read_all(Path(path_or_dir), versions, entries, state), what)
    extra_states = {name: values.pop(name).to(state[name].dtype) for name in list(values) if is_extra(name)}
    put("load_safetensors", module, values, extra_states, group)
    return keys


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
                f"{file}: every tensor must be in one file, the one that the index names, but {shown(name)} is in "
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
                raise ValueError(f"{shown(name)} lies in {shown(file)}, which is no name of a file beside it")
        if not found:
            raise ValueError("it names none")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{index}: must be JSON with a weight_map of tensor names to files, but "
            f"{str(error)[:_MAX_SHOWN]}. The index is damaged; use another."
        ) from error
    return found


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
                raise CheckpointError(f"{file}: {shown(name)} has the dtype {one.get_dtype()}, which torch has not.")
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


# -------------------------------------------------------------------------------------------- writing


def save_safetensors(
    module: nn.Module,
    path_or_dir: str | os.PathLike[str],
    *,
    max_shard_bytes: int = _DEFAULT_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write parameters and persistent buffers as safetensors, to be called on every rank; rank 0 writes.

    `from_pretrained`, `safetensors.torch.load_file` and `load_safetensors` read the result. Of the model no more than a
    tensor or two are in memory at a time: files are made from shapes, and values are gathered one by one. Files are
    written under names that nobody reads, synced, and then take their places by one step: whenever a process dies,
    readers find the older model or the new one, whole. Of two saves at once one is there afterwards.

    A directory holds one model, which is replaced: `model.safetensors`, or the index and the parts that it names. No
    other file is removed or written to. A save that is killed may leave files of its own: hidden ones that end in
    `.partial` or begin with `.tmp`, or parts that no index names.

    A tied weight is written once, under the name that Hugging Face's models expect (`_tied_weights_keys` of the module
    names the others), or its first; the metadata of the file notes the others, as `safetensors.torch.save_model` does.

    Args:
        module: A sharded module.
        path_or_dir: A file name that ends in `.safetensors`, for one file of any size. Else a directory, which gets
            `model.safetensors`, or `model-00001-of-0000N.safetensors` and an index; a part whose name is in use gets a
            longer one, `model-TOKEN-00001-of-0000N.safetensors`. It must be there for rank 0 alone.
        max_shard_bytes: Most bytes of values in one file of a directory; a larger tensor gets a file of its own.
        dtype: For floating-point values; by default their own.
        metadata: What else to write down in each file.

    Raises:
        CheckpointError: A file cannot be written, or a tensor cannot be in one. On every rank alike; readers find what
            was there before, and of the save nothing is left.
        StateError: A tensor is on the meta device. On every rank alike.
        DivergenceError: The ranks pass different arguments. On every rank alike; nothing was written.

    Communicates:
        An all-gather per tensor that is cut, an all-reduce of 8 bytes per file, and one of 96 bytes.
    """
    group = group_of(arguments.module("save_safetensors", "module", module))
    state = module.state_dict(keep_vars=True)
    refuse_meta("save_safetensors", [(name, t) for name, t in state.items() if isinstance(t, Tensor)])
    what = f"{path_or_dir}: saving safetensors needs a place that can be written"

    def prepare() -> _Files:
        who, allowed, convert = "save_safetensors", "texts by names", "Convert values with json.dumps."
        arguments.path(who, "path_or_dir", path_or_dir)
        arguments.dtype(who, "dtype", dtype, or_none=True)
        arguments.by_name(who, "metadata", metadata, lambda x: isinstance(x, str), allowed, convert, or_none=True)
        max_bytes = int(arguments.count(who, "max_shard_bytes", max_shard_bytes, way=_WAY))
        described, tied = _described(module, state, dtype)
        files = _Files(Path(path_or_dir), described, tied, max_bytes, metadata or {})
        if group.world_rank == 0:
            files.check_room()
        return files

    files = together(group, prepare, what)
    given = {"max_shard_bytes": files.max_bytes, "dtype": dtype, "metadata": metadata}
    facts = {name: repr(value) for name, value in given.items()}
    names = [name for part in files.parts for name in part]
    check_same("save_safetensors", {"path_or_dir": str(files.target), **facts, "module": names}, group)
    with files:
        for number, part in enumerate(files.parts):
            values = full_values([(name, state[name]) for name in part])
            write = partial(files.write, number) if group.world_rank == 0 else None
            together(group, partial(_gather, values, write), what)
        together(group, lambda: files.publish() if group.world_rank == 0 else None, what)


def _gather(values: Iterator[tuple[str, Tensor]], write: Callable[[Iterator[tuple[str, Tensor]]], None] | None) -> None:
    """Write values on rank 0; gather all of them, also after an error, so that the ranks keep step."""
    try:
        if write is not None:
            write(values)
    finally:
        for _ in values:
            pass


def merge(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    max_shard_bytes: int = _DEFAULT_SHARD_BYTES,
) -> None:
    """Write the model of a checkpoint as `from_pretrained` reads it: in one process, without the model's class.

    What `save_safetensors` would have written is written, by the same one step, from the files alone; every byte is
    compared with its sum, and parity stands in for a file that is lost. One tensor is in memory at a time. Of buffers
    that differ between ranks those of the first are taken. Extra state of modules (`get_extra_state`) is left out, also
    where it is a tensor, which `save_safetensors` writes: `load_safetensors` reads the result into such a model with
    `strict=False` alone. `config.json` and the tokenizer are not in a checkpoint.

    Args:
        checkpoint: Folder that `save` made, or a folder of such, of which the newest complete one is taken.
        out: As `path_or_dir` of `save_safetensors`.
        max_shard_bytes: Most bytes of values in one file of a directory; a larger tensor gets a file of its own.

    Raises:
        CheckpointError: No checkpoint there, or a damaged one; what `out` had is as it was.
        OSError: A file cannot be written; what `out` had is as it was.
    """
    arguments.path("checkpoint.merge", "checkpoint", checkpoint)
    arguments.path("checkpoint.merge", "out", out)
    max_shard_bytes = arguments.count("checkpoint.merge", "max_shard_bytes", max_shard_bytes, way=_WAY)
    folder, manifest, passed_over = find(Path(checkpoint))
    for why in passed_over:
        warnings.warn(f"checkpoint.merge: a newer checkpoint was passed over: {why}", stacklevel=2)
    described: Described = {}
    keys, tied = dict[str, str](), dict[str, str]()
    for name in manifest.names_below(_PREFIX):
        if (found := manifest.stored(name, 0)) is None:
            raise CheckpointError(f"{folder}: '{name}' must be stored by the first rank, but it is not.")
        short = name.removeprefix(_PREFIX)
        if manifest.aliases.get(name, "").startswith(_PREFIX):
            tied[short] = manifest.aliases[name].removeprefix(_PREFIX)
        else:
            keys[short], described[short] = found[0], (found[1].dtype, found[1].shape)
    files = _Files(Path(out), described, tied, max_shard_bytes, {})
    files.check_room()
    with files, Reader(folder, manifest) as reader:
        for number, part in enumerate(files.parts):
            files.write(number, ((name, reader.read(keys[name], Box.whole(part[name][1]))) for name in part))
        files.publish()


def _described(
    module: nn.Module, state: Mapping[str, Any], dtype: torch.dtype | None
) -> tuple[Described, dict[str, str]]:
    """Return the tensors to write, tied ones once, and the other names of these."""
    by_value: dict[int, list[str]] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name}: a safetensors file holds tensors alone, but this extra state is a {type(value).__name__}. "
                "Use dshard.checkpoint.save, or remove it."
            )
        is_shard = isinstance(value, ShardedTensor) and not value.is_view
        by_value.setdefault(id(value.shard_storage) if is_shard else id(value), []).append(name)  # type: ignore[attr-defined]
    left_out = left_out_of(module, state)
    described, tied = Described(), dict[str, str]()
    for names in by_value.values():
        kept = next((name for name in names if name not in left_out), names[0])
        tied.update({name: kept for name in names if name != kept})
        value = state[kept]
        own = dtype if dtype is not None and value.is_floating_point() else value.dtype
        check_dtype(kept, own)
        described[kept] = own, tuple(value.shape)
    return described, tied


class _Files(AbstractContextManager["_Files"]):
    """The files of a model: written under hidden names, and then renamed into place.

    Args:
        target: A file, or a folder.
        described: The tensors, in their order.
        tied: Other names of these.
        max_bytes: Of values in one file of a folder.
        metadata: Of each file.
    """

    def __init__(
        self, target: Path, described: Described, tied: Mapping[str, str], max_bytes: int, metadata: Mapping[str, str]
    ) -> None:
        self.target, self._tied, self._metadata = target, tied, {"format": "pt", **metadata}
        self.max_bytes, self._is_file = max_bytes, target.suffix == ".safetensors"
        self.parts: list[Described] = [{}]
        size = 0
        for name, each in described.items():
            size += _num_bytes({name: each})
            if not self._is_file and self.parts[-1] and size > max_bytes:
                self.parts.append({})
                size = _num_bytes({name: each})
            self.parts[-1][name] = each
        self._folder = target.parent if self._is_file else target
        self._names = [target.name if self._is_file else SINGLE_NAME]
        if len(self.parts) > 1:
            self._names = [f"model-{i + 1:05d}-of-{len(self.parts):05d}.safetensors" for i in range(len(self.parts))]
        self._drafts = [partial_name(self._folder / name) for name in self._names]

    def check_room(self) -> None:
        """Make the folder.

        Raises:
            CheckpointError: A folder has the name that a file is to take.
            OSError: It cannot be made.
        """
        make_folder(self._folder)
        for name in self._names if self._is_file else (SINGLE_NAME, INDEX_NAME):
            path = self._folder / name
            if path.is_dir() and not path.is_symlink():
                raise CheckpointError(
                    f"{path}: must be free for a file, but it is a folder. Move it, or pass another path."
                )

    def write(self, number: int, values: Iterable[tuple[str, Tensor]]) -> None:
        """Write one file, value by value.

        Raises:
            OSError: It cannot be written.
        """
        part = self.parts[number]
        notes = {name: kept for name, kept in self._tied.items() if kept in part}
        with tensor_file(self._drafts[number], part, {**self._metadata, **notes}) as write:
            for name, full in values:
                write(name, full)
                del full

    def publish(self) -> None:
        """Rename the files into place.

        Raises:
            CheckpointError: Another save does not come to its end.
            OSError: A name cannot be had or freed; if the new model is in its place by then, it is whole.
        """
        drafts = dict(zip(self._names, self._drafts, strict=True))
        if self._is_file:
            self._drafts[0].rename(self.target)
            sync_folder(self._folder)
            return
        weight_map = {name: file for file, part in zip(self._names, self.parts, strict=True) for name in part}
        replace_model(self._folder, drafts, weight_map, sum(map(_num_bytes, self.parts)))

    def __exit__(self, *raised: object) -> None:
        """Remove files that were not published; each rank has names of its own, and the first one alone has files."""
        _remove(self._folder, {path.name for path in self._drafts})


def _num_bytes(part: Described) -> int:
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in part.values())


def replace_model(folder: Path, drafts: Mapping[str, Path], weight_map: Mapping[str, str], num_bytes: int) -> None:
    """Replace a folder's model by one file, or by several and an index.

    Args:
        folder: The folder.
        drafts: Whole files by the names that they should have; a part whose name is in use gets a longer one.
        weight_map: Of these names, that of each tensor.
        num_bytes: Of all tensors.

    Raises:
        CheckpointError: Another save does not come to its end.
        OSError: A name cannot be had or freed; if the new model is in its place by then, it is whole.
    """
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    with locked(folder):
        older, names = _parts_by(index), dict[str, str]()
        if len(drafts) == 1:
            next(iter(drafts.values())).rename(single)
            sync_folder(folder)
            index.unlink(missing_ok=True)
            _remove(folder, older)
            return
        try:
            for name, draft in drafts.items():
                is_free = name not in older and not os.path.lexists(folder / name)
                names[name] = name if is_free else _longer(name)
                draft.rename(folder / names[name])
            sync_folder(folder)
            said = {
                "metadata": {"total_size": num_bytes},
                "weight_map": {name: names[file] for name, file in sorted(weight_map.items())},
            }
            write_whole(index, (json.dumps(said, indent=2) + "\n").encode())
            if os.path.lexists(single):
                single.unlink()
                sync_folder(folder)
        except BaseException:
            _take_back(folder, set(names.values()))
            raise
        _remove(folder, older - set(names.values()))


def _longer(name: str) -> str:
    return name.replace("model-", f"model-{secrets.token_hex(_TOKEN_BYTES)}-", 1)


def _take_back(folder: Path, names: set[str]) -> None:
    """Remove new parts after an error, unless readers already take them."""
    with suppress(OSError):
        is_named = not names.isdisjoint(_parts_by(folder / INDEX_NAME))
        if is_named and not os.path.lexists(folder / SINGLE_NAME):
            return
        if is_named:
            (folder / INDEX_NAME).unlink()
        _remove(folder, names)


def _parts_by(index: Path) -> set[str]:
    """Return the parts that an index names; none without an index or for a damaged one."""
    try:
        return {name for name in weight_map_in(index).values() if _PART.fullmatch(name)}
    except (FileNotFoundError, CheckpointError):
        return set()


def _remove(folder: Path, names: set[str]) -> None:
    """Remove files that nobody reads any more, as far as that is possible."""
    for name in names:
        with suppress(OSError):
            (folder / name).unlink()
