"""Read one rank's part of a tensor out of a file: its own bytes, or bounded pieces of rows for its own columns."""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dshard.checkpoint.disk import closing, open_regular, read_exactly
from dshard.checkpoint.file_format import Entry, FileVersion
from dshard.errors import CheckpointError

_PIECE_BYTES = 1 << 24  # of rows that are read for their columns


@contextmanager
def unchanged(source: FileVersion) -> Iterator[int]:
    """A file descriptor of a file that is as it was, when it is opened and when it has been read.

    Raises:
        CheckpointError: Somebody has written to it, or put another in its place.
        OSError: It cannot be read.
    """
    try:
        with closing(open_regular(source.path, follow=True)) as opened:
            is_same = FileVersion.opened(source.path, opened) == source
            if is_same:
                yield opened
                is_same = FileVersion.opened(source.path, opened) == source
            if not is_same:
                raise EOFError("it is not the file that it was")
    except EOFError as error:
        raise CheckpointError(
            f"{source.path}: must not change while it is read, but {error}. Load it again when nobody saves there."
        ) from None


def read_part(opened: int, entry: Entry, part: Tensor) -> Tensor:
    """The values of a part of a tensor, in memory of their own.

    Args:
        opened: File descriptor.
        entry: The tensor.
        part: A view of a tensor of its shape that has no memory, which says the part.

    Returns:
        Shape of the part, in the file's dtype.

    Raises:
        EOFError: The file ends before.
        OSError: It cannot be read.
    """
    size = entry.dtype.itemsize
    raw = torch.empty(part.numel() * size, dtype=torch.uint8, device="cpu")
    stop = 0
    for rows in _rows_of(entry, part) if len(raw) else ():
        start, stop = stop, stop + rows.number * rows.num_own_bytes
        rows.read(opened, raw[start:stop].view(rows.number, rows.num_own_bytes))
    return raw.view(entry.dtype).view(part.shape)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that follow one another in a file, of each of which one stretch is wanted."""

    start: int  # first byte of the first row
    number: int  # of them
    num_bytes: int  # of each
    own_start: int  # first byte of the stretch, from the row's start
    num_own_bytes: int  # of the stretch

    def read(self, opened: int, into: Tensor) -> None:
        """Read the stretches; `into` is uint8, (number, num_own_bytes)."""
        if self.num_bytes == self.num_own_bytes:
            read_exactly(opened, memory_of(into), self.start)
        elif self.number == 1 or self.num_bytes > _PIECE_BYTES:
            for i, own in enumerate(into):
                read_exactly(opened, memory_of(own), self.start + i * self.num_bytes + self.own_start)
        else:
            pieces = into.split(_PIECE_BYTES // self.num_bytes)
            buffer = torch.empty(len(pieces[0]), self.num_bytes, dtype=torch.uint8, device="cpu")
            at = self.start
            for piece in pieces:
                rows = buffer[: len(piece)]
                read_exactly(opened, memory_of(rows), at)
                piece.copy_(rows[:, self.own_start : self.own_start + self.num_own_bytes])
                at += rows.numel()


def _rows_of(entry: Entry, part: Tensor) -> Iterator[_Rows]:
    """Where a part lies. The last dim that is cut says the stretches of rows; the one before it, which rows."""
    starts, offset = [], part.storage_offset()
    for i in range(part.dim()):
        step = math.prod(entry.shape[i + 1 :])
        starts.append(offset // step)
        offset %= step
    cut = [i for i in range(part.dim()) if part.shape[i] != entry.shape[i]]
    last, before = ([-1, -1, *cut])[-1], ([-1, -1, *cut])[-2]
    size = entry.dtype.itemsize
    column = size * math.prod(entry.shape[last + 1 :])
    row = column * (entry.shape[last] if last >= 0 else 1)
    own_start, own = (starts[last] * column, part.shape[last] * column) if last >= 0 else (0, column)
    between = math.prod(entry.shape[before + 1 : max(last, 0)])  # rows in one index of the dim before
    number = between * (part.shape[before] if before >= 0 else 1)
    outer: Sequence[range] = [range(starts[i], starts[i] + part.shape[i]) for i in range(max(before, 0))]
    for index in itertools.product(*outer):
        at = 0
        for i, each in enumerate((*index, starts[before]) if before >= 0 else ()):
            at += each * math.prod(entry.shape[i + 1 :]) * size
        yield _Rows(entry.start + at, number, row, own_start, own)


def memory_of(raw: Tensor) -> memoryview:
    """The memory of a contiguous tensor of uint8 on the host."""
    return memoryview(raw.numpy())  # type: ignore[arg-type]
