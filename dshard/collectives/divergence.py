"""Do all ranks mean the same? What each says ahead of a collective, or writes down, and how that is compared.

On gloo a header of 64 bytes travels ahead of the values of each collective (`exchange.py`). In the buffers of other
backends it would cost copies to and from the device for each; so ranks write down what they did, and compare checksums
of that when a backward ends: `note` and `settle`.

A header holds what this is, of which unit, a *tag*, which is what the shards were written with, and how many exceptions
have ended forwards and backwards of models in this process group. Where one rank alone has caught one, its next
collective there differs from its peers' in that, of whatever model it is, and all of them raise.
"""

import enum
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dshard.collectives._c10d import ProcessGroup, kept_for, kept_for_all
from dshard.collectives.group import Handle, ShardGroup
from dshard.collectives.trace import record
from dshard.collectives.watchdog import Verdict, caught_by_some, watch_event
from dshard.errors import DivergenceError, RankLostError

# A checksum of kind and label, what shards were written with, exceptions, the kind, and the end of the label.
_FORMAT = struct.Struct("<qqBB46s")
_WRITES = slice(8, 16)
_NAME_BYTES = 46
_MAX_ENTRIES = 1 << 14  # of a group that nobody settles


class Kind(enum.IntEnum):
    """What a header is ahead of."""

    GATHER = 0
    REDUCE = 1
    COMBINE = 2

    @property
    def text(self) -> str:
        """Its words in an error message."""
        return ("the gather of", "the reduction of gradients of", "the combination of")[self]


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
    if rank is None:
        return
    heard, mine = _Header.read(headers[rank]), _Header.read(own)
    if heard.num_failures != mine.num_failures:
        caught = caught_by_some(group.process_group)
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
        other = f"'{heard.text}'" if heard.kind == kind else f"{Kind(heard.kind).text} '{heard.text}'"
        this = "" if heard.kind == kind else f", this one at {kind.text} '{label}'"
        raise DivergenceError(
            f"'{label}': all ranks must communicate about the same thing at the same time, but rank {rank} is at "
            f"{other}{this}. Make every rank run the same modules and read the same values in the same order; "
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
    mine, theirs = (
        dict(part.split("=", 1) for part in text.removesuffix(")").split(", ") if "=" in part) for text in (here, there)
    )
    unknown = "its default" if is_whole else "another"
    for name in [*mine, *theirs]:
        value, others = mine.get(name, "its default"), theirs.get(name, unknown)
        if value != others:
            raise DivergenceError(
                f"{who}: all ranks must pass the same {name}, but it is {value} on this rank and {others} on rank "
                f"{rank}. Pass what does not depend on the rank."
            )


# Backends that run their own collectives: what each rank did is written down, and compared once in a while.

_Entry = tuple[Kind, str, int, int]  # tag and number of failures, as in a header


@dataclass
class _Comparison:
    """Checksums of all ranks, which are copied to the host."""

    entries: list[_Entry]  # what this rank's stands for
    sums: Tensor  # shape (num_ranks, 2): checksum and number of entries of each rank
    arrived: Any  # event of the device after which `sums` may be read; None at once


@dataclass
class _Record:
    """What this rank did in a process group."""

    entries: list[_Entry] = field(default_factory=list)  # that were not compared
    pending: _Comparison | None = None
    num_started: int = 0  # collectives, on any backend


def _record_of(group: ShardGroup) -> _Record:
    return kept_for(group.process_group, ("record", group.name), _Record)


def count_start(group: ShardGroup) -> None:
    """Count a collective that starts."""
    _record_of(group).num_started += 1


def num_started(groups: Iterable[ShardGroup]) -> int:
    """How many collectives of a model or function this rank has started in some groups."""
    return sum(_record_of(group).num_started for group in groups)


def note_failure(groups: Iterable[ShardGroup]) -> None:
    """Count an exception that has ended a forward or a backward, in each process group that its model uses."""
    for process_group in {id(group.process_group): group.process_group for group in groups}.values():
        _failures_in(process_group)[0] += 1


def num_failures(group: ShardGroup) -> int:
    """How many exceptions have ended forwards and backwards of models in a process group, on this rank."""
    return _failures_in(group.process_group)[0]


def num_all_failures() -> int:
    """As `num_failures`, summed over all process groups that there are."""
    return sum(count for (count,) in kept_for_all("failures"))


def _failures_in(process_group: ProcessGroup) -> list[int]:
    return kept_for(process_group, "failures", lambda: [0])


def note(group: ShardGroup, kind: Kind, label: str, tag: int) -> None:
    """Write down that this rank starts a gather or a reduction."""
    count_start(group)
    entries, failures = _record_of(group).entries, num_failures(group)
    entries.append((kind, label, tag, failures))
    if len(entries) >= _MAX_ENTRIES:  # nobody settles: one entry stands for all
        entries[:] = [(kind, f"{label}, or something ahead of it", _checksum(entries), failures)]


def num_noted(group: ShardGroup) -> int:
    """How many entries a group has that were not compared."""
    return len(_record_of(group).entries)


def settle(groups: Iterable[ShardGroup], min_entries: int = 1) -> None:
    """Compare what the ranks of some groups wrote down since the last time; all of them must call this alike.

    On an accelerator the host does not wait: the next call raises for a difference.

    Args:
        groups: Those of the ranks. On gloo nothing is written down but by collectives of the user's own.
        min_entries: How many entries a group must have to be looked at, at least 1.

    Raises:
        DivergenceError: The ranks of a group communicated about different things, on every rank of it; once all
            groups were looked at.

    Communicates:
        An all-gather of 16 bytes for each group.
    """
    errors: list[DivergenceError] = []
    for group in groups:
        if num_noted(group) >= min_entries:
            try:
                _settle(group, _record_of(group))
            except RankLostError:
                raise
            except DivergenceError as error:  # the ranks of a later group wait for this one
                errors.append(error)
    if errors:
        raise errors[0]


def _settle(group: ShardGroup, known: _Record) -> None:
    previous, known.pending = known.pending, None
    entries, known.entries = known.entries, []
    started = _start(group, entries)
    if started.arrived is not None:
        known.pending = started
        label = f"{started.entries[-1][1]}, or something of that step before it"
        watch_event(label, group.process_group, started.arrived)
    if previous is not None:
        _check(group, previous)
    if started.arrived is None:
        _check(group, started)


def _start(group: ShardGroup, entries: list[_Entry]) -> _Comparison:
    sums = _exchange(group, torch.tensor([_checksum(entries), len(entries)], device="cpu"))
    if sums.device.type == "cpu":
        return _Comparison(entries, sums, None)
    host = torch.empty(sums.shape, dtype=sums.dtype, device="cpu", pin_memory=True)
    host.copy_(sums, non_blocking=True)
    arrived = torch.get_device_module(sums.device).Event()
    arrived.record()
    return _Comparison(entries, host, arrived)


def _exchange(group: ShardGroup, row: Tensor) -> Tensor:
    """One row of numbers per rank, on the group's device."""
    own = row if group.device_type == "cpu" else row.pin_memory()
    own = own.to(group.device_type, non_blocking=True)
    rows = torch.empty((group.num_ranks, own.numel()), dtype=own.dtype, device=own.device)
    works = group.all_gather(rows, own)
    record("check", "", group, 0, 0, row.nbytes * (group.num_ranks - 1))
    return Handle("the check that all ranks communicated alike", works, lambda: rows, group=group).wait()


def _check(group: ShardGroup, comparison: _Comparison) -> None:
    if comparison.arrived is not None:
        comparison.arrived.synchronize()
    found = comparison.sums.tolist()
    if any(row != found[0] for row in found):
        _explain(group, comparison.entries, max(count for _, count in found))


def _explain(group: ShardGroup, entries: list[_Entry], num_entries: int) -> None:
    """Find the first difference and name what both sides did; raises on every rank."""
    sums = [_checksum([entry]) for entry in entries] + [-1] * (num_entries - len(entries))
    rows = _exchange(group, torch.tensor(sums, device="cpu")).cpu()
    place = int((rows != rows[0]).any(0).nonzero()[0])
    end = Kind.COMBINE, "the end of the step", 0, num_failures(group)
    kind, label, tag, failures = entries[place] if place < len(entries) else end
    own = header(kind, label, tag, failures)
    rows = _exchange(group, torch.frombuffer(bytearray(own), dtype=torch.int64)).cpu()
    check_headers([row.numpy().tobytes() for row in rows], own, kind, label, group)


def _checksum(entries: list[_Entry]) -> int:
    return zlib.crc32(repr(entries).encode())
