"""Gather and reduce-scatter of buckets: lists of tensors of one dtype that travel together."""

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from dshard.collectives.group import Handle, ShardGroup
from dshard.collectives.header import ALIGN_BYTES, HEADER_BYTES, check_headers
from dshard.collectives.header import header as make_header
from dshard.collectives.trace import CommRecord, record
from dshard.errors import DivergenceError
from dshard.layout import BucketLayout, ShardLayout

__all__ = ["ReduceBucket", "Reduced", "all_gather", "shard_of"]


def shard_of(full: Tensor, layout: ShardLayout, rank: int) -> Tensor:
    """The view of `full` that `rank` holds under `layout`."""
    if layout.dim is None:
        return full
    extent = layout.extent(rank)
    return full.narrow(layout.dim, extent.start, extent.size)


def _real_numel(bucket: BucketLayout, rank: int) -> int:
    """Elements of the bucket of which `rank` is the owner; whole copies belong to rank 0."""
    return sum(x.local_numel(rank) if x.dim is not None or rank == 0 else 0 for x in bucket.layouts)


def _is_c_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether `stride` is that of a plain row-major tensor of `shape`."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= max(size, 1)
    return True


def all_gather(
    shards: Sequence[Tensor],
    bucket: BucketLayout,
    group: ShardGroup,
    *,
    label: str,
    strides: Sequence[Sequence[int]],
    tag: int = 0,
) -> Handle[list[Tensor]]:
    """Gather the full tensors of a bucket.

    Args:
        shards: This rank's shards, one dtype, in the order and of the shapes of `bucket`.
        bucket: Layout of the bucket.
        group: Ranks that hold the shards.
        label: Name of what is gathered; ranks that pair different labels raise.
        strides: Strides, in elements, that the full tensors get.
        tag: A number that must be equal on all ranks; it stands for what the shards were written with.

    Returns:
        A handle whose result is the full tensors, in memory of their own.

    Raises:
        DivergenceError: From the handle, on every rank that received another label or tag than its own.

    Communicates:
        All-gather of `bucket.segment_numel` elements and a 64-byte header per rank.
    """
    dtype, device, num_ranks = shards[0].dtype, shards[0].device, group.num_ranks
    if num_ranks == 1:
        return Handle(label, [], lambda: [_alone(s, stride) for s, stride in zip(shards, strides, strict=True)])
    item = shards[0].element_size()
    row_bytes = HEADER_BYTES + math.ceil(bucket.segment_numel * item / ALIGN_BYTES) * ALIGN_BYTES
    raw = torch.empty((num_ranks, row_bytes), dtype=torch.uint8, device=device)
    rows = raw[:, HEADER_BYTES:].view(dtype)[:, : bucket.segment_numel]
    mine, header = rows[group.rank], make_header(label, tag)
    raw[group.rank, :HEADER_BYTES].copy_(header)
    sources = [s for s in shards if s.numel()]
    slots = [
        mine[offset : offset + shard.numel()].view(shard.shape)
        for offset, shard in zip(bucket.offsets, shards, strict=True)
        if shard.numel()
    ]
    if sources:
        torch._foreach_copy_(slots, sources)
    works = group.all_gather(raw)
    real = _real_numel(bucket, group.rank) * item
    sent = num_ranks - 1
    record(
        CommRecord(
            "all_gather", label, num_ranks, real * sent, (row_bytes - HEADER_BYTES - real) * sent, HEADER_BYTES * sent
        )
    )

    def finish() -> list[Tensor]:
        if device.type == "cpu" and group.backend != "fake":
            check_headers(raw[:, :HEADER_BYTES], header, label)
        return _unpack(rows, bucket, strides)

    return Handle(f"all-gather of '{label}'", works, finish)


def _alone(shard: Tensor, stride: Sequence[int]) -> Tensor:
    """The full tensor of a single rank: its shard, unless that lies otherwise in memory than asked."""
    if shard.stride() == tuple(stride) and shard.storage_offset() == 0:
        return shard.detach()
    full = torch.empty_strided(shard.shape, tuple(stride), dtype=shard.dtype, device=shard.device)
    return full.copy_(shard)


def _unpack(rows: Tensor, bucket: BucketLayout, strides: Sequence[Sequence[int]]) -> list[Tensor]:
    """Copy the slots of all ranks, shape (num_ranks, segment), into full tensors."""
    in_front = [x.dim == 0 and _is_c_contiguous(x.shape, s) for x, s in zip(bucket.layouts, strides, strict=True)]
    if not all(in_front):
        slots = torch.split(rows, bucket.slot_sizes, dim=1)
        return [_unpack_one(*item) for item in zip(slots, bucket.layouts, strides, in_front, strict=True)]
    flats = [rows.new_empty((rows.shape[0], size)) for size in bucket.slot_sizes]
    torch.split_with_sizes_copy(rows, bucket.slot_sizes, dim=1, out=flats)
    return [_front(flat, layout) for flat, layout in zip(flats, bucket.layouts, strict=True)]


def _unpack_one(slots: Tensor, layout: ShardLayout, stride: Sequence[int], in_front: bool) -> Tensor:
    """Put the slots of one tensor, shape (num_ranks, slot), together."""
    if in_front:
        return _front(slots.clone(memory_format=torch.contiguous_format), layout)
    full = torch.empty_strided(layout.shape, tuple(stride), dtype=slots.dtype, device=slots.device)
    for rank in range(1 if layout.dim is None else layout.num_ranks):
        shard = slots[rank, : layout.local_numel(rank)].view(layout.local_shape(rank))
        shard_of(full, layout, rank).copy_(shard)
    return full


def _front(flat: Tensor, layout: ShardLayout) -> Tensor:
    """The full tensor in contiguous slots: padding of a cut along dim 0 lies behind its last row."""
    return flat.view(-1)[: layout.numel].view(layout.shape)


class ReduceBucket:
    """Full gradients of a bucket on their way to a reduce-scatter.

    Each gradient is copied into the send buffer as it arrives, so that its own memory can go. A tensor that got no
    gradient on this rank counts as zero; whether *any* rank had one travels along.

    Args:
        bucket: Layout of the gradients.
        group: Ranks to reduce over.
        dtype: Dtype of the gradients and of the reduction.
        device: Where the gradients live.
        label: Name of what is reduced; on a direct backend, ranks that pair different labels raise.
    """

    def __init__(
        self, bucket: BucketLayout, group: ShardGroup, *, dtype: torch.dtype, device: torch.device, label: str
    ) -> None:
        self._bucket, self._group, self._label = bucket, group, label
        self._prefix = math.ceil((1 + len(bucket.layouts)) / 16) * 16
        row = self._prefix + bucket.segment_numel
        self._rows: Tensor | None = torch.empty((group.num_ranks, row), dtype=dtype, device=device)
        self._present = [False] * len(bucket.layouts)

    @property
    def is_complete(self) -> bool:
        """Whether every tensor of the bucket has a gradient."""
        return all(self._present)

    def has(self, index: int) -> bool:
        """Whether tensor `index` has a gradient on this rank."""
        return self._present[index]

    def discard(self, index: int) -> None:
        """Forget the gradient of tensor `index`."""
        self._present[index] = False

    def add(self, index: int, grad: Tensor) -> None:
        """Pack the full gradient of tensor `index`, on top of one that is there."""
        assert self._rows is not None, "a gradient arrived after its bucket had left"
        layout = self._bucket.layouts[index]
        start = self._prefix + self._bucket.offsets[index]
        slots = self._rows[:, start : start + layout.slot_numel]
        accumulate = self._present[index]
        self._present[index] = True
        if layout.dim == 0 and layout.is_even and grad.is_contiguous():
            target = grad.view(slots.shape)
            slots.add_(target) if accumulate else slots.copy_(target)
            return
        for rank in range(layout.num_ranks):
            shard = shard_of(grad, layout, rank)
            slot = slots[rank, : shard.numel()].view(shard.shape)
            slot.add_(shard) if accumulate else slot.copy_(shard)

    def launch(self, *, mean: bool) -> Handle["Reduced"]:
        """Start the reduce-scatter. The bucket takes no more gradients.

        Returns:
            A handle whose result is this rank's shards of the reduced gradients.

        Communicates:
            Reduce-scatter of `bucket.segment_numel` elements, one stamp and one flag per tensor, per rank.
        """
        assert self._rows is not None, "a bucket leaves once"
        rows, self._rows = self._rows, None
        stamp = zlib.crc32(self._label.encode()) % 251  # exact in every float format
        flags = [float(x) for x in self._present]
        rows[:, 0] = stamp
        rows[:, 1 : 1 + len(flags)] = torch.tensor(flags, dtype=rows.dtype, device=rows.device)
        for layout, offset, present in zip(self._bucket.layouts, self._bucket.offsets, self._present, strict=True):
            if not present:
                rows[:, self._prefix + offset : self._prefix + offset + layout.slot_numel] = 0
        self._record(rows)
        works, finish = self._group.reduce_scatter(rows, mean=mean)
        total = stamp if mean else stamp * self._group.num_ranks
        expected = torch.tensor(total, dtype=rows.dtype) if self._group.is_direct else None
        return Handle(f"reduce-scatter of '{self._label}'", works, lambda: self._finish(finish(), expected))

    def _record(self, rows: Tensor) -> None:
        group, item = self._group, rows.element_size()
        sent = (group.num_ranks - 1) * rows.shape[1] * item
        if not sent:
            return
        real = sum(_real_numel(self._bucket, r) for r in range(group.num_ranks) if r != group.rank) * item
        header = (group.num_ranks - 1) * self._prefix * item
        record(CommRecord("reduce_scatter", self._label, group.num_ranks, real, sent - real - header, header))

    def _finish(self, row: Tensor, expected_stamp: Tensor | None) -> "Reduced":
        if expected_stamp is not None and not torch.equal(row[0], expected_stamp):
            raise DivergenceError(
                f"unit '{self._label}': all ranks must reduce the gradients of the same unit at the same time, but "
                "another rank sent those of another unit. Make every rank run the same modules in the same order."
            )
        shards = []
        for layout, offset in zip(self._bucket.layouts, self._bucket.offsets, strict=True):
            start = self._prefix + offset
            shape = layout.local_shape(self._group.rank)
            shards.append(row[start : start + math.prod(shape)].view(shape))
        return Reduced(shards, row[1 : 1 + len(shards)])


class Reduced:
    """This rank's shards of the reduced gradients of a bucket.

    Args:
        shards: One per tensor.
        flags: One per tensor, above zero where some rank had a gradient.
    """

    __slots__ = ("_flags", "shards")

    def __init__(self, shards: list[Tensor], flags: Tensor) -> None:
        self.shards = shards
        self._flags = flags

    def anywhere(self, index: int) -> bool:
        """Whether any rank had a gradient of tensor `index`; waits for the device."""
        return bool(self._flags[index].real.item() > 0)
