"""What a checkpoint stores: files, tensors and the boxes that they are cut into; as JSON, checked on the way back."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dshard.checkpoint.file_format import DTYPES, dtype_name

BLOCK_BYTES = 1 << 18  # what one sum is of: a reader of a part of a chunk reads at most two of them too many
FILE_NAME = re.compile(r"shard-\d{5,}-of-\d{5,}\.[0-9a-f]{8}\.safetensors")


class DamageError(ValueError):
    """What is wrong with a manifest, for `read_manifest` to say of which file."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One rank's file.

    Args:
        name: In the checkpoint's folder.
        size: In bytes.
        data_start: Bytes ahead of the first value.
        header_sum: SHA-256 of these, in hex.
        sums_start: First byte of the sums of all blocks of all chunks, 4 bytes each.
    """

    name: str
    size: int
    data_start: int
    header_sum: str
    sums_start: int

    def to_json(self) -> list[Any]:
        """The list that stands for it in the manifest."""
        return [self.name, self.size, self.data_start, self.header_sum, self.sums_start]

    @classmethod
    def from_json(cls, value: Any) -> "StoredFile":
        """The inverse of `to_json`.

        Raises:
            DamageError: It is no such thing, or points elsewhere.
        """
        name, size, data_start, header_sum, sums_start = as_list(value, 5)
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
            raise DamageError(f"a file must be named as a shard is, in this folder, but one is {name!r}")
        if not are_counts(size, data_start, sums_start) or not data_start <= sums_start <= size:
            raise DamageError(f"'{name}' must begin with its header and end with its sums, but has {value[1:]}")
        if not isinstance(header_sum, str) or not re.fullmatch(r"[0-9a-f]{64}", header_sum):
            raise DamageError(f"'{name}' must have the SHA-256 of its header, but has {header_sum!r}")
        return cls(name, size, data_start, header_sum, sums_start)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and where it is.

    Args:
        file: Number of its file.
        offsets: First index along each dim.
        sizes: Number of indices along each dim.
        start: First byte, from the file's own start.
        first_sum: Number of the sum of its first block.
        checksum: CRC-32 of the sums of its blocks.
    """

    file: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    first_sum: int
    checksum: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def to_json(self) -> list[Any]:
        """The list that stands for it in the manifest."""
        return [self.file, list(self.offsets), list(self.sizes), self.start, self.first_sum, self.checksum]

    @classmethod
    def from_json(cls, value: Any) -> "Chunk":
        """The inverse of `to_json`; raises DamageError for what is no such thing."""
        file, offsets, sizes, start, first_sum, checksum = as_list(value, 6)
        if not are_counts(file, start, first_sum, checksum, *as_list(offsets), *as_list(sizes)):
            raise DamageError(f"a chunk must be counts and lists of counts, but is {value}")
        return cls(file, tuple(offsets), tuple(sizes), start, first_sum, checksum)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Args:
        dtype: Of its values.
        shape: Of the full tensor.
        chunks: Boxes that cover it once.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def num_bytes(self, chunk: Chunk) -> int:
        """Bytes of one of its chunks."""
        return chunk.numel * self.dtype.itemsize

    def to_json(self) -> list[Any]:
        """The list that stands for it in the manifest."""
        return [dtype_name("checkpoint", self.dtype), list(self.shape), [chunk.to_json() for chunk in self.chunks]]

    @classmethod
    def from_json(cls, value: Any) -> "StoredTensor":
        """The inverse of `to_json`.

        Raises:
            DamageError: It is no such thing, or its chunks do not cover it once.
        """
        name, shape, chunks = as_list(value, 3)
        if not isinstance(name, str) or name not in DTYPES:
            raise DamageError(f"a dtype must be one that safetensors has, but is {name!r}")
        if not are_counts(*as_list(shape)):
            raise DamageError(f"a shape must be a list of counts, but is {shape}")
        found = cls(DTYPES[name], tuple(shape), tuple(Chunk.from_json(chunk) for chunk in as_list(chunks)))
        _check_cover(found)
        return found


def _check_cover(tensor: StoredTensor) -> None:
    """Raise `DamageError` unless a tensor's chunks cover it once."""
    shape, chunks = tensor.shape, tensor.chunks
    for chunk in chunks:
        is_box = len(chunk.offsets) == len(chunk.sizes) == len(shape) and chunk.numel
        if not is_box or any(o + s > d for o, s, d in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            raise DamageError(f"chunks must lie in the shape {shape}, but one has {chunk.sizes} at {chunk.offsets}")
    covered, needed = sum(chunk.numel for chunk in chunks), math.prod(shape)
    if covered != needed:
        raise DamageError(f"chunks must cover the {needed} elements of shape {shape}, but have {covered}")
    if len(chunks) > 1:
        low = np.array([chunk.offsets for chunk in chunks], dtype=np.int64)
        high = low + np.array([chunk.sizes for chunk in chunks], dtype=np.int64)
        for i in range(len(chunks) - 1):
            if np.any(np.all((low[i] < high[i + 1 :]) & (low[i + 1 :] < high[i]), axis=1)):
                raise DamageError(f"chunks must not overlap, but another lies on the one at {chunks[i].offsets}")


def num_blocks(num_bytes: int) -> int:
    """The number of blocks of a chunk."""
    return -(-num_bytes // BLOCK_BYTES)


def as_list(value: Any, length: int | None = None) -> Sequence[Any]:
    """A list of JSON, of some length; raises DamageError for anything else."""
    if not isinstance(value, list) or length not in (None, len(value)):
        raise DamageError(
            f"a list{'' if length is None else f' of {length}'} is expected, but there is {str(value)[:80]}"
        )
    return value


def are_counts(*values: Any) -> bool:
    """Whether these are ints, from 0 on, of a size that files and tensors can have."""
    return all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def own_name(rank: int, name: str) -> str:
    """What a tensor is stored under of which every rank has values of its own."""
    return f"rank-{rank}/{name}"
