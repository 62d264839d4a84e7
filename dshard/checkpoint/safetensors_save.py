"""Write a sharded model as safetensors files, as Hugging Face's libraries read them.

The format needs no library to be written: rank 0 writes a header from shapes alone, and then each value as it is
gathered.
"""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dshard.agreement.same import check_same
from dshard.arguments import read
from dshard.checkpoint.agreement import agree, group_of, together
from dshard.checkpoint.disk import create, make_folder, partial_name, write_all
from dshard.checkpoint.file_format import file_header
from dshard.checkpoint.model_files import INDEX_NAME, SINGLE_NAME
from dshard.checkpoint.parts import memory_of
from dshard.checkpoint.publishing import check_room, replace_by_one, replace_by_several, replace_file
from dshard.errors import CheckpointError
from dshard.gathering.full_values import full_values, refuse_meta
from dshard.tensor import ShardedTensor
from dshard.tensor.strides import bytes_of

_DEFAULT_SHARD_BYTES = 5_000_000_000
_WRITE_BYTES = 1 << 26  # that are converted and copied to the host at a time


@dataclass(frozen=True, slots=True)
class _Item:
    """One tensor as it will be in a file."""

    name: str
    tensor: Tensor
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _File:
    """One file of the model, its items with large elements first."""

    path: Path
    items: tuple[_Item, ...]
    metadata: dict[str, str]

    @property
    def header(self) -> bytes:
        return file_header([(i.name, i.dtype, i.tensor.shape) for i in self.items], self.metadata)


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
    tensor or two are in memory at a time: values are gathered one by one and written behind a header that was made
    from shapes. Files are written under names that nobody reads, synced, and then take their places by one step:
    whenever a process dies, readers find the older model or the new one, whole. Of two saves at once one is there
    afterwards.

    A directory holds one model, which is replaced: `model.safetensors`, or the index and the parts that it names. No
    other file is removed or written to. A save that is killed may leave files of its own: hidden ones that end in
    `.partial`, or parts that no index names.

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
    read("save_safetensors", {"module": module})
    group = group_of(module)
    given: dict[str, Any] = {
        "path_or_dir": path_or_dir,
        "max_shard_bytes": max_shard_bytes,
        "dtype": dtype,
        "metadata": metadata,
    }
    state = module.state_dict(keep_vars=True)
    refuse_meta("save_safetensors", [(name, t) for name, t in state.items() if isinstance(t, Tensor)])
    files = list[_File]()
    what = f"{path_or_dir}: saving safetensors needs a place that can be written"

    def prepare() -> None:
        given.update(read("save_safetensors", given))
        items, tied = _items_of(module, state, dtype)
        target = given["target"] = Path(path_or_dir)
        files.extend(_planned(target, items, tied, given["max_shard_bytes"], metadata or {}))
        for file in files:
            file.header  # noqa: B018 - raises where a dtype has no name
        if group.world_rank == 0:
            make_folder(files[0].path.parent)
            for path in [target] if files[0].path == target else [target / SINGLE_NAME, target / INDEX_NAME]:
                check_room(path)

    together(group, prepare, what)
    target = given["target"]
    facts = {name: repr(given[name]) for name in ("max_shard_bytes", "dtype", "metadata")}
    names = [item.name for file in files for item in file.items]
    check_same("save_safetensors", {"path_or_dir": str(target), **facts, "module": names}, group)
    drafts = {file.path: partial_name(file.path) for file in files}
    try:
        for file in files:
            writer = _Writer(file, drafts[file.path]) if group.world_rank == 0 else None
            for name, full in full_values([(item.name, item.tensor) for item in file.items]):
                if writer is not None:
                    writer.write(name, full)
                del full
            agree(group, writer.close() if writer is not None else None, what)
        together(group, lambda: _publish(target, files, drafts) if group.world_rank == 0 else None, what)
    finally:
        for path in drafts.values() if group.world_rank == 0 else ():
            with suppress(OSError):
                path.unlink()


def _items_of(
    module: nn.Module, state: Mapping[str, Any], dtype: torch.dtype | None
) -> tuple[list[_Item], dict[str, str]]:
    """What to write, ties once; and the names that are left out, each with the one that stands for it."""
    by_value: dict[Any, list[str]] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name}: a safetensors file holds tensors alone, but this extra state is a {type(value).__name__}. "
                "Use dshard.checkpoint.save, or remove it."
            )
        by_value.setdefault(_identity(name, value), []).append(name)
    left_out = _left_out_by_the_model(module, state)
    items, tied = [], {}
    for names in by_value.values():
        kept = next((name for name in names if name not in left_out), names[0])
        tied.update({name: kept for name in names if name != kept})
        value = state[kept]
        items.append(_Item(kept, value, dtype if dtype is not None and value.is_floating_point() else value.dtype))
    return items, tied


def _identity(name: str, value: Tensor) -> Any:
    """A key that is equal for all names of one tensor."""
    if isinstance(value, ShardedTensor):
        return name if value.is_view else id(value.shard_storage)
    if not value.numel() or type(value).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        return id(value)
    return value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride(), value.dtype


def _left_out_by_the_model(module: nn.Module, names: Collection[str]) -> set[str]:
    """Names of tied weights that Hugging Face's class of this model ties again after loading."""
    patterns: list[str] = list(getattr(module, "_tied_weights_keys", None) or ())
    found: set[str] = set()
    for pattern in patterns:
        with suppress(re.error):
            found.update(name for name in names if name == pattern or re.search(pattern, name))
    return found


def _planned(
    target: Path, items: Sequence[_Item], tied: Mapping[str, str], max_bytes: int, metadata: Mapping[str, str]
) -> list[_File]:
    """Cut the items into files, in their order."""
    is_file = target.suffix == ".safetensors"
    parts: list[list[_Item]] = [[]]
    size = 0
    for item in items:
        if not is_file and parts[-1] and size + item.num_bytes > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(item)
        size += item.num_bytes
    if is_file:
        paths = [target]
    elif len(parts) == 1:
        paths = [target / SINGLE_NAME]
    else:
        paths = [target / f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    files = []
    for path, part in zip(paths, parts, strict=True):
        here = {item.name for item in part}
        notes = {name: kept for name, kept in tied.items() if kept in here}
        part.sort(key=lambda item: -item.dtype.itemsize)
        files.append(_File(path, tuple(part), {"format": "pt", **metadata, **notes}))
    return files


class _Writer:
    """Writes one file, value by value; after an error it takes the rest in and does nothing, so that ranks keep step.

    Args:
        file: What to write.
        path: Where.
    """

    def __init__(self, file: _File, path: Path) -> None:
        self._dtypes = {item.name: item.dtype for item in file.items}
        self._error: Exception | None = None
        self._stack = ExitStack()
        try:
            self._opened = self._stack.enter_context(create(path))
            write_all(self._opened, file.header)
        except Exception as error:
            self._error = error

    def write(self, name: str, full: Tensor) -> None:
        """Write the next value."""
        if self._error is not None:
            return
        try:
            dtype = self._dtypes[name]
            for chunk in full.reshape(-1).split(max(1, _WRITE_BYTES // full.element_size())):
                host = chunk.resolve_conj().to(device="cpu", dtype=dtype).contiguous()
                if host.numel():
                    write_all(self._opened, memory_of(bytes_of(host)))
        except Exception as error:
            self._error = error

    def close(self) -> Exception | None:
        """End the file, and give the first error there was."""
        try:
            self._stack.close()
        except Exception as error:
            self._error = self._error or error
        return self._error


def _publish(target: Path, files: Sequence[_File], drafts: Mapping[Path, Path]) -> None:
    """Put whole files in their places."""
    if files[0].path == target:
        replace_file(drafts[target], target)
    elif len(files) == 1:
        replace_by_one(target, drafts[files[0].path])
    else:
        replace_by_several(
            target,
            {path.name: draft for path, draft in drafts.items()},
            {item.name: file.path.name for file in files for item in file.items},
            sum(item.num_bytes for file in files for item in file.items),
        )
