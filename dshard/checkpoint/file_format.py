"""The safetensors file format: a header of names, dtypes, shapes and offsets, and the values behind it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dshard.errors import CheckpointError
from dshard.layout import ShardLayout

__all__ = [
    "INDEX_NAME",
    "SINGLE_NAME",
    "Entry",
    "dtype_name",
    "dtype_of",
    "file_header",
    "files_of",
    "read_entries",
    "read_shard",
]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_ALIGN_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file.

    Args:
        name: As the file has it.
        file: Where it is.
        dtype: Of the values in the file.
        shape: Of the full tensor.
        start: First byte of its values, from the file's own start.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the full tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """What the format calls a dtype.

    Raises:
        CheckpointError: It has no name for it; says so of tensor `name`.
    """
    if dtype not in _NAMES:
        raise CheckpointError(
            f"{name}: a safetensors file can hold {', '.join(_NAMES.values())}, but this tensor is {dtype}. Convert it "
            "first."
        )
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype | None:
    """The dtype that the format calls so; None if there is none."""
    return _DTYPES.get(name)


def file_header(tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """The header of a file whose values follow in the order of `tensors`, without gaps.

    Args:
        tensors: Name, dtype and shape of each; large elements first, so that every tensor starts at a multiple of its
            element's size, as readers need it.
        metadata: What else to write down.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype_name(name, dtype), "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def files_of(path: Path) -> list[Path]:
    """The files of a model: the one given, or those of a directory by the names that Hugging Face gives them.

    Raises:
        CheckpointError: There are none.
    """
    if path.is_file() and path.suffix != ".json":
        return [path]
    single, index = path / SINGLE_NAME, path if path.suffix == ".json" else path / INDEX_NAME
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointError(
            f"{path}: must be a safetensors file, or a directory with {SINGLE_NAME} or {INDEX_NAME}, but there is "
            "none. Check the path."
        )
    try:
        names = dict.fromkeys(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{index}: must be JSON with a weight_map of tensor names to files, but {type(error).__name__}: {error}. "
            "The index is damaged; use another."
        ) from error
    return [index.parent / str(name) for name in names]


def read_entries(file: Path) -> list[Entry]:
    """What a file holds, from its header alone.

    Raises:
        CheckpointError: It is no such file, or not whole.
    """
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(0)
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"the file has {size} bytes and says that its header has {length}")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        return [_entry(name, facts, file, 8 + length, size) for name, facts in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file}: must be a whole safetensors file, but {error}. It is damaged or still being written; use another."
        ) from error


def _entry(name: str, facts: Any, file: Path, data_start: int, size: int) -> Entry:
    start, stop = facts["data_offsets"]
    if facts["dtype"] not in _DTYPES:
        raise ValueError(f"'{name}' has the dtype {facts['dtype']!r}, which is none of {', '.join(_DTYPES)}")
    entry = Entry(name, file, _DTYPES[facts["dtype"]], tuple(map(int, facts["shape"])), data_start + start)
    if start < 0 or stop - start != entry.num_bytes or data_start + stop > size:
        raise ValueError(
            f"'{name}' (shape {entry.shape}, {entry.dtype}) lies at bytes {start} to {stop} of the {size - data_start} "
            "that there are"
        )
    return entry


def read_shard(mapped: Tensor, entry: Entry, layout: ShardLayout, rank: int) -> Tensor:
    """The values of one rank's shard; no other part of the file is read.

    Args:
        mapped: The bytes of the whole file, mapped into memory, shape (bytes,), uint8.
        entry: The tensor.
        layout: How it is cut.
        rank: Whose shard.

    Returns:
        The shard in the file's dtype, perhaps on the mapped memory itself.
    """
    raw = mapped[entry.start : entry.start + entry.num_bytes]
    dim, extent = layout.dim, layout.extent(rank)
    if dim is not None and raw.numel():
        num_outer = math.prod(entry.shape[:dim])
        raw = raw.view(num_outer, entry.shape[dim], -1)[:, extent.start : extent.stop].reshape(-1)
    if raw.storage_offset() % entry.dtype.itemsize:
        raw = raw.clone()  # other writers may start their values anywhere
    return raw.view(entry.dtype).view(layout.local_shape(rank))
