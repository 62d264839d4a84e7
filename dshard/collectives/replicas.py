"""Reduced shards of several replicas become equal ones."""

import math
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from dshard.collectives import ledger
from dshard.collectives._c10d import ReduceOp
from dshard.collectives.arena import Arena
from dshard.collectives.exchange import Exchange, shared_memory_of
from dshard.collectives.group import Handle, ShardGroup
from dshard.collectives.header import Kind
from dshard.collectives.memory import Buffer, BufferPool
from dshard.collectives.trace import record
from dshard.layout import HEADER_BYTES

_Steps = Generator[Handle[None], None, None]


def all_reduce_row(
    row: Tensor,
    replicas: ShardGroup,
    *,
    mean: bool,
    label: str,
    tag: int,
    pool: BufferPool,
    num_flags: int = 0,
    on_other_tags: Callable[[ShardGroup], None] | None = None,
) -> _Steps:
    """Reduce a row over the ranks that hold the same shards, step by step, as `Steps` takes them.

    On a direct backend each rank adds a part of the row, in a fixed order, and then sends it to the others: two steps.

    Args:
        row: One-dimensional, of one size on all ranks; overwritten. At the end it is equal on all of them.
        replicas: Those ranks; if the row is replicated across several such groups, it is then reduced over these, too.
        mean: Divide by their number.
        label: Of what unit.
        tag: A number that must be equal on all of them; it stands for what the shards were written with.
        pool: Where buffers come from and go to.
        num_flags: Elements at the beginning of the row that are no values of the program; counted with headers.
        on_other_tags: Called on all of them where the tags differ, with those ranks; may raise. Without it, and on a
            backend that is not direct, tags that differ are an error.

    Yields:
        The handle of each step; waiting for it raises a DivergenceError if they are at different units, or `tag`
        differs.

    Communicates:
        All-reduce of the row: `2 (R - 1) / R` of its bytes over `R` replicas.
    """
    if replicas.is_direct:
        yield from _all_reduce_direct(row, replicas, mean, label, tag, pool, num_flags, on_other_tags)
    else:
        yield from _all_reduce_flat(row, replicas, mean, label, tag, num_flags)
    if replicas.replicas is not None:
        others = replicas.replicas
        options: dict[str, Any] = {"pool": pool, "num_flags": num_flags, "on_other_tags": on_other_tags}
        yield from all_reduce_row(row, others, mean=mean, label=label, tag=tag, **options)


def _all_reduce_flat(row: Tensor, replicas: ShardGroup, mean: bool, label: str, tag: int, num_flags: int) -> _Steps:
    """Reduce by the backend's own all-reduce."""
    num_bytes, num_ranks = row.numel() * row.element_size(), replicas.num_ranks
    sent, flags = 2 * num_bytes * (num_ranks - 1) // num_ranks, _bytes_of_flags(num_flags, row, replicas)
    record("all_reduce", label, replicas, sent - flags, 0, flags)
    ledger.note(replicas, Kind.REDUCE, label, tag)
    native_mean = mean and replicas.has_means
    works = replicas.all_reduce(row, ReduceOp.MEAN if native_mean else ReduceOp.SUM)
    yield Handle(f"all-reduce of '{label}'", works, lambda: None, group=replicas)
    if mean and not native_mean:
        row.div_(num_ranks)


def _all_reduce_direct(
    row: Tensor,
    replicas: ShardGroup,
    mean: bool,
    label: str,
    tag: int,
    pool: BufferPool,
    num_flags: int,
    on_other_tags: Callable[[ShardGroup], None] | None,
) -> _Steps:
    """Each rank adds its part straight from what the peers sent, or from their memory; then the parts are swapped."""
    arena, memory = shared_memory_of(replicas), None
    size = math.ceil(row.numel() / replicas.num_ranks)
    parts = _split(row, size, replicas.num_ranks)
    own, outs = parts[replicas.rank], {peer: parts[peer] for peer in replicas.peers}
    if arena is not None:  # peers read from copies, each of which stays until they have: first of their parts
        memory = _copy(outs, pool, arena)
    sent = sum(parts[peer].numel() + own.numel() for peer in replicas.peers) * row.element_size()
    flags = _bytes_of_flags(num_flags, row, replicas)
    record("all_reduce", label, replicas, sent - flags, 0, flags + 2 * HEADER_BYTES * len(replicas.peers))

    is_lenient = on_other_tags is not None
    scatter = Exchange(replicas, Kind.REDUCE, label, tag, row.nbytes, takes_any_tag=is_lenient)
    scatter.expect(own.numel(), row.dtype, pool)
    if memory is not None:
        scatter.lies_in(memory)
    for peer in replicas.peers:
        if outs[peer].numel():
            scatter.send(outs[peer], peer)
    scatter.start()
    outs.clear()
    yield _handle(scatter, label, replicas)
    if own.numel():
        received = [own if rank == replicas.rank else scatter.received(rank) for rank in range(replicas.num_ranks)]
        own.copy_(sum_in_pairs(received, mean=mean))
        del received
    scatter.end_reading()
    tags_differ = scatter.tags_differ
    del scatter
    if tags_differ and on_other_tags is not None:
        on_other_tags(replicas)
    sums = {replicas.rank: own}
    gather = Exchange(replicas, Kind.GATHER, label, tag, row.nbytes, takes_any_tag=is_lenient)
    if memory is not None and arena is not None:
        pool.give(memory)
        memory = _copy(sums, pool, arena)  # then of this rank's
        gather.lies_in(memory)
    for peer in replicas.peers:
        gather.swap(parts[peer], sums[replicas.rank], peer)
    gather.start()
    del sums
    yield _handle(gather, label, replicas)
    if memory is not None:
        pool.give(memory)


def _copy(parts: dict[int, Tensor], pool: BufferPool, arena: Arena) -> Buffer:
    """Put copies in an arena, one behind the other, in the place of some tensors of one dtype."""
    buffer = pool.take(sum(part.nbytes for part in parts.values()), torch.device("cpu"), arena)
    start = 0
    for key, part in parts.items():
        parts[key] = buffer.memory[start : start + part.nbytes].view(part.dtype).copy_(part)
        start += part.nbytes
    return buffer


def _split(row: Tensor, size: int, num_ranks: int) -> list[Tensor]:
    """A part of each rank; the last ones may be shorter."""
    return [row[rank * size : (rank + 1) * size] for rank in range(num_ranks)]


def _bytes_of_flags(num_flags: int, row: Tensor, replicas: ShardGroup) -> int:
    """What a rank sends of them, taken as even."""
    return 2 * num_flags * row.element_size() * (replicas.num_ranks - 1) // replicas.num_ranks


def _handle(exchange: Exchange, label: str, group: ShardGroup) -> Handle[None]:
    return Handle(f"all-reduce of '{label}'", exchange, lambda: None, group=group)


def sum_in_pairs(parts: list[Tensor], *, mean: bool) -> Tensor:
    """Add one row of each rank, neighbours in pairs, then pairs of pairs; 16-bit floats are added in fp32.

    In that order the sums of `k` neighbours each, added up, give the same bits as all ranks at once, where `k` is a
    power of two: whatever is sharded over how many ranks, and replicated across.
    """
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = _sum_of_pairs(parts, wide)
    if mean:
        total.div_(len(parts))
    return total.to(dtype)


def _sum_of_pairs(parts: list[Tensor], wide: torch.dtype) -> Tensor:
    """The sum of at least two rows, in new memory."""
    if len(parts) == 2:
        return torch.add(parts[0].to(wide), parts[1])
    num_left = 1 << (len(parts) - 1).bit_length() - 1  # the largest power of two below
    left, right = parts[:num_left], parts[num_left:]
    return _sum_of_pairs(left, wide).add_(right[0] if len(right) == 1 else _sum_of_pairs(right, wide))
