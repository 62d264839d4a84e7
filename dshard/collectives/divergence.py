"""Do all ranks mean the same? What each says ahead of a collective, or writes down, and how that is compared.

On gloo a header of 64 bytes travels ahead of the values of each collective (`exchange.py`). In the buffers of other
backends it would cost copies to and from the device for each; there the hosts compare what they did (`ledger.py`).

A header holds what this is, of which unit, a *tag*, which is what the shards were written with, and how many exceptions
have ended forwards and backwards of models in this process group. Where one rank alone has caught one, its next
collective there differs from its peers' in that, of whatever model it is, and all of them raise.
"""

import enum
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn

from dshard.collectives._c10d import ProcessGroup, kept_for, kept_for_all
from dshard.collectives.group import ShardGroup
from dshard.collectives.watchdog import Verdict, caught_by_some
from dshard.errors import DivergenceError

# A checksum of kind and label, what shards were written with, exceptions, the kind, and the end of the label.
_FORMAT = struct.Struct("<qqBB46s")
_WRITES = slice(8, 16)
_NAME_BYTES = 46


class Kind(enum.IntEnum):
    """What a header is ahead of."""

    GATHER = 0
    REDUCE = 1
    COMBINE = 2
    MOVE = 3

    @property
    def text(self) -> str:
        """Its words in an error message."""
        return ("the gather of", "the reduction of gradients of", "the combination of", "the exchange for")[self]


def tag_of(writes: object) -> int:
    """The tag of a collective over shards: a number of 62 bits that stands for what they were written with."""
    return hash(writes) & (1 << 62) - 1


def header(kind: Kind, label: str, tag: int, num_failures: int) -> bytes:
    """What all ranks must send alike ahead of a collective.

    Args:
        kind: Of the collective.
        label: Of which unit.
        tag: As `tag_of` makes it; 0 where nothing is said of writes.
        num_failures: Exceptions that have ended forwards and backwards in the process group.
    """
    name = label.encode()
    is_name_cut = len(name) > _NAME_BYTES and b"=" not in name  # else arguments, which `_check_arguments` reads
    shown = b"..." + name[3 - _NAME_BYTES :] if is_name_cut else name[-_NAME_BYTES:]
    return _FORMAT.pack(zlib.crc32(name, kind), tag, num_failures & 0xFF, kind, shown)


def without_writes(header: bytes) -> bytes:
    """A header without what the shards were written with."""
    return header[: _WRITES.start] + header[_WRITES.stop :]


class _Header(NamedTuple):
    """What a header says."""

    checksum: int
    writes: int
    num_failures: int
    kind: int
    name: bytes

    @classmethod
    def read(cls, header: bytes) -> "_Header":
        return cls(*_FORMAT.unpack(header))

    @property
    def text(self) -> str:
        """The end of the unit's label."""
        return self.name.rstrip(b"\0").decode(errors="replace")


def check_headers(headers: Sequence[bytes], own: bytes, kind: Kind, label: str, group: ShardGroup) -> None:
    """Raise if another rank is at something else, or wrote other numbers to the same.

    Args:
        headers: What each rank sent.
        own: What this rank did.
        kind: What this rank is at.
        label: Of which unit.
        group: The ranks.

    Raises:
        DivergenceError: They differ.
    """
    rank = next((rank for rank, each in enumerate(headers) if each != own), None)
    if rank is not None:
        refuse(headers[rank], rank, own, kind, label, group.process_group)


def refuse(other: bytes, rank: int, own: bytes, kind: Kind, label: str, group: ProcessGroup) -> NoReturn:
    """Raise for a rank whose header is another one than this rank's; the others are those of `check_headers`."""
    heard, mine = _Header.read(other), _Header.read(own)
    if heard.num_failures != mine.num_failures:
        caught = caught_by_some(group)
        if caught is None and heard.checksum == mine.checksum:
            caught = Verdict((), "the program has caught an exception on some ranks alone")
        if caught is not None:
            raise DivergenceError(
                f"'{label}': all ranks must go through a step together, but {caught.text}. Let what is raised on one "
                "rank alone end the program, and start again from the last checkpoint (torchrun --max-restarts does).",
                caught.ranks,
            )
    if heard.checksum != mine.checksum:
        _check_arguments(label, heard.text, rank)
        there = f"'{heard.text}'" if heard.kind == kind else f"{Kind(heard.kind).text} '{heard.text}'"
        this = "" if heard.kind == kind else f", this one at {kind.text} '{label}'"
        raise DivergenceError(
            f"'{label}': all ranks must communicate about the same thing at the same time, but rank {rank} is at "
            f"{there}{this}. Make every rank run the same modules and read the same values in the same order; "
            "look for a branch on rank-local data, or an exception that one rank alone has caught. Where some ranks "
            "run a module and others do not, put `with dshard.run_by_some(module, runs=...):` around its use."
        )
    raise DivergenceError(
        f"'{label}': all ranks must write the same to a sharded tensor, and equally often before it is used, but rank "
        f"{rank} wrote other numbers, through another index, or in other places of the program. Make the writes equal "
        "on all ranks; compute with full_tensor() where a number is a rank's own."
    )


def _check_arguments(own: str, other: str, rank: int) -> None:
    """Raise if two labels are one function's, and differ in its arguments: "name(max_norm=1.0, norm_type=2.0)".

    Of the other no more than the end is known. An argument that is not named is at its default.
    """
    who, _, here = own.partition("(")
    head, is_whole, there = other.rpartition("(")
    if not (own.endswith(")") and other.endswith(")") and "=" in here and "=" in there and who.endswith(head)):
        return
    if not is_whole:
        there = there.partition(", ")[2]  # the first name may be cut
    mine, theirs = (
        dict(part.split("=", 1) for part in text.removesuffix(")").split(", ") if "=" in part) for text in (here, there)
    )
    unknown = "its default" if is_whole else "another"
    both = [name for name in mine if name in theirs]
    for name in [*both, *theirs, *mine]:  # those last that the cut may have taken
        value, others = mine.get(name, "its default"), theirs.get(name, unknown)
        if value != others:
            raise DivergenceError(
                f"{who}: all ranks must pass the same {name}, but it is {value} on this rank and {others} on rank "
                f"{rank}. Pass what does not depend on the rank."
            )


# What has happened in a process group.


def count_start(group: ShardGroup) -> None:
    """Count a collective that starts."""
    started_in(group)[0] += 1


def num_started(groups: Iterable[ShardGroup]) -> int:
    """How many collectives of a model or function this rank has started in some groups."""
    return sum(started_in(group)[0] for group in groups)


def started_in(group: ShardGroup) -> list[int]:
    """The number of collectives that this rank has started in a group, to be counted on."""
    return kept_for(group.process_group, ("started", group.name), lambda: [0])


def note_failure(groups: Iterable[ShardGroup]) -> None:
    """Count an exception that has ended a forward or a backward, in each process group that its model uses."""
    for process_group in {id(group.process_group): group.process_group for group in groups}.values():
        failures_in(process_group)[0] += 1


def num_failures(group: ShardGroup) -> int:
    """How many exceptions have ended forwards and backwards of models in a process group, on this rank."""
    return failures_in(group.process_group)[0]


def num_all_failures() -> int:
    """As `num_failures`, summed over all process groups that there are."""
    return sum(count for (count,) in kept_for_all("failures"))


def failures_in(process_group: ProcessGroup) -> list[int]:
    """The number of exceptions in a process group, to be counted on."""
    return kept_for(process_group, "failures", lambda: [0])
