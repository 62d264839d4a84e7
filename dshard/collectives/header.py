"""What travels ahead of the values, so that ranks which mean different things notice."""

import struct
import zlib

import torch
from torch import Tensor

from dshard.errors import DivergenceError

__all__ = ["ALIGN_BYTES", "HEADER_BYTES", "check_headers", "header"]

ALIGN_BYTES = 16  # a multiple of every element size
HEADER_BYTES = 64  # a checksum of the label, a tag, and the end of the label itself


def header(label: str, tag: int) -> Tensor:
    """What all ranks must send alike: which unit this is, and what it was written with."""
    name = label.encode()
    raw = struct.pack("<qq48s", zlib.crc32(name), tag, name[-48:])
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def check_headers(headers: Tensor, own: Tensor, label: str) -> None:
    """Raise if another rank gathered another unit, or wrote other numbers to this one."""
    if bool((headers == own).all()):
        return
    rank = next(r for r in range(headers.shape[0]) if not torch.equal(headers[r], own))
    other = bytes(headers[rank].tolist())
    crc, _, name = struct.unpack("<qq48s", other)
    if crc != zlib.crc32(label.encode()):
        text = name.rstrip(b"\0").decode(errors="replace")
        raise DivergenceError(
            f"'{label}': all ranks must communicate about the same thing at the same time, but rank {rank} is at "
            f"'{text}'. Make every rank run the same modules and read the same values in the same order; look for a "
            "branch on rank-local data."
        )
    raise DivergenceError(
        f"'{label}': all ranks must write the same to a sharded tensor, and equally often before it is used, but rank "
        f"{rank} wrote other numbers, through another index, or in other places of the program. Make the writes equal "
        "on all ranks; compute with full_tensor() where a number is a rank's own."
    )
