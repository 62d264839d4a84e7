"""What each rank communicated about, compared once in a while: the check of backends that run their own collectives.

On a direct backend a header goes ahead of every collective. In the buffers of the others it would cost copies to and
from the device for each; so the ranks write down what they did and compare checksums when a backward ends.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dshard.collectives._c10d import kept_for
from dshard.collectives.group import Handle, ShardGroup
from dshard.collectives.header import Kind, check_headers, header
from dshard.collectives.lines import line_of
from dshard.collectives.stalls import watch_event
from dshard.collectives.trace import record
from dshard.errors import DivergenceError, RankLostError

_Entry = tuple[Kind, str, int, int]  # the last one is the number of the step
_MAX_ENTRIES = 1 << 14  # of a group that nobody settles


@dataclass
class _Comparison:
    """Checksums of all ranks, on their way to the host."""

    entries: list[_Entry]  # what this rank's stands for
    sums: Tensor  # shape (num_ranks, 2): checksum and number of entries of each rank
    arrived: Any  # event of the device after which `sums` may be read; None at once


@dataclass
class _Page:
    """What a process group has in the ledger."""

    entries: list[_Entry] = field(default_factory=list)
    pending: _Comparison | None = None


def _page(group: ShardGroup) -> _Page:
    return kept_for(group.process_group, ("ledger", group.name), _Page)


def note(group: ShardGroup, kind: Kind, label: str, tag: int) -> None:
    """Write down that this rank starts a gather or a reduction."""
    entries = _page(group).entries
    number = line_of(group).note()
    entries.append((kind, label, tag, number))
    if len(entries) >= _MAX_ENTRIES:  # nobody settles: one entry stands for all
        entries[:] = [(kind, f"{label}, or something ahead of it", _checksum(entries), number)]


def num_noted(group: ShardGroup) -> int:
    """How many entries a group has that were not compared."""
    return len(_page(group).entries)


def settle(groups: Iterable[ShardGroup], min_entries: int = 1) -> None:
    """Compare what the ranks of some groups wrote down since the last time; all of them must call this alike.

    On an accelerator the host does not wait: a difference is told by the next call.

    Args:
        groups: Those of the ranks. On a direct one nothing is written down but by collectives of the user's own.
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
                _settle(group, _page(group))
            except RankLostError:
                raise
            except DivergenceError as error:  # the ranks of a later group wait for this one
                errors.append(error)
    if errors:
        raise errors[0]


def _settle(group: ShardGroup, page: _Page) -> None:
    previous, page.pending = page.pending, None
    entries, page.entries = page.entries, []
    started = _start(group, entries)
    if started.arrived is not None:
        page.pending = started
        watch_event(
            f"{started.entries[-1][1]}, or something of that step before it", group.process_group, started.arrived
        )
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
    kind, label, tag, number = entries[place] if place < len(entries) else (Kind.COMBINE, "the end of the step", 0, 0)
    own = header(kind, label, tag, number)
    rows = _exchange(group, torch.frombuffer(bytearray(own), dtype=torch.int64)).cpu()
    check_headers([row.numpy().tobytes() for row in rows], own, kind, label)


def _checksum(entries: list[_Entry]) -> int:
    return zlib.crc32(repr(entries).encode())
