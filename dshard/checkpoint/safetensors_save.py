"""Write a sharded model as safetensors files, as Hugging Face's libraries read them.

The format needs no library to be written: rank 0 writes a header from shapes alone, and then each value as it is
gathered.
"""

import json
import os
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from dshard.checkpoint.agreement import agree, group_of, together
from dshard.checkpoint.file_format import INDEX_NAME, SINGLE_NAME, file_header
from dshard.errors import CheckpointError
from dshard.runtime.full_values import full_values, refuse_meta
from dshard.tensor import ShardedTensor

__all__ = ["save_safetensors"]

_DEFAULT_SHARD_BYTES = 5_000_000_000
_WRITE_BYTES = 1 << 26  # that are converted and copied to the host at a time
_OF_SEVERAL = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


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
    from shapes. Files are written under other names and renamed when all of them are whole. A single file thereby
    replaces an older one at once; of several the index comes last and an older one goes first, so that no index names
    files of two saves.

    A tied weight is written once, under the name that Hugging Face's models expect (`_tied_weights_keys` of the module
    names the others), or its first; the metadata of the file notes the others, as `safetensors.torch.save_model` does.

    Args:
        module: A sharded module.
        path_or_dir: A file name that ends in `.safetensors`, for one file of any size. Else a directory, which gets
            `model.safetensors`, or `model-00001-of-0000N.safetensors` and an index. It must be there for rank 0 alone.
        max_shard_bytes: Most bytes of values in one file of a directory; a larger tensor gets a file of its own.
        dtype: For floating-point values; by default their own.
        metadata: What else to write down in each file.

    Raises:
        CheckpointError: A file cannot be written, or a tensor cannot be in one. On every rank alike; what was there
            before is left as it was, unless the last renaming failed.
        StateError: A tensor is on the meta device. On every rank alike.

    Communicates:
        An all-gather per tensor that is cut, and an all-reduce of 8 bytes per file.
    """
    group = group_of(module)
    state = module.state_dict(keep_vars=True)
    refuse_meta("save_safetensors", [(name, t) for name, t in state.items() if isinstance(t, Tensor)])
    target, files = Path(path_or_dir), list[_File]()
    what = f"{target}: saving safetensors needs a place that can be written"

    def prepare() -> None:
        items, tied = _items_of(module, state, dtype)
        _check_arguments(max_shard_bytes, metadata)
        files.extend(_planned(target, items, tied, max_shard_bytes, metadata or {}))
        for file in files:
            file.header  # noqa: B018 - raises where a dtype has no name
        if group.world_rank == 0:
            files[0].path.parent.mkdir(parents=True, exist_ok=True)

    together(group, prepare, what)
    token = uuid.uuid4().hex[:8]
    partial = {file.path: file.path.with_name(f".{file.path.name}.{token}.partial") for file in files}
    try:
        for file in files:
            writer = _Writer(file, partial[file.path]) if group.world_rank == 0 else None
            for name, full in full_values([(item.name, item.tensor) for item in file.items]):
                if writer is not None:
                    writer.write(name, full)
                del full
            agree(group, writer.close() if writer is not None else None, what)
        together(group, lambda: _publish(target, files, partial) if group.world_rank == 0 else None, what)
    finally:
        for path in partial.values() if group.world_rank == 0 else ():
            path.unlink(missing_ok=True)


def _check_arguments(max_shard_bytes: Any, metadata: Any) -> None:
    if not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise CheckpointError(
            f"save_safetensors: max_shard_bytes must be a positive number of bytes, but it is {max_shard_bytes!r}. "
            "Leave it out for 5 GB."
        )
    wrong = [key for key, value in (metadata or {}).items() if not isinstance(key, str) or not isinstance(value, str)]
    if wrong:
        raise CheckpointError(
            f"save_safetensors: metadata must be text by names, but {wrong[0]!r} is {metadata[wrong[0]]!r}. Convert it "
            "with json.dumps."
        )


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
    """Equal for names of one tensor."""
    if isinstance(value, ShardedTensor):
        return name if value.is_view else id(value._cell)
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
        self._opened: IO[bytes] | None = None
        try:
            self._opened = path.open("wb")
            self._opened.write(file.header)
        except Exception as error:
            self._error = error

    def write(self, name: str, full: Tensor) -> None:
        """Write the next value."""
        if self._error is not None or self._opened is None:
            return
        try:
            dtype = self._dtypes[name]
            for chunk in full.reshape(-1).split(max(1, _WRITE_BYTES // full.element_size())):
                host = chunk.resolve_conj().to(device="cpu", dtype=dtype).contiguous()
                if host.numel():
                    self._opened.write(memoryview(host.view(torch.uint8).numpy()))
        except Exception as error:
            self._error = error

    def close(self) -> Exception | None:
        """End the file, and give the first error there was."""
        if self._opened is not None:
            try:
                with self._opened:
                    if self._error is None:
                        self._opened.flush()
                        os.fsync(self._opened.fileno())
            except Exception as error:
                self._error = self._error or error
        return self._error


def _publish(target: Path, files: Sequence[_File], partial: Mapping[Path, Path]) -> None:
    """Put whole files in their places."""
    if files[0].path == target:
        partial[target].rename(target)
        return
    if len(files) > 1:
        (target / INDEX_NAME).unlink(missing_ok=True)
        (target / SINGLE_NAME).unlink(missing_ok=True)  # which readers would prefer
    for file in files:
        partial[file.path].rename(file.path)
    if len(files) == 1:
        (target / INDEX_NAME).unlink(missing_ok=True)
    for old in target.iterdir():
        if _OF_SEVERAL.fullmatch(old.name) and old not in partial:
            old.unlink()
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(item.num_bytes for file in files for item in file.items)},
            "weight_map": dict(sorted((item.name, file.path.name) for file in files for item in file.items)),
        }
        unfinished = target / f".{INDEX_NAME}.partial"
        unfinished.write_text(json.dumps(index, indent=2) + "\n")
        unfinished.rename(target / INDEX_NAME)
