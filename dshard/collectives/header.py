"""What travels ahead of the values, so that ranks which mean different things notice."""

import enum
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from dshard.errors import DivergenceError

# A checksum of kind and label, a tag, the number of the step, the kind, and the end of the label.
_FORMAT = struct.Struct("<qqQB39s")
_TAG = slice(8, 16)
_NAME_BYTES = 39


class Kind(enum.IntEnum):
    """What a header is ahead of."""

    GATHER = 0
    REDUCE = 1
    COMBINE = 2
    GAVE_UP = 3  # of nothing: the rank has left a step, whose number is the tag, for another one

    @property
    def text(self) -> str:
        """Its words in an error message."""
        return ("the gather of", "the reduction of gradients of", "the combination of", "the end of")[self]


def header(kind: Kind, label: str, tag: int, number: int = 0) -> bytes:
    """What all ranks must send alike: what this is, of which unit, what that was written with, and in which step."""
    name = label.encode()
    is_name_cut = len(name) > _NAME_BYTES and b"=" not in name  # else arguments, which `_check_arguments` reads
    shown = b"..." + name[3 - _NAME_BYTES :] if is_name_cut else name[-_NAME_BYTES:]
    return _FORMAT.pack(zlib.crc32(name, kind), tag, number, kind, shown)


class Heard(NamedTuple):
    """What a header says."""

    checksum: int
    tag: int
    number: int
    kind: int
    name: bytes

    @property
    def what(self) -> str:
        """Its words in an error message: the kind, and of which unit."""
        return f"{Kind(self.kind).text} '{self.text}'"

    @property
    def text(self) -> str:
        """The end of the unit's label."""
        return self.name.rstrip(b"\0").decode(errors="replace")


def read(header: bytes) -> Heard:
    """What a header says."""
    return Heard(*_FORMAT.unpack(header))


def untagged(header: bytes) -> bytes:
    """A header without its tag."""
    return header[: _TAG.start] + header[_TAG.stop :]


def check_headers(headers: Sequence[bytes], own: bytes, kind: Kind, label: str) -> None:
    """Raise if another rank is at something else, or wrote other numbers to the same.

    Args:
        headers: What each rank sent.
        own: What this rank did.
        kind: What this rank is at.
        label: Of which unit.

    Raises:
        DivergenceError: They differ.
    """
    rank = next((rank for rank, each in enumerate(headers) if each != own), None)
    if rank is None:
        return
    heard = read(headers[rank])
    if heard.checksum != read(own).checksum:
        _check_arguments(label, heard.text, rank)
        other = f"'{heard.text}'" if heard.kind == kind else heard.what
        mine = "" if heard.kind == kind else f", this one at {kind.text} '{label}'"
        raise DivergenceError(
            f"'{label}': all ranks must communicate about the same thing at the same time, but rank {rank} is at "
            f"{other}{mine}. Make every rank run the same modules and read the same values in the same order; "
            "look for a branch on rank-local data, or an exception that one rank alone has caught. Where some ranks "
            "run a module and others do not, put `with dshard.run_by_some(module, runs=...):` around its use."
        )
    if heard.number != read(own).number:
        raise DivergenceError(
            f"'{label}': all ranks must be in the same step, but rank {rank} is in another one than this. Give all "
            "ranks as many batches; after an exception on one rank, end the program on all of them and load a "
            "checkpoint."
        )
    raise DivergenceError(
        f"'{label}': all ranks must write the same to a sharded tensor, and equally often before it is used, but rank "
        f"{rank} wrote other numbers, through another index, or in other places of the program. Make the writes equal "
        "on all ranks; compute with full_tensor() where a number is a rank's own."
    )


def _check_arguments(own: str, other: str, rank: int) -> None:
    """Raise if two labels are one function's, and differ in its arguments: "name(max_norm=1.0, norm_type=2.0)".

    Of the other no more than the end is known. What is left out is at its default.
    """
    who, _, told = own.partition("(")
    head, is_whole, said = other.rpartition("(")
    if not (own.endswith(")") and other.endswith(")") and "=" in told and "=" in said and who.endswith(head)):
        return
    mine, theirs = (
        dict(part.split("=", 1) for part in text.removesuffix(")").split(", ") if "=" in part) for text in (told, said)
    )
    unknown = "its default" if is_whole else "another"
    for name in [*mine, *theirs]:
        here, there = mine.get(name, "its default"), theirs.get(name, unknown)
        if here != there:
            raise DivergenceError(
                f"{who}: all ranks must pass the same {name}, but it is {here} on this rank and {there} on rank "
                f"{rank}. Pass what does not depend on the rank."
            )
