"""Gathering buckets: lists of sharded tensors of one dtype become full ones, in as few copies as the layout allows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dshard.collectives import ledger
from dshard.collectives.divergence import Kind
from dshard.collectives.exchange import Exchange, shared_memory_of
from dshard.collectives.group import Handle, ShardGroup
from dshard.collectives.memory import Buffer, BufferPool
from dshard.collectives.plan import GatherPlan, Places, put_together
from dshard.collectives.streams import follow, stream_on
from dshard.collectives.trace import is_recording, record
from dshard.layout import HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Gathered:
    """Full tensors of a bucket.

    Args:
        tensors: One per tensor of the bucket; not to be changed.
        memory: What they lie in, or None where they have memory of their own.
    """

    tensors: list[Tensor]
    memory: Buffer | None = None


def all_gather(
    shards: Sequence[Tensor],
    plan: GatherPlan,
    group: ShardGroup,
    *,
    label: str,
    tag: int = 0,
    pool: BufferPool | None = None,
    row: Tensor | None = None,
    is_beside: bool = False,
) -> Handle[Gathered]:
    """Gather the full tensors of a bucket.

    Args:
        shards: This rank's shards, one dtype, in the order and of the shapes of the bucket; they travel in the plan's
            dtype. On a direct backend they must not change until the end.
        plan: Of the bucket.
        group: Ranks that hold the shards.
        label: Name of what is gathered; ranks that pair different labels raise.
        tag: A number that must be equal on all ranks; it stands for what the shards were written with.
        pool: Where buffers come from; that of the full tensors is the caller's to give back. By default they are new.
        row: The memory of a `SendRow` that the shards lie in, if they do; must not change until the end.
        is_beside: Whether the current stream is a `SideStream`, which takes care of its memory.

    Returns:
        A handle whose result is the full tensors.

    Raises:
        DivergenceError: From the handle, on every rank, if the labels or tags differ; on a backend that is not direct,
            from the next `settle`.

    Communicates:
        All-gather of the shards' elements, with padding for those that are packed; on a direct backend behind a
        header of 64 bytes.
    """
    if group.num_ranks == 1:
        return Handle(
            label,
            [],
            lambda: Gathered([_alone(s, plan.dtype, stride) for s, stride in zip(shards, plan.strides, strict=True)]),
        )
    record_gather(plan, group, label)
    pool = pool or BufferPool()
    if group.is_direct:
        return _gather_direct(shards, plan, group, label, tag, pool)
    return _gather_flat(shards, plan, group, label, tag, pool, row, is_beside=is_beside)


def record_gather(plan: GatherPlan, group: ShardGroup, label: str) -> None:
    """Have open traces count a gather."""
    if not is_recording():
        return
    item, sent = plan.dtype.itemsize, group.num_ranks - 1
    real, padding = plan.real_numel * item, plan.padding_numel * item
    header_bytes = HEADER_BYTES if group.is_direct else 0
    record("all_gather", label, group, real * sent, padding * sent, header_bytes * sent)


def _alone(shard: Tensor, dtype: torch.dtype, stride: Sequence[int]) -> Tensor:
    """The full tensor of a single rank: its shard, unless that lies otherwise in memory than asked."""
    if shard.stride() == tuple(stride) and shard.storage_offset() == 0 and shard.dtype == dtype:
        return shard.detach()
    full = torch.empty_strided(shard.shape, tuple(stride), dtype=dtype, device=shard.device)
    return full.copy_(shard)


def _converted(shards: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """This rank's shards in the dtype in which they travel."""
    if shards[0].dtype == dtype:
        return shards
    memory = torch.empty(sum(s.numel() for s in shards), dtype=dtype, device=shards[0].device)
    converted = [part.view(s.shape) for part, s in zip(memory.split([s.numel() for s in shards]), shards, strict=True)]
    torch._foreach_copy_(converted, list(shards))
    return converted


def _gather_direct(
    shards: Sequence[Tensor], plan: GatherPlan, group: ShardGroup, label: str, tag: int, pool: BufferPool
) -> Handle[Gathered]:
    """Every rank sends its shards to each peer."""
    dtype, shards = plan.dtype, _converted(shards, plan.dtype)
    num_bytes, device = plan.total_numel * dtype.itemsize, shards[0].device
    memory = pool.take(num_bytes, device, shared_memory_of(group), make=plan.places)
    places: Places = memory.cut(plan.places)
    values, rows = places.values, places.rows
    assert values is not None
    assert rows is not None
    exchange = Exchange(group, Kind.GATHER, label, tag, plan.key, memory)
    plan.pack(shards, places.own)
    own = [shards[i].reshape(-1) for i in plan.direct]  # dense, so this copies nothing but shards of unusual strides
    if own:
        torch._foreach_copy_([_part(values, plan, i, group.rank) for i in plan.direct], own)
    packed = rows[group.rank]
    for peer in group.peers:
        if plan.packed:
            exchange.swap(rows[peer], packed, peer)
        for i, shard in zip(plan.direct, own, strict=True):
            exchange.swap(_part(values, plan, i, peer), shard, peer)
    exchange.start()

    def finish() -> Gathered:
        _unpack(rows, places, plan)
        return Gathered(places.fulls, memory)

    return Handle(f"all-gather of '{label}'", [exchange], finish, group=group, leave=exchange.leave)


def _part(values: Tensor, plan: GatherPlan, index: int, rank: int) -> Tensor:
    """Where the shard of `rank` lies in full tensor `index`, which is direct: flat."""
    layout = plan.bucket.layouts[index]
    extent = layout.extent(rank)
    per_row = layout.numel // max(1, layout.shape[0])
    start = plan.offsets[index] + extent.start * per_row
    return values[start : start + extent.size * per_row]


def _unpack(rows: Tensor, places: Places, plan: GatherPlan) -> None:
    """Copy the packed tensors out of the rows."""
    if not plan.packed:
        return
    if all(plan.in_front):
        torch.split_with_sizes_copy(rows, plan.row.slot_sizes, dim=1, out=places.slots)
        return
    for i, part, slot in zip(plan.packed, rows.split(plan.row.slot_sizes, dim=1), places.slots, strict=True):
        if slot is not None:
            slot.copy_(part)
        else:
            put_together(part, plan.bucket.layouts[i], places.fulls[i])


def _gather_flat(
    shards: Sequence[Tensor],
    plan: GatherPlan,
    group: ShardGroup,
    label: str,
    tag: int,
    pool: BufferPool,
    row: Tensor | None,
    *,
    is_beside: bool,
) -> Handle[Gathered]:
    """Gather by the backend's own all-gather, of one row per rank."""
    dtype, device = plan.dtype, shards[0].device
    begun_in = stream_on(device) if not is_beside else None
    received, rows = group.rows_for_gather(plan.row_numel, dtype, device, pool, plan.rows)
    if row is None:
        plan.pack(shards, rows.slots)
    elif group.comms.memory is not None:
        rows.own.copy_(row)
        row = None
    ledger.note(group, Kind.GATHER, label, tag)
    works = group.all_gather(rows.flat, rows.own if row is None else row)

    def finish() -> Gathered:
        nonlocal row
        if begun_in is not None:
            follow(stream_on(device), begun_in, (rows.flat,) if row is None else (rows.flat, row))
        row = None
        if plan.is_in_rows:
            full = torch.as_strided(rows.flat, plan.bucket.layouts[0].shape, plan.strides[0])
            return Gathered([full.data], received)
        memory = pool.take(plan.total_numel * dtype.itemsize, device, make=plan.places)
        places: Places = memory.cut(plan.places)
        _unpack(rows.segments, places, plan)
        if received is not None:
            pool.give(received)
        return Gathered(places.fulls, memory)

    return Handle(f"all-gather of '{label}'", works, finish, group=group)
