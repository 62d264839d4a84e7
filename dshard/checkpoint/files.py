"""Pieces of tensors in safetensors files: the description that save, load, parity, merge and check share.

A piece is a box of a tensor. Every rank's file holds the boxes that the rank writes, each as a tensor of its own under
the tensor's name, so that any reader of the format opens it. The manifest says of each file how large it is, and of
each piece where in its tensor it lies and the CRC-32 of every block of its bytes; of what lies ahead of the pieces, the
file's header, it has a CRC-32 too, and so one of every byte.
"""

import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from dshard.checkpoint.disk import closing, read_padded
from dshard.errors import CheckpointError
from dshard.layout import ShardLayout
from dshard.tensor.views import bytes_of

BLOCK_BYTES = 1 << 18  # what one sum is of: a reader of a part of a piece reads at most two of them too many
FILE_NAME = re.compile(r"(shard-\d{5,}-of-\d{5,}\.[0-9a-f]{8}\.safetensors|parity-\d{5,}-of-\d{5,}\.[0-9a-f]{8}\.bin)")
_SUM_DIGITS = 8
_MAX_COUNT = 1 << 62
_WRITE_BYTES = 1 << 26  # that are converted and copied to the host at a time
_SOMEWHERE = 1  # an address for values that have no bytes: the package refuses 0


def _dtypes() -> dict[str, torch.dtype]:
    """Return the dtypes that a file can hold, by the format's names; without pairs of 4-bit values."""
    found = {}
    for dtype in sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str):
        name = str(dtype).removeprefix("torch.")
        with suppress(SafetensorError):
            if not name.startswith("float4"):
                found[TensorSpec(dtype=name, shape=[0], data_ptr=_SOMEWHERE, data_len=0).dtype] = dtype
    return found


DTYPES = _dtypes()
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise a CheckpointError that names a tensor unless a file can hold its dtype."""
    if dtype not in NAMES:
        raise CheckpointError(
            f"{name}: a safetensors file can hold {', '.join(DTYPES)}, but this tensor is {dtype}. Convert it first."
        )


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor.

    Args:
        shape: Of the full tensor.
        offsets: First index along each dim.
        sizes: Number of indices along each dim.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """All of a tensor."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def cut(self, dim: int, num_parts: int, index: int) -> "Box":
        """Return one of the parts into which a dim is cut, as torch.chunk cuts it; maybe an empty one."""
        extent = ShardLayout(self.sizes, dim, num_parts).extent(index)
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + extent.start, extent.size
        return Box(self.shape, tuple(offsets), tuple(sizes))

    def overlap(self, other: "Box") -> "Box | None":
        """Return the intersection of two boxes of a tensor; None if it is empty."""
        low = tuple(map(max, self.offsets, other.offsets))
        ends = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        sizes = tuple(min(a + n, b + m) - start for start, (a, n, b, m) in zip(low, ends, strict=True))
        return Box(self.shape, low, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Return the slices that select this box in a larger one."""
        starts = [a - b for a, b in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor that this rank writes.

    Args:
        name: Of the tensor.
        box: Which one.
        values: Of the box; on any device.
        is_shard: Whether they are memory of a sharded tensor.
    """

    name: str
    box: Box
    values: Tensor
    is_shard: bool = False


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A piece in a file.

    Args:
        dtype: Of its values.
        box: Which box of its tensor it is.
        sums: CRC-32 of each block of `BLOCK_BYTES`, 8 hex digits each, one after the other.
        start: Its first byte in the file.
    """

    dtype: torch.dtype
    box: Box
    sums: str
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return self.box.numel * self.dtype.itemsize

    def is_whole(self, content: memoryview, block: int) -> bool:
        """Return whether some bytes have the sum of one of its blocks."""
        return self.sums[block * _SUM_DIGITS : (block + 1) * _SUM_DIGITS] == sum_of(content)

    def to_json(self) -> dict[str, Any]:
        """Return the object that describes it in the manifest."""
        box = self.box
        return {
            "dtype": NAMES[self.dtype],
            "shape": list(box.sizes),
            "offsets": list(box.offsets),
            "full_shape": list(box.shape),
            "crc32": self.sums,
        }

    @classmethod
    def from_json(cls, name: str, value: Any, start: int) -> "StoredPiece":
        """Read the object of `to_json`; raises ValueError, KeyError or TypeError for anything else."""
        box = Box(*(counts(value[key]) for key in ("full_shape", "offsets", "shape")))
        ends = [offset + size for offset, size in zip(box.offsets, box.sizes, strict=True)]
        is_within = len(ends) == len(box.shape) and all(end <= size for end, size in zip(ends, box.shape, strict=True))
        require(is_within, f"a piece of '{name}' lies beyond its shape {box.shape}: {box.sizes} at {box.offsets}")
        return cls(DTYPES[value["dtype"]], box, value["crc32"], start)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One rank's file: a safetensors file, or a row of parity, which has no header and a single piece.

    Args:
        name: In the checkpoint's folder.
        size: In bytes.
        header_bytes: Number of bytes ahead of the pieces.
        header_sum: CRC-32 of these.
        pieces: By the names of their tensors, in the order in which they lie in the file.
    """

    name: str
    size: int
    header_bytes: int
    header_sum: str
    pieces: Mapping[str, StoredPiece]

    def to_json(self) -> dict[str, Any]:
        """Return the object that describes it in the manifest."""
        tensors = {name: piece.to_json() for name, piece in self.pieces.items()}
        header = {"header_bytes": self.header_bytes, "header_crc32": self.header_sum}
        return {"name": self.name, **header, "tensors": tensors}

    @classmethod
    def from_json(cls, value: Any) -> "StoredFile":
        """Read the object of `to_json`; raises ValueError, KeyError or TypeError for anything else."""
        name, (header_bytes,) = value["name"], counts([value["header_bytes"]])
        require(FILE_NAME.fullmatch(name), f"a file must be named as a save names it, but is {name!r:.80}")
        pieces: dict[str, StoredPiece] = {}
        at = header_bytes
        for key, each in value["tensors"].items():
            pieces[key] = StoredPiece.from_json(key, each, at)
            at += pieces[key].num_bytes
        return cls(name, at, header_bytes, value["header_crc32"], pieces)


def counts(value: Any) -> tuple[int, ...]:
    """Return a list of sizes as a tuple; raises ValueError for anything else."""
    is_list = isinstance(value, list) and all(type(item) is int and 0 <= item < _MAX_COUNT for item in value)
    require(is_list, f"{str(value)[:80]} is no list of sizes")
    return tuple(value)


def require(is_so: object, what: str) -> None:
    """Raise a ValueError unless a condition holds."""
    if not is_so:
        raise ValueError(what)


def sum_of(content: bytes | memoryview) -> str:
    """Return the CRC-32 of some bytes, in hex."""
    return f"{zlib.crc32(content):0{_SUM_DIGITS}x}"


def sums_of(content: memoryview) -> str:
    """Return the CRC-32 of each block of some bytes, in hex, one after the other."""
    return "".join(sum_of(content[begin : begin + BLOCK_BYTES]) for begin in range(0, len(content), BLOCK_BYTES))


def memory_of(raw: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of uint8 on the host."""
    return memoryview(raw.numpy())  # type: ignore[arg-type]


def write_file(path: Path, pieces: Sequence[Piece]) -> StoredFile:
    """Write pieces of different tensors as one safetensors file, and sync it.

    Args:
        path: A new file.
        pieces: What to write. Those on a device are all copied to the host.

    Returns:
        What the manifest is to say of the file.

    Raises:
        OSError: It cannot be written.
    """
    raw, by_name, stored = {p.name: bytes_of(p.values.cpu()) for p in pieces}, {p.name: p for p in pieces}, {}
    specs = {p.name: _spec(p.values.dtype, p.values.shape, raw[p.name].data_ptr()) for p in pieces}
    with closing(_create(path, specs, {"dshard": "a shard of a checkpoint"})) as opened:
        size = os.fstat(opened).st_size
        at = size - sum(map(len, raw.values()))
        header = memoryview(bytearray(at))
        read_padded(opened, header, 0)
        for name in _order_in(path):
            view, piece = memory_of(raw[name]), by_name[name]
            stored[name] = StoredPiece(piece.values.dtype, piece.box, sums_of(view), at)
            at += len(view)
        os.fsync(opened)
    return StoredFile(path.name, size, len(header), sum_of(header), stored)


def _spec(dtype: torch.dtype, shape: Sequence[int], address: int) -> TensorSpec:
    """Describe a tensor to the package, which reads its bytes at this address while it writes."""
    num_bytes = math.prod(shape) * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    return TensorSpec(dtype=name, shape=list(shape), data_ptr=address or _SOMEWHERE, data_len=num_bytes)


def _create(path: Path, specs: dict[str, TensorSpec], metadata: dict[str, str]) -> int:
    """Create a file of these tensors with the mode of the umask, and open it; it is not synced yet."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    with closing(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o666)) as made:
        mode = os.fstat(made).st_mode
    try:
        serialize_file(specs, path, metadata=metadata)  # which puts a file that only its owner may read in the place
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    opened = os.open(path, os.O_RDWR | flags)
    os.fchmod(opened, mode & 0o777)
    return opened


def _order_in(path: Path) -> list[str]:
    """Return the names of a file's tensors in their order in the file, where they follow each other without gaps."""
    with safe_open(path, "np") as opened:
        return list(opened.offset_keys())


@contextmanager
def tensor_file(
    path: Path, described: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> Iterator[Callable[[str, Tensor], None]]:
    """Create a safetensors file from shapes alone, to be filled tensor by tensor with memory for one; sync it then.

    Args:
        path: A new file.
        described: Dtype and shape of each tensor.
        metadata: What else to write down.

    Yields:
        A function that writes a tensor's values to their place, converted to the described dtype.

    Raises:
        OSError: It cannot be written.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in described.items()}
    zeros = np.zeros(max([1, *sizes.values()]), np.uint8)  # pages that nobody writes to take no memory
    specs = {name: _spec(*each, zeros.ctypes.data) for name, each in described.items()}
    with closing(_create(path, specs, dict(metadata))) as opened:
        starts, at = dict[str, int](), os.fstat(opened).st_size - sum(sizes.values())
        for name in _order_in(path):
            starts[name] = at
            at += sizes[name]

        def write(name: str, values: Tensor) -> None:
            at, dtype = starts[name], described[name][0]
            for part in values.reshape(-1).split(max(1, _WRITE_BYTES // values.element_size())):
                rest = memory_of(bytes_of(part.resolve_conj().to(device="cpu", dtype=dtype)))
                while rest:
                    num_written = os.pwrite(opened, rest, at)
                    rest, at = rest[num_written:], at + num_written

        yield write
        os.fsync(opened)
