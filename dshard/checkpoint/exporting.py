"""Write the files that `from_pretrained` reads, from a sharded model or from a checkpoint alone.

The files are made of shapes alone, and each value is put into its place when it is there, so that no more than a tensor
or two of the model are in memory at a time. When all of them are whole they take the place of the model that a folder
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dshard import arguments
from dshard.agreement import check_same
from dshard.checkpoint.agreement import group_of, together
from dshard.checkpoint.contents import left_out_of
from dshard.checkpoint.disk import locked, make_folder, partial_name, sync_folder, write_whole
from dshard.checkpoint.files import Box, TensorFile, check_dtype
from dshard.checkpoint.folders import find
from dshard.checkpoint.pretrained import INDEX_NAME, SINGLE_NAME, weight_map_in
from dshard.checkpoint.reading import Reader
from dshard.errors import CheckpointError
from dshard.gathering import full_values, refuse_meta
from dshard.tensor import ShardedTensor

_DEFAULT_SHARD_BYTES = 5_000_000_000
_WAY = "Leave it out for 5 GB."
_PART = re.compile(r"model-([0-9a-f]{16}-)?\d{5}-of-\d{5}\.safetensors")
_TOKEN_BYTES = 8
_PREFIX = "model."  # of a model's tensors in a checkpoint


Described = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # of a file: dtype and full shape of each tensor, by name


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
    try:
        for number, part in enumerate(files.parts):
            values = full_values([(name, state[name]) for name in part])
            write = partial(files.write, number) if group.world_rank == 0 else None
            together(group, partial(_gather, values, write), what)
        together(group, lambda: files.publish() if group.world_rank == 0 else None, what)
    finally:
        if group.world_rank == 0:
            files.close()


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
    try:
        with Reader(folder, manifest) as reader:
            for number, part in enumerate(files.parts):
                files.write(number, ((name, reader.read(keys[name], Box.whole(part[name][1]))) for name in part))
        files.publish()
    finally:
        files.close()


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


class _Files:
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
        file = TensorFile(self._drafts[number], part, {**self._metadata, **notes})
        try:
            for name, full in values:
                file.write(name, full)
                del full
        finally:
            file.close()

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

    def close(self) -> None:
        """Remove files that were not published."""
        for path in self._drafts:
            with suppress(OSError):
                path.unlink()


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
