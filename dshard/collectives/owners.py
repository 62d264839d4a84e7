"""Exchanges between ranks that hold shards and ranks that own whole tensors: what each sends differs in size.

All values are bytes: who calls lays tensors of any dtypes out in them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from dshard.collectives import _c10d, ledger
from dshard.collectives.divergence import Kind
from dshard.collectives.exchange import Exchange, shared_memory_of, transport_of
from dshard.collectives.group import Handle, ShardGroup
from dshard.collectives.memory import Buffer
from dshard.collectives.trace import record
from dshard.layout import HEADER_BYTES

T = TypeVar("T")
Fill = Callable[[Tensor], object]  # writes what is sent


def to_owners(
    fill: Fill,
    sizes: Sequence[int],
    group: ShardGroup,
    use: Callable[[Tensor | Sequence[Tensor]], T],
    *,
    label: str,
    capacity: int = 0,
) -> Handle[T]:
    """Send each rank its segment of this rank's row.

    Args:
        fill: Writes the row, shape (sum of sizes,): a segment for each rank, in order.
        sizes: Bytes of each segment, the same on all ranks.
        group: The ranks.
        use: Makes the result of the segments for this rank, one from each rank, each of its size; they may not be kept.
        label: What it is for, the same on all ranks.
        capacity: Bytes of memory to take for it where peers read it there, the same on all ranks, if it needs less: so
            that one exchange after the other takes the same.

    Communicates:
        An all-to-all: this rank sends the segments of its peers.
    """
    rank, num_ranks, num_bytes = group.rank, group.num_ranks, sum(sizes)
    most = max(num_bytes, capacity)
    row, buffer = _memory(num_bytes, most, group)
    fill(row)
    segments: list[Tensor] = list(torch.split_with_sizes(row, list(sizes)))
    if num_ranks == 1:
        return Handle(label, [], partial(use, segments))
    _record("all_to_all", num_bytes - sizes[rank], group, label)
    if not group.is_direct:
        rows = row.new_empty((num_ranks, sizes[rank]))
        return _by_backend(row, rows, list(sizes), [sizes[rank]] * num_ranks, group, label, partial(use, rows))
    exchange = Exchange(group, Kind.MOVE, label, 0, most, buffer)
    pool = transport_of(group).pool
    exchange.swap_rows(segments, [segments[rank]] * num_ranks, pool)
    exchange.start()

    def finish() -> T:
        nonlocal row
        received = [segments[rank] if each == rank else exchange.received(each) for each in range(num_ranks)]
        result = use(received)
        del received, row
        segments.clear()
        exchange.end_reading()
        if buffer is not None:
            pool.give(buffer)
        return result

    return Handle(label, [exchange], finish, group=group, leave=exchange.leave)


def from_owners(
    fill: Fill, sizes: Sequence[int], group: ShardGroup, *, label: str, capacity: int = 0
) -> Handle[Tensor]:
    """Send each rank its row of those that this rank has made: the way back of `to_owners`.

    Args:
        fill: Writes the rows, shape (num_ranks, `sizes[rank]`).
        sizes: Bytes of the rows of each rank, the same on all ranks.
        group: The ranks.
        label: What it is for, the same on all ranks.
        capacity: As of `to_owners`.

    Returns:
        A handle whose result is a segment from each rank, shape (sum of sizes,), in order.

    Communicates:
        An all-to-all: this rank sends the rows of its peers.
    """
    rank, num_ranks, own = group.rank, group.num_ranks, sizes[group.rank]
    most = max(num_ranks * max(sizes), capacity)
    values, buffer = _memory(num_ranks * own, most, group)
    fill(values.view(num_ranks, own))
    if num_ranks == 1:
        return Handle(label, [], lambda: values)
    _record("all_to_all", own * (num_ranks - 1), group, label)
    result = torch.empty(sum(sizes), dtype=torch.uint8, device=group.device)
    if not group.is_direct:
        return _by_backend(values, result, [own] * num_ranks, list(sizes), group, label, lambda: result)
    starts = [rank * size for size in sizes]
    outs = list(values.view(num_ranks, own).unbind())
    return _exchange(outs, result, sizes, starts, buffer, most, group, label)


def all_gather_rows(fill: Fill, sizes: Sequence[int], group: ShardGroup, *, label: str) -> Handle[Tensor]:
    """Send all ranks this rank's row.

    Args:
        fill: Writes the row, shape (`sizes[rank]`,).
        sizes: Bytes of the row of each rank, the same on all ranks.
        group: The ranks.
        label: What it is for, the same on all ranks.

    Returns:
        A handle whose result are the rows of all ranks, shape (sum of sizes,), in order.

    Communicates:
        An all-gather of rows of different sizes, on a backend that is not direct padded to the largest.
    """
    num_ranks, own, most = group.num_ranks, sizes[group.rank], max(sizes)
    values, buffer = _memory(own if group.is_direct else most, most, group)
    fill(values[:own])
    if num_ranks == 1:
        return Handle(label, [], lambda: values)
    padding = 0 if group.is_direct else most - own
    _record("all_gather", own * (num_ranks - 1), group, label, padding * (num_ranks - 1))
    if group.is_direct:
        result = torch.empty(sum(sizes), dtype=torch.uint8, device=group.device)
        return _exchange([values] * num_ranks, result, sizes, [0] * num_ranks, buffer, most, group, label)
    rows = values.new_empty((num_ranks, most))
    ledger.note(group, Kind.MOVE, label, 0)
    works = [_c10d.all_gather_flat(rows.view(-1), values, group.process_group)]

    def finish() -> Tensor:
        return torch.cat([each[:size] for each, size in zip(rows.unbind(), sizes, strict=True)])

    return Handle(label, works, finish, group=group)


def _record(kind: str, num_bytes: int, group: ShardGroup, label: str, padding_bytes: int = 0) -> None:
    header_bytes = HEADER_BYTES * len(group.peers) if group.is_direct else 0
    record(kind, label, group, num_bytes, padding_bytes, header_bytes)


def _memory(num_bytes: int, most_bytes: int, group: ShardGroup) -> tuple[Tensor, Buffer | None]:
    """Memory for what this rank sends, and what it is a part of where peers read it there, as large on all ranks."""
    arena = shared_memory_of(group)
    if arena is None:
        return torch.empty(num_bytes, dtype=torch.uint8, device=group.device), None
    buffer = transport_of(group).pool.take(most_bytes, torch.device("cpu"), arena)
    return buffer.memory[:num_bytes], buffer


def _by_backend(
    values: Tensor,
    result: Tensor,
    outs: list[int],
    ins: list[int],
    group: ShardGroup,
    label: str,
    finish: Callable[[], T],
) -> Handle[T]:
    """Exchange parts of `values`, of sizes `outs`, for parts of `result`, by the backend's own all-to-all."""
    ledger.note(group, Kind.MOVE, label, 0)
    work = _c10d.all_to_all_flat(result.view(-1), values, ins, outs, group.process_group)
    return Handle(label, [work], finish, group=group)


def _exchange(
    outs: Sequence[Tensor],
    result: Tensor,
    sizes: Sequence[int],
    starts: Sequence[int],
    buffer: Buffer | None,
    most: int,
    group: ShardGroup,
    label: str,
) -> Handle[Tensor]:
    """Exchange a part for each rank for segments of `result`, straight from rank to rank.

    Args:
        outs: The part for each rank.
        result: All that comes.
        sizes: Bytes that come from each rank.
        starts: Where in the memory of each rank that begins which it sends here.
        buffer: The memory of this rank, if peers read it there.
        most: Bytes of that memory, on all ranks.
        group: The ranks.
        label: What it is for.
    """
    ins = list(result.split(list(sizes)))
    places = ins
    if buffer is not None:
        places = [buffer.memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    exchange = Exchange(group, Kind.MOVE, label, 0, most, buffer)
    ins[group.rank].copy_(outs[group.rank])
    for peer in group.peers:
        exchange.swap(ins[peer], outs[peer], peer, places[peer])
    exchange.start()
    kept = list(outs)
    del places, outs

    def finish() -> Tensor:
        kept.clear()
        if buffer is not None:
            transport_of(group).pool.give(buffer)
        return result

    return Handle(label, [exchange], finish, group=group, leave=exchange.leave)
