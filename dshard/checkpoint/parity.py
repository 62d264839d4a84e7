"""XOR rows over groups of files: any one file of a group can be rebuilt from the others.

The files of a group are cut into stripes, n - 1 of each file of n. Row p, which the p-th rank writes, is the XOR of one
stripe of every file but the p-th; each stripe of a file is in another row. So a row is as long as a stripe, all rows
together are 1/(n - 1) of the files, and a rank that is lost takes along its file and a row that none of its own stripes
is in: what is left of each row, XORed, is its stripe.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from dshard.checkpoint.disk import buffers, create, write_all
from dshard.checkpoint.files import Box, StoredFile, StoredPiece, sum_of, sums_of

MAX_GROUP = 16  # files: of more, several may be lost at a time

Read = Callable[[int, memoryview, int], None]  # bytes of a member from an offset on; zeros beyond its end


def group_around(index: int, num_files: int) -> range:
    """Return the group of a file: up to `MAX_GROUP` neighbours, in groups of about one size."""
    num_groups = -(-num_files // MAX_GROUP)
    bounds = [num_files * i // num_groups for i in range(num_groups + 1)]
    return next(range(a, b) for a, b in pairwise(bounds) if a <= index < b)


@dataclass(frozen=True, slots=True)
class Stripes:
    """The stripes into which the files of a group are cut.

    Args:
        sizes: Bytes of each member, two or more.
    """

    sizes: tuple[int, ...]

    @property
    def length(self) -> int:
        """Bytes of a stripe, and of a row."""
        return -(-max(self.sizes) // (len(self.sizes) - 1))

    @staticmethod
    def stripe_in(row: int, member: int) -> int:
        """Return which stripe of a member is in a row; the member that writes the row has none in it."""
        return row if row < member else row - 1

    def row_bytes(self, row: int, read: Read, target: memoryview, offset: int, *, without: int | None = None) -> None:
        """XOR into `target` the bytes of a row's members at an offset of their stripes.

        Args:
            row: Its number.
            read: Reads a member.
            target: What to add to.
            offset: Within the stripe.
            without: A member that is left out.
        """
        total = np.frombuffer(target, dtype=np.uint8)
        raw = bytearray(len(target))
        part = np.frombuffer(raw, dtype=np.uint8)
        for member in range(len(self.sizes)):
            if member not in (row, without):
                read(member, memoryview(raw), self.stripe_in(row, member) * self.length + offset)
                np.bitwise_xor(total, part, out=total)

    def rebuild(self, member: int, read: Read, read_row: Read, target: memoryview, offset: int) -> None:
        """Rebuild a lost member's bytes from an offset on, from the other members and the rows.

        Args:
            member: The lost one.
            read: Reads another member.
            read_row: Reads a row.
            target: What to fill.
            offset: Within the member.
        """
        done = 0
        while done < len(target):
            stripe, within = divmod(offset + done, self.length)
            row = stripe if stripe < member else stripe + 1
            part = target[done : done + self.length - within]
            read_row(row, part, within)
            self.row_bytes(row, read, part, within, without=member)
            done += len(part)


def write_row(path: Path, row: int, sizes: Sequence[int], read: Read) -> StoredFile:
    """Write a group's row, and return what the manifest is to say of it.

    Args:
        path: A new file.
        row: Number of the rank in its group.
        sizes: Bytes of each member.
        read: Reads a member.

    Raises:
        OSError: It cannot be written.
    """
    stripes, sums = Stripes(tuple(sizes)), ""
    with create(path) as opened:
        for offset, part in buffers(stripes.length):
            stripes.row_bytes(row, read, part, offset)
            sums += sums_of(part)
            write_all(opened, part)
    piece = StoredPiece(torch.uint8, Box.whole((stripes.length,)), sums, 0)
    return StoredFile(path.name, stripes.length, 0, sum_of(b""), {"row": piece})
