"""The safetensors file format: a header of names, dtypes, shapes and offsets, and the values behind it.

What the format's own reader refuses is refused here too, and names that are there twice besides: a file that is read
means one thing.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dshard.checkpoint.disk import closing, open_regular, read_exactly
from dshard.errors import CheckpointError

_ALIGN_BYTES = 8
_LENGTH_BYTES = 8
_METADATA = "__metadata__"  # what the format calls it in a header
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_INT = 2**63 - 1  # of a size or an offset
_MAX_SHOWN = 100  # letters of what a file says
_FACTS = {"dtype", "shape", "data_offsets"}
DTYPES = {
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
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class FileVersion:
    """One file as it was when it was opened.

    Args:
        path: Where it is.
        identity: Equal for as long as nobody has written to the file, or put another in its place.
        num_bytes: Its size.
    """

    path: Path
    identity: tuple[int, ...]
    num_bytes: int

    @classmethod
    def opened(cls, path: Path, opened: int) -> "FileVersion":
        """The file behind a file descriptor, as it is now."""
        found = os.fstat(opened)
        return cls(path, (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size), found.st_size)


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


def shown(value: Any) -> str:
    """What a file says, for an error: it may be long, and anything."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


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


def file_header(tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """The header of a file whose values follow in the order of `tensors`, without gaps.

    Args:
        tensors: Name, dtype and shape of each; large elements first, so that every tensor starts at a multiple of its
            element's size, as readers need it.
        metadata: What else to write down.

    Raises:
        CheckpointError: A dtype or a name cannot be in it, or there are too many.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        if name == _METADATA:
            raise CheckpointError(f"{name}: must be no name of a tensor, but it is one. Rename it.")
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype_name(name, dtype), "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    if len(text) > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"save_safetensors: the header of a file can have {_MAX_HEADER_BYTES} bytes, but this one has {len(text)}. "
            "Pass a smaller max_shard_bytes, or less metadata."
        )
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def parse_json(text: bytes) -> Any:
    """A JSON value that means one thing to every reader: UTF-8, no name twice, no NaN, no number without bounds.

    Raises:
        ValueError: It is none.
    """

    def integer(digits: str) -> int:
        if len(digits) > len(str(_MAX_INT)) + 1 or digits == "-0":
            raise ValueError(f"{digits[:20]}... is no number that it can hold")
        return int(digits)

    def real(digits: str) -> float:
        if math.isinf(value := float(digits)):
            raise ValueError(f"{digits[:20]} is no finite number")
        return value

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is no number")

    def named(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ValueError(f"{shown(name)} is there twice")
            found[name] = value
        return found

    try:
        found = json.loads(
            text.decode(), parse_int=integer, parse_float=real, parse_constant=constant, object_pairs_hook=named
        )
        json.dumps(found, ensure_ascii=False).encode()  # halves of a character are no text
    except RecursionError:
        raise ValueError("its values lie too deep within each other") from None
    return found


def read_text(file: Path, max_bytes: int, *, follow: bool = True) -> tuple[FileVersion, bytes]:
    """A small file's bytes.

    Args:
        file: Where it is.
        max_bytes: Most bytes that it may have.
        follow: Whether a link in its place is followed.

    Raises:
        CheckpointError: It is no file, or a larger one.
        OSError: It cannot be read.
    """
    with closing(open_regular(file, follow=follow)) as opened:
        source = FileVersion.opened(file, opened)
        if source.num_bytes > max_bytes:
            raise CheckpointError(
                f"{file}: must have at most {max_bytes} bytes, but it has {source.num_bytes}. It is damaged; use "
                "another."
            )
        text = bytearray(source.num_bytes)
        _read(file, opened, memoryview(text), 0)
        return source, bytes(text)


def _read(file: Path, opened: int, into: memoryview, offset: int) -> None:
    try:
        read_exactly(opened, into, offset)
    except EOFError as error:
        raise CheckpointError(f"{file}: must not change while it is read, but {error}. Load it again.") from None


def read_entries(file: Path) -> tuple[FileVersion, list[Entry]]:
    """What a file holds, from its header alone.

    Raises:
        CheckpointError: It is no such file, or not whole.
        OSError: It cannot be read.
    """
    try:
        with closing(open_regular(file, follow=True)) as opened:
            source = FileVersion.opened(file, opened)
            prefix = bytearray(min(_LENGTH_BYTES, source.num_bytes))
            _read(file, opened, memoryview(prefix), 0)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < _LENGTH_BYTES or length > min(source.num_bytes - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise ValueError(f"the file has {source.num_bytes} bytes and says that its header has {length}")
            text = bytearray(length)
            _read(file, opened, memoryview(text), _LENGTH_BYTES)
        if not text.startswith(b"{"):
            raise ValueError("its header does not begin with '{'")
        return source, _entries(parse_json(bytes(text)), source, _LENGTH_BYTES + length)
    except ValueError as error:
        raise CheckpointError(
            f"{file}: must be a whole safetensors file, but {error}. It is damaged or still being written; use another."
        ) from error


def _entries(header: dict[str, Any], source: FileVersion, data_start: int) -> list[Entry]:
    """The tensors of a header, which cover the bytes behind it, each once."""
    metadata = header.pop(_METADATA, None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise ValueError("its __metadata__ is not text by names")
    found = [_entry(name, facts, source.path, data_start) for name, facts in header.items()]
    stop = data_start
    for entry in sorted(found, key=lambda entry: (entry.start, entry.num_bytes)):
        if entry.start != stop:
            what = "other values lie there too" if entry.start < stop else "no values lie before it"
            raise ValueError(
                f"{shown(entry.name)} starts at byte {entry.start - data_start} of the values where "
                f"{stop - data_start} is next: {what}"
            )
        stop += entry.num_bytes
    if stop != source.num_bytes:
        raise ValueError(f"its values have {stop - data_start} bytes and the file {source.num_bytes - data_start}")
    return found


def _entry(name: str, facts: Any, file: Path, data_start: int) -> Entry:
    if not isinstance(facts, dict) or facts.keys() != _FACTS:
        raise ValueError(f"{shown(name)} does not have {', '.join(sorted(_FACTS))}, and no more")
    dtype, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{shown(name)} has the dtype {shown(dtype)}, which is none of {', '.join(DTYPES)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{shown(name)} has a shape {shown(shape)} and offsets {shown(offsets)} that are no sizes")
    size = DTYPES[dtype].itemsize
    for each in shape:
        size *= each
        if size > _MAX_INT:
            raise ValueError(f"{shown(name)} has a shape {shown(shape)} that no memory can hold")
    if offsets[1] - offsets[0] != size:
        raise ValueError(f"{shown(name)} (shape {shown(shape)}, {dtype}) lies at bytes {offsets[0]} to {offsets[1]}")
    return Entry(name, file, DTYPES[dtype], tuple(shape), data_start + offsets[0])


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each <= _MAX_INT for each in value)
