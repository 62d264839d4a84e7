"""Gathering buckets: lists of sharded tensors of one dtype become full ones, in as few copies as the layout allows."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dshard.collectives.exchange import Exchange
from dshard.collectives.group import Handle, ShardGroup
from dshard.collectives.header import ALIGN_BYTES, HEADER_BYTES, Kind, header
from dshard.collectives.memory import Take, fresh
from dshard.collectives.trace import CommRecord, record
from dshard.layout import BucketLayout, ShardLayout

__all__ = ["GatherPlan", "Gathered", "all_gather", "real_numel", "shard_of"]

_MIN_DIRECT_BYTES = 1 << 16  # of a full tensor that gets messages of its own
_ALIGN_NUMEL = 64  # of each full tensor within the memory of its bucket


def shard_of(full: Tensor, layout: ShardLayout, rank: int) -> Tensor:
    """The view of `full` that `rank` holds under `layout`."""
    if layout.dim is None:
        return full
    extent = layout.extent(rank)
    return full.narrow(layout.dim, extent.start, extent.size)


def real_numel(layouts: Sequence[ShardLayout], rank: int) -> int:
    """Elements of which `rank` is the owner; whole copies belong to rank 0."""
    return sum(x.local_numel(rank) if x.dim is not None or rank == 0 else 0 for x in layouts)


def _is_c_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether `stride` is that of a plain row-major tensor of `shape`."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= max(size, 1)
    return True


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Where everything lies in the memory of a gathered bucket, and what travels how.

    A large tensor that is cut along dim 0 is *direct*: a rank's shard goes from its own memory to its place in the full
    tensor of a peer. All others are *packed* into one row per rank, and copied out of it.

    Args:
        bucket: The tensors.
        strides: Strides, in elements, that the full tensors get.
        direct: Numbers of the tensors that get messages of their own.
        packed: Numbers of the others.
        row: Where the shards of the packed tensors lie in a row.
        offsets: Where each full tensor starts in the memory of the bucket, in elements.
        rows_offset: Where the rows start there, in elements.
        total_numel: Elements of that memory.
        key: Tells plans whose messages differ apart.
        real_numel: Elements that this rank sends to each peer, without padding.
        padding_numel: Elements of padding that it sends along.
        in_front: For each packed tensor, whether its slots are its memory, with padding behind its last row.
    """

    bucket: BucketLayout
    strides: tuple[tuple[int, ...], ...]
    direct: tuple[int, ...]
    packed: tuple[int, ...]
    row: BucketLayout
    offsets: tuple[int, ...]
    rows_offset: int
    total_numel: int
    key: int
    real_numel: int
    padding_numel: int
    in_front: tuple[bool, ...]

    @classmethod
    def of(
        cls,
        bucket: BucketLayout,
        strides: Sequence[Sequence[int]],
        dtype: torch.dtype,
        group: ShardGroup,
        *,
        min_direct_bytes: int = _MIN_DIRECT_BYTES,
    ) -> "GatherPlan":
        """Plan the gather of a bucket of `dtype` over `group`."""
        dense = [_is_c_contiguous(x.shape, s) for x, s in zip(bucket.layouts, strides, strict=True)]
        direct = tuple(
            i
            for i, layout in enumerate(bucket.layouts)
            if group.is_direct and layout.dim == 0 and dense[i] and layout.numel * dtype.itemsize >= min_direct_bytes
        )
        packed = tuple(i for i in range(len(bucket.layouts)) if i not in direct)
        row = BucketLayout.of([bucket.layouts[i] for i in packed])
        offsets, total = [], 0
        for i, layout in enumerate(bucket.layouts):
            offsets.append(total)
            in_slots = layout.dim == 0 and dense[i] and i not in direct  # the padding of the last slots lies behind it
            numel = layout.slot_numel * layout.num_ranks if in_slots else layout.numel
            total += math.ceil(numel / _ALIGN_NUMEL) * _ALIGN_NUMEL
        rows_offset = total
        if group.is_direct:
            total += row.segment_numel * bucket.num_ranks
        shapes = [(x.shape, x.dim, x.num_ranks) for x in bucket.layouts]
        key = zlib.crc32(repr((shapes, direct, str(dtype))).encode())
        return cls(
            bucket,
            tuple(map(tuple, strides)),
            direct,
            packed,
            row,
            tuple(offsets),
            rows_offset,
            max(total, 1),
            key,
            real_numel(bucket.layouts, group.rank),
            row.segment_numel - real_numel(row.layouts, group.rank),
            tuple(bucket.layouts[i].dim == 0 and dense[i] for i in packed),
        )


@dataclass(frozen=True, slots=True)
class Gathered:
    """Full tensors of a bucket.

    Args:
        tensors: One per tensor of the bucket.
        memory: What they lie in, or None where they have memory of their own.
    """

    tensors: list[Tensor]
    memory: Tensor | None = None


def all_gather(
    shards: Sequence[Tensor], plan: GatherPlan, group: ShardGroup, *, label: str, tag: int = 0, take: Take = fresh
) -> Handle[Gathered]:
    """Gather the full tensors of a bucket.

    Args:
        shards: This rank's shards, one dtype, in the order and of the shapes of the bucket. On a direct backend they
            must not change until the end.
        plan: Of the bucket.
        group: Ranks that hold the shards.
        label: Name of what is gathered; ranks that pair different labels raise.
        tag: A number that must be equal on all ranks; it stands for what the shards were written with.
        take: Where the memory of the full tensors comes from.

    Returns:
        A handle whose result is the full tensors.

    Raises:
        DivergenceError: From the handle, on every rank, if the labels or tags differ.

    Communicates:
        All-gather of the shards' elements, with padding for those that are packed, and a 64-byte header per rank.
    """
    if group.num_ranks == 1:
        return Handle(
            label, [], lambda: Gathered([_alone(s, stride) for s, stride in zip(shards, plan.strides, strict=True)])
        )
    item, sent = shards[0].element_size(), group.num_ranks - 1
    padding = plan.padding_numel * item
    if not group.is_direct:
        padding += -plan.row.segment_numel * item % ALIGN_BYTES
    real = plan.real_numel * item
    record(CommRecord("all_gather", label, group.num_ranks, real * sent, padding * sent, HEADER_BYTES * sent))
    gather = _gather_direct if group.is_direct else _gather_flat
    return gather(shards, plan, group, label, tag, take)


def _alone(shard: Tensor, stride: Sequence[int]) -> Tensor:
    """The full tensor of a single rank: its shard, unless that lies otherwise in memory than asked."""
    if shard.stride() == tuple(stride) and shard.storage_offset() == 0:
        return shard.detach()
    full = torch.empty_strided(shard.shape, tuple(stride), dtype=shard.dtype, device=shard.device)
    return full.copy_(shard)


def _gather_direct(
    shards: Sequence[Tensor], plan: GatherPlan, group: ShardGroup, label: str, tag: int, take: Take
) -> Handle[Gathered]:
    dtype = shards[0].dtype
    memory = take(plan.total_numel * dtype.itemsize, shards[0].device)
    values = memory.view(dtype)
    num_rows = plan.row.segment_numel * group.num_ranks
    rows = values[plan.rows_offset : plan.rows_offset + num_rows].view(group.num_ranks, -1)
    exchange = Exchange(group, Kind.GATHER, label, tag, plan.key)
    targets, sources = _row_slots(rows[group.rank], plan, shards)
    own: list[Tensor] = []
    for i in plan.direct:
        shard = shards[i].reshape(-1)  # dense, so this copies nothing but shards of unusual strides
        own.append(shard)
        targets.append(_part(values, plan, i, group.rank))
        sources.append(shard)
    if sources:
        torch._foreach_copy_(targets, sources)
    for peer in group.peers:
        if plan.packed and plan.row.segment_numel:
            exchange.receive(rows[peer], peer)
            exchange.send(rows[group.rank], peer)
        for i, shard in zip(plan.direct, own, strict=True):
            part = _part(values, plan, i, peer)
            if part.numel():
                exchange.receive(part, peer)
            if shard.numel():
                exchange.send(shard, peer)

    def finish() -> Gathered:
        return Gathered(_full_tensors(values, rows, plan), memory)

    what = f"all-gather of '{label}'"
    return Handle(what, exchange.works, finish, header_works=exchange.header_works, check=exchange.check)


def _part(values: Tensor, plan: GatherPlan, index: int, rank: int) -> Tensor:
    """Where the shard of `rank` lies in full tensor `index`, which is direct: flat."""
    layout = plan.bucket.layouts[index]
    extent = layout.extent(rank)
    per_row = layout.numel // layout.shape[0]
    start = plan.offsets[index] + extent.start * per_row
    return values[start : start + extent.size * per_row]


def _row_slots(row: Tensor, plan: GatherPlan, shards: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Places in this rank's row, and the packed shards that go there, flat."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for i, slot in zip(plan.packed, row.split(plan.row.slot_sizes) if plan.packed else (), strict=True):
        shard = shards[i].reshape(-1)
        if shard.numel():
            targets.append(slot if slot.numel() == shard.numel() else slot[: shard.numel()])
            sources.append(shard)
    return targets, sources


def _full_tensors(values: Tensor, rows: Tensor, plan: GatherPlan) -> list[Tensor]:
    """Views of the memory of a bucket, with the packed tensors copied out of the rows."""
    layouts = plan.bucket.layouts
    fulls = [
        torch.as_strided(values, layout.shape, stride, offset).data  # no view of `values` to autograd
        for layout, stride, offset in zip(layouts, plan.strides, plan.offsets, strict=True)
    ]
    if not plan.packed:
        return fulls
    num_ranks = rows.shape[0]
    if all(plan.in_front):
        slots = [
            values.as_strided((num_ranks, layouts[i].slot_numel), (layouts[i].slot_numel, 1), plan.offsets[i])
            for i in plan.packed
        ]
        torch.split_with_sizes_copy(rows, plan.row.slot_sizes, dim=1, out=slots)
        return fulls
    for i, part, is_front in zip(plan.packed, rows.split(plan.row.slot_sizes, dim=1), plan.in_front, strict=True):
        if is_front:
            slot_numel = layouts[i].slot_numel
            values.as_strided((num_ranks, slot_numel), (slot_numel, 1), plan.offsets[i]).copy_(part)
        else:
            _fill(fulls[i], part, layouts[i])
    return fulls


def _fill(full: Tensor, slots: Tensor, layout: ShardLayout) -> None:
    """Copy the slots of one tensor, shape (num_ranks, slot), to their places in it."""
    for rank in range(1 if layout.dim is None else layout.num_ranks):
        shard_of(full, layout, rank).copy_(slots[rank, : layout.local_numel(rank)].view(layout.local_shape(rank)))


def _gather_flat(
    shards: Sequence[Tensor], plan: GatherPlan, group: ShardGroup, label: str, tag: int, take: Take
) -> Handle[Gathered]:
    """By the backend's own all-gather, of rows that begin with a header."""
    dtype, device = shards[0].dtype, shards[0].device
    item = dtype.itemsize
    row_bytes = HEADER_BYTES + math.ceil(plan.row.segment_numel * item / ALIGN_BYTES) * ALIGN_BYTES
    raw = torch.empty((group.num_ranks, row_bytes), dtype=torch.uint8, device=device)
    rows = raw[:, HEADER_BYTES:].view(dtype)[:, : plan.row.segment_numel]
    raw[group.rank, :HEADER_BYTES].copy_(header(Kind.GATHER, label, tag))
    targets, sources = _row_slots(rows[group.rank], plan, shards)
    if sources:
        torch._foreach_copy_(targets, sources)
    works = group.all_gather(raw)

    def finish() -> Gathered:
        memory = take(plan.total_numel * item, device)
        return Gathered(_full_tensors(memory.view(dtype), rows, plan), memory)

    return Handle(f"all-gather of '{label}'", works, finish)
