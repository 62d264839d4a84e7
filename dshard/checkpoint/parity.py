"""XOR rows over groups of files: any one file of a group can be rebuilt from the others.

The files of a group are cut into stripes, n - 1 of each file of n. Row p, which the p-th rank writes, is the XOR of one
stripe of every file but the p-th; each stripe of a file is in another row. So a row is as long as a stripe, all rows
together are 1/(n - 1) of the files, and a rank that is lost takes along its file and a row that none of its own stripes
is in: what is left of each row, XORed, is its stripe.
"""

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dshard.checkpoint.disk import buffers, create, write_all
from dshard.checkpoint.files import counts, require

MAX_GROUP = 16  # files: of more, several may be lost at a time
ROW_NAME = re.compile(r"parity-\d{5,}-of-\d{5,}\.[0-9a-f]{8}\.bin")

Read = Callable[[int, memoryview, int], None]  # bytes of a member from an offset on; zeros beyond its end


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a checkpoint.

    Args:
        name: Of its file.
        size: In bytes.
        checksum: CRC-32 of them.
    """

    name: str
    size: int
    checksum: int

    def to_json(self) -> dict[str, Any]:
        """Return the object that describes it in the manifest."""
        return {"name": self.name, "size": self.size, "crc32": self.checksum}

    @classmethod
    def from_json(cls, value: Any) -> "Row":
        """Read the object of `to_json`; raises ValueError, KeyError or TypeError for anything else."""
        require(ROW_NAME.fullmatch(value["name"]), f"no row may be named {value['name']!r:.80}")
        return cls(value["name"], *counts([value["size"], value["crc32"]]))


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


def write_row(path: Path, row: int, sizes: Sequence[int], read: Read) -> Row:
    """Write a group's row.

    Args:
        path: A new file.
        row: Number of the rank in its group.
        sizes: Bytes of each member.
        read: Reads a member.

    Raises:
        OSError: It cannot be written.
    """
    stripes, checksum = Stripes(tuple(sizes)), 0
    with create(path) as opened:
        for offset, part in buffers(stripes.length):
            stripes.row_bytes(row, read, part, offset)
            checksum = zlib.crc32(part, checksum)
            write_all(opened, part)
    return Row(path.name, stripes.length, checksum)
