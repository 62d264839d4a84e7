"""One rank's file: a safetensors file of its chunks, with the sums of their blocks at its end.

Whoever reads a part of a chunk reads the sums of the chunk, which the manifest has a sum of, and the blocks that the
part lies in: nothing that was read is believed before it was compared.
"""

import ctypes
import hashlib
import json
import math
import mmap
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dshard.checkpoint.disk import create, open_regular, read_exactly, write_all
from dshard.checkpoint.file_format import dtype_name, file_header
from dshard.checkpoint.manifest import Manifest
from dshard.checkpoint.parity import Stripes, group_around
from dshard.checkpoint.parts import memory_of
from dshard.checkpoint.stored import BLOCK_BYTES, Chunk, StoredFile, StoredTensor, num_blocks
from dshard.errors import CheckpointError
from dshard.tensor.strides import bytes_of

_SUMS = "dshard.block_sums"
_SUM_BYTES = 4
_REMEDY = "use another checkpoint"
_HUGE_PAGE = 1 << 21
_COPY_BYTES = 1 << 25  # that are brought to the host, or verified, at a time; a multiple of a block
_READ_BYTES = 1 << 22  # at a time; a multiple of a block


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor that this rank writes.

    Args:
        name: Of the tensor.
        shape: Of the full tensor.
        offsets: First index along each dim.
        values: Of the box; on any device.
        is_shard: Whether they are memory of a sharded tensor.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor
    is_shard: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the box."""
        return self.values.numel() * self.values.dtype.itemsize


def write_shard_file(path: Path, pieces: Sequence[Piece], index: int) -> tuple[StoredFile, list[Chunk]]:
    """Write pieces, each of a tensor of its own name; the file is synced.

    Args:
        path: A new file.
        pieces: None of them empty; those of large elements first.
        index: Number of the file.

    Returns:
        What the manifest is to say of the file, and of each piece.

    Raises:
        OSError: It cannot be written.
    """
    total_blocks = sum(num_blocks(piece.num_bytes) for piece in pieces)
    described = [(piece.name, piece.values.dtype, tuple(piece.values.shape)) for piece in pieces]
    header = file_header([*described, (_SUMS, torch.uint32, (total_blocks,))], {"dshard": "a shard of a checkpoint"})
    chunks, sums, start = [], bytearray(), len(header)
    with create(path) as opened:
        write_all(opened, header)
        for piece in pieces:
            own = bytearray()
            for part in host_bytes(piece.values):
                view = memory_of(part)
                for begin in range(0, len(view), BLOCK_BYTES):
                    own += zlib.crc32(view[begin : begin + BLOCK_BYTES]).to_bytes(_SUM_BYTES, "little")
                write_all(opened, view)
            first_sum = len(sums) // _SUM_BYTES
            sizes = tuple(piece.values.shape)
            chunks.append(Chunk(index, piece.offsets, sizes, start, first_sum, zlib.crc32(own)))
            sums += own
            start += piece.num_bytes
        write_all(opened, bytes(sums))
    return StoredFile(path.name, start + len(sums), len(header), hashlib.sha256(header).hexdigest(), start), chunks


def host_bytes(values: Tensor) -> Iterator[Tensor]:
    """A tensor's bytes on the host, a bounded number of them at a time, shape (bytes,), uint8."""
    raw = bytes_of(values)
    for part in raw.split(_COPY_BYTES):
        yield part if part.device.type == "cpu" else part.cpu()


class ShardReader:
    """Reads boxes of tensors from the files of a checkpoint, and compares every byte with its sum.

    With parity, what is missing or damaged in one file is made from the others, and compared in the same way.

    Args:
        folder: Of the checkpoint.
        manifest: What it says of itself.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._opened: dict[str, int | CheckpointError] = {}
        self._entries: dict[int, dict[str, Any]] = {}
        self.rebuilt: set[str] = set()  # names of files that parity stood in for

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *raised: object) -> None:
        for opened in self._opened.values():
            if isinstance(opened, int):
                os.close(opened)
        self._opened.clear()

    def read(self, name: str, stored: StoredTensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The values of a box, on the host.

        Raises:
            CheckpointError: A file is missing, cut short or damaged; names it and the tensor.
        """
        out = _empty(tuple(sizes), stored.dtype)
        if not out.numel():
            return out
        for chunk in stored.chunks:
            low = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
            ends = zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
            high = [min(a + n, b + m) for a, n, b, m in ends]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            if tuple(offsets) == chunk.offsets and tuple(sizes) == chunk.sizes:
                self._read_range(name, stored, chunk, 0, out)
                break
            there = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))
            here = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets, strict=True))
            out[there] = self._read_part(name, stored, chunk, here)
        return out

    def verify(self, name: str, stored: StoredTensor, chunk: Chunk) -> None:
        """Read a whole chunk, and keep nothing; raises as `read`."""
        size = stored.num_bytes(chunk)
        for begin in range(0, size, _COPY_BYTES):
            buffer = torch.empty(min(_COPY_BYTES, size - begin), dtype=torch.uint8, device="cpu")
            self._read_range(name, stored, chunk, begin, buffer)

    def header(self, index: int) -> bytes:
        """What a file has ahead of its values.

        Raises:
            CheckpointError: It is another than the one that was saved.
        """
        file = self._manifest.files[index]
        header = memoryview(bytearray(file.data_start))

        def is_whole() -> bool:
            return hashlib.sha256(header).hexdigest() == file.header_sum

        self._obtain(index, header, 0, is_whole, "its header must be the one that was saved, but it is another")
        return bytes(header)

    def rebuild(self, index: int, target: memoryview, offset: int) -> None:
        """Fill a buffer with what a file had from an offset on, out of the others of its group and the rows.

        Raises:
            CheckpointError: One of those is missing, too.
        """
        group = group_around(index, len(self._manifest.files))

        def read_row(member: int, into: memoryview, at: int) -> None:
            row = self._manifest.rows[group.start + member]
            self._fill(row.name, row.size, into, at)

        read = partial(self._read_member, group.start)
        self._stripes(group).rebuild(index - group.start, read, read_row, target, offset)

    def row(self, index: int, target: memoryview, offset: int) -> None:
        """Fill a buffer with what a row of parity had from an offset on, out of the files of its group.

        Raises:
            CheckpointError: One of those is missing.
        """
        group = group_around(index, len(self._manifest.files))
        target[:] = bytes(len(target))
        read = partial(self._read_member, group.start)
        self._stripes(group).row_bytes(index - group.start, read, target, offset)

    def _stripes(self, group: range) -> Stripes:
        return Stripes(tuple(self._manifest.files[i].size for i in group))

    def _read_member(self, start: int, member: int, into: memoryview, at: int) -> None:
        """Bytes of a file of a group, and zeros beyond its end."""
        file = self._manifest.files[start + member]
        inside = max(0, min(len(into), file.size - at))
        self._fill(file.name, file.size, into[:inside], at)
        into[inside:] = bytes(len(into) - inside)

    def _read_part(self, name: str, stored: StoredTensor, chunk: Chunk, box: tuple[slice, ...]) -> Tensor:
        """A box of a chunk: the bytes from its first to its last element, of which the box is a view."""
        strides = [math.prod(chunk.sizes[dim + 1 :]) for dim in range(len(chunk.sizes))]
        first = sum(part.start * stride for part, stride in zip(box, strides, strict=True))
        last = sum((part.stop - 1) * stride for part, stride in zip(box, strides, strict=True))
        values = torch.empty(last - first + 1, dtype=stored.dtype, device="cpu")
        self._read_range(name, stored, chunk, first * stored.dtype.itemsize, values)
        return values.as_strided([part.stop - part.start for part in box], strides)

    def _read_range(self, name: str, stored: StoredTensor, chunk: Chunk, begin: int, into: Tensor) -> None:
        """Fill a contiguous tensor with a chunk's bytes from `begin` on."""
        view = memory_of(bytes_of(into))
        size, end = stored.num_bytes(chunk), begin + len(view)
        self._check_entry(name, stored, chunk)
        sums = self._sums(name, chunk, num_blocks(size))
        last = min(num_blocks(end) * BLOCK_BYTES, size)
        for start in range(begin // BLOCK_BYTES * BLOCK_BYTES, last, _READ_BYTES):
            stop = min(start + _READ_BYTES, last)
            is_inside = begin <= start and stop <= end
            target = view[start - begin : stop - begin] if is_inside else memoryview(bytearray(stop - start))
            self._read_blocks(name, chunk, sums[start // BLOCK_BYTES * _SUM_BYTES :], start, target)
            if not is_inside:
                low, high = max(begin, start), min(end, stop)
                view[low - begin : high - begin] = target[low - start : high - start]

    def _read_blocks(self, name: str, chunk: Chunk, sums: memoryview, start: int, target: memoryview) -> None:
        """Fill a buffer with blocks of a chunk by one read, and each that is not as it was saved by one of its own."""
        file = self._manifest.files[chunk.file]
        is_read = False
        with suppress(CheckpointError):  # the first of the blocks raises it, unless parity stands in
            self._fill(file.name, file.size, target, chunk.start + start)
            is_read = True
        for begin in range(0, len(target), BLOCK_BYTES):
            block, low = target[begin : begin + BLOCK_BYTES], chunk.start + start + begin
            sum_start = begin // BLOCK_BYTES * _SUM_BYTES
            is_whole = partial(_has_sum, block, int.from_bytes(sums[sum_start : sum_start + _SUM_BYTES], "little"))
            if not (is_read and is_whole()):
                what = (
                    f"values must be those that were saved, but '{name}' has other bytes between {low} and "
                    f"{low + len(block)}"
                )
                self._obtain(chunk.file, block, low, is_whole, what)

    def _check_entry(self, name: str, stored: StoredTensor, chunk: Chunk) -> None:
        """Compare what the manifest and a file's header say of a chunk."""
        file = self._manifest.files[chunk.file]
        if chunk.file not in self._entries:
            header = self.header(chunk.file)
            try:
                self._entries[chunk.file] = dict(json.loads(header[8:]))
            except (ValueError, TypeError, RecursionError) as error:
                raise CheckpointError(f"{self._folder / file.name}: its header must be JSON, but {error}.") from error
        start = chunk.start - file.data_start
        wanted = {
            "dtype": dtype_name(name, stored.dtype),
            "shape": list(chunk.sizes),
            "data_offsets": [start, start + stored.num_bytes(chunk)],
        }
        plain = name.partition("/")[2] if name.startswith("copy-") else name
        found = self._entries[chunk.file].get(plain)
        if found != wanted:
            raise CheckpointError(
                f"{self._folder / file.name}: its header must say of '{plain}' what the manifest does, {wanted}, but "
                f"says {found}. They are of different checkpoints, or damaged; {_REMEDY}."
            )

    def _sums(self, name: str, chunk: Chunk, count: int) -> memoryview:
        """The sums of a chunk's blocks."""
        sums = memoryview(bytearray(count * _SUM_BYTES))
        start = self._manifest.files[chunk.file].sums_start + chunk.first_sum * _SUM_BYTES
        what = f"sums must be those that were saved, but those of '{name}' are others"
        self._obtain(chunk.file, sums, start, partial(_has_sum, sums, chunk.checksum), what)
        return sums

    def _obtain(self, index: int, target: memoryview, offset: int, is_whole: Callable[[], bool], what: str) -> None:
        """Fill a buffer from a file, or, where that does not give what was saved, from what parity makes of others."""
        file = self._manifest.files[index]
        path = self._folder / file.name
        try:
            self._fill(file.name, file.size, target, offset)
            if is_whole():
                return
            error = CheckpointError(f"{path}: {what}. The file is damaged; {_REMEDY}.")
        except CheckpointError as caught:
            error = caught
        if self._manifest.rows:
            try:
                self.rebuild(index, target, offset)
            except CheckpointError as other:
                raise CheckpointError(f"{error} Parity cannot stand in: {other}") from error
            if is_whole():
                self.rebuilt.add(file.name)
                return
        raise error

    def _open(self, name: str, size: int) -> int:
        """A file's descriptor, after its size was compared."""
        opened = self._opened.get(name)
        if opened is None:
            try:
                opened = self._opened[name] = self._opened_anew(self._folder / name, size)
            except CheckpointError as error:
                opened = self._opened[name] = error
        if isinstance(opened, CheckpointError):
            raise opened
        return opened

    @staticmethod
    def _opened_anew(path: Path, size: int) -> int:
        try:
            opened = open_regular(path)
        except OSError as error:
            raise CheckpointError(
                f"{path}: all files of a checkpoint must be there, but: {error.strerror}. {_REMEDY.capitalize()}."
            ) from error
        found = os.fstat(opened).st_size
        if found != size:
            os.close(opened)
            raise CheckpointError(
                f"{path}: must have the {size} bytes that were saved, but it has {found}. It is damaged; {_REMEDY}."
            )
        return opened

    def _fill(self, name: str, size: int, target: memoryview, offset: int) -> None:
        opened = self._open(name, size)
        try:
            read_exactly(opened, target, offset)
        except (OSError, EOFError) as error:
            raise CheckpointError(
                f"{self._folder / name}: must be readable to its end, but byte {offset} is not: {error}. It is "
                f"damaged; {_REMEDY}."
            ) from error


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory on the host, of which what is large is asked for in huge pages: small ones cost more than the reading."""
    out = torch.empty(shape, dtype=dtype, device="cpu")
    begin, end = -(-out.data_ptr() // _HUGE_PAGE), (out.data_ptr() + out.nbytes) // _HUGE_PAGE
    if begin < end and sys.platform == "linux":  # advice: where it is not taken, nothing is lost
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(begin * _HUGE_PAGE), ctypes.c_size_t((end - begin) * _HUGE_PAGE), mmap.MADV_HUGEPAGE
        )
    return out


def _has_sum(content: memoryview, wanted: int) -> bool:
    return zlib.crc32(content) == wanted
