"""Where the tensors of a bucket lie in memory and on the wire."""

import math
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from dshard.collectives.group import ShardGroup
from dshard.collectives.streams import stream_on
from dshard.layout import ALIGN_BYTES, MIN_DIRECT_BYTES, BucketLayout, ShardLayout

_ALIGN_BYTES = 16  # of a row, for copies in wide words; a multiple of every element size


def shard_of(full: Tensor, layout: ShardLayout, rank: int) -> Tensor:
    """The view of `full` that `rank` holds under `layout`."""
    if layout.dim is None:
        return full
    extent = layout.extent(rank)
    return full.narrow(layout.dim, extent.start, extent.size)


def put_together(slots: Tensor | Sequence[Tensor], layout: ShardLayout, full: Tensor) -> None:
    """Copy the shards of all ranks, each of shape (at least `slot_numel`,), to their places in a full tensor."""
    for part, shards in _parts_and_slots(full, layout, slots):
        part.copy_(shards)


def cut_into(full: Tensor, layout: ShardLayout, slots: Tensor) -> None:
    """Copy a full tensor into slots of its shards: the way back of `put_together`."""
    for part, shards in _parts_and_slots(full, layout, slots):
        shards.copy_(part)


def _parts_and_slots(
    full: Tensor, layout: ShardLayout, slots: Tensor | Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of a full tensor, and of slots, of the same elements: of whole shards, and of one that is shorter."""
    dim, size = layout.dim, layout.chunk_size
    if dim is None or not layout.numel:
        yield full, slots[0][: layout.numel].view(full.shape)
        return
    if not isinstance(slots, Tensor):
        for rank, slot in enumerate(slots):
            yield shard_of(full, layout, rank), slot[: layout.local_numel(rank)].view(layout.local_shape(rank))
        return
    num_whole = layout.shape[dim] // size
    part = full.narrow(dim, 0, num_whole * size).unflatten(dim, (num_whole, size)).movedim(dim, 0)
    yield part, slots[:num_whole, : layout.slot_numel].view(part.shape)
    if num_whole * size < layout.shape[dim]:
        rest = shard_of(full, layout, num_whole)
        yield rest, slots[num_whole, : rest.numel()].view(rest.shape)


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


class GatherPlan:
    """Where everything lies in the memory of a gathered bucket, and what travels how; equal ones are one object.

    A large tensor that is cut along dim 0 is *direct*: a rank's shard goes from its own memory to its place in the full
    tensor of a peer. All others are *packed* into one row per rank, and copied out of it.

    Attributes:
        bucket: The tensors.
        strides: Strides, in elements, that the full tensors get.
        direct: Numbers of the tensors that get messages of their own.
        packed: Numbers of the others.
        dtype: In which they travel, and the full tensors are.
        row: Where the shards of the packed tensors lie in a row.
        offsets: Where each full tensor starts in the memory of the bucket, in elements.
        regions: Elements from each full tensor's start to the next one's; behind them, on a direct backend, the rows'.
        row_numel: Elements of a row as it travels.
        total_numel: Elements of the memory.
        key: Tells plans whose messages differ apart.
        real_numel: Elements that this rank sends to each peer, without padding.
        padding_numel: Elements of padding that it sends along.
        in_front: For each packed tensor, whether its slots are its memory, with padding behind its last row.
        rank: This one.
        local_shapes: Of this rank's shards.
        local_numels: Elements of them.
    """

    def __init__(
        self,
        bucket: BucketLayout,
        strides: tuple[tuple[int, ...], ...],
        dtype: torch.dtype,
        group: ShardGroup,
        min_direct_bytes: int,
    ) -> None:
        self.bucket, self.strides, self.dtype = bucket, strides, dtype
        layouts = bucket.layouts
        dense = [_is_c_contiguous(x.shape, stride) for x, stride in zip(layouts, strides, strict=True)]
        self.direct = tuple(
            i
            for i, layout in enumerate(layouts)
            if group.is_direct and layout.dim == 0 and dense[i] and layout.numel * dtype.itemsize >= min_direct_bytes
        )
        self.packed = tuple(i for i in range(len(layouts)) if i not in self.direct)
        self.row = BucketLayout.of([layouts[i] for i in self.packed])
        regions, unit = [], ALIGN_BYTES // dtype.itemsize
        for i, layout in enumerate(layouts):
            in_slots = layout.dim == 0 and dense[i] and i in self.packed  # the padding of the last slots lies behind it
            numel = layout.slot_numel * layout.num_ranks if in_slots else layout.numel
            regions.append(math.ceil(numel / unit) * unit)
        self.offsets = tuple(sum(regions[:i]) for i in range(len(regions)))
        if group.is_direct:
            regions.append(self.row.segment_numel * bucket.num_ranks)
        self.regions, self.total_numel = tuple(regions), sum(regions)
        self.in_front = tuple(layouts[i].dim == 0 and dense[i] for i in self.packed)
        align = 1 if group.is_direct or self.is_in_rows else max(1, _ALIGN_BYTES // dtype.itemsize)
        self.row_numel = math.ceil(self.row.segment_numel / align) * align
        shapes = [(x.shape, x.dim, x.num_ranks) for x in layouts]
        self.key = zlib.crc32(repr((shapes, self.direct, str(dtype))).encode())
        self.real_numel = real_numel(layouts, group.rank)
        self.padding_numel = self.row_numel - real_numel(self.row.layouts, group.rank)
        self.rank = group.rank
        self.local_shapes = tuple(x.local_shape(group.rank) for x in layouts)
        self.local_numels = tuple(x.local_numel(group.rank) for x in layouts)

    @classmethod
    def of(
        cls,
        bucket: BucketLayout,
        strides: Sequence[Sequence[int]],
        dtype: torch.dtype,
        group: ShardGroup,
        *,
        min_direct_bytes: int = MIN_DIRECT_BYTES,
    ) -> "GatherPlan":
        """Plan the gather of a bucket of `dtype` over `group`."""
        as_tuples = tuple(map(tuple, strides))
        key = bucket, as_tuples, dtype, group.rank, group.is_direct, min_direct_bytes
        known = _PLANS.get(key)
        if known is None:
            known = _PLANS[key] = cls(bucket, as_tuples, dtype, group, min_direct_bytes)
        return known

    @property
    def is_in_rows(self) -> bool:
        """Whether the rows, as a backend's own all-gather leaves them, are the memory of the only full tensor."""
        return len(self.in_front) == len(self.bucket.layouts) == 1 and self.in_front[0]

    def places(self, memory: Tensor) -> "Places":
        """Cut the memory of the full tensors, as `Buffer.cut` takes it."""
        return Places.of(self, memory)

    def rows(self, memory: Tensor) -> "Rows":
        """Cut the memory of what a backend's own all-gather gives, as `Buffer.cut` takes it."""
        return Rows.of(self, memory)

    def slots_in(self, row: Tensor) -> list[Tensor]:
        """Where the packed ones of this rank's shards lie in a row: in their shapes.

        Args:
            row: At least `row.segment_numel` elements.
        """
        slots = torch.split_with_sizes(row[: self.row.segment_numel], self.row.slot_sizes)
        shapes = [self.local_shapes[i] for i in self.packed]
        return [slot[: math.prod(shape)].view(shape) for slot, shape in zip(slots, shapes, strict=True)]

    def pack(self, shards: Sequence[Tensor], slots: list[Tensor]) -> None:
        """Copy the packed ones of this rank's shards to their places.

        Args:
            shards: One per tensor of the bucket, of any dtype.
            slots: What `slots_in` gave.
        """
        if slots:
            values = [shards[i] for i in self.packed]
            if not all(map(Tensor.is_contiguous, values)):  # which one kernel would not take, together with others
                values = [value.contiguous() for value in values]
            torch._foreach_copy_(slots, values)

    @property
    def send_numel(self) -> int:
        """Elements of a row of all of this rank's shards, with the padding of one that travels."""
        return max(self.row_numel, self.bucket.segment_numel)

    def slots(self, row: Tensor) -> list[Tensor]:
        """Where this rank's shards lie in a row of all of them, direct ones too: flat."""
        slots = row[: self.bucket.segment_numel].split(self.bucket.slot_sizes)
        return [slot[:numel] for slot, numel in zip(slots, self.local_numels, strict=True)]


_PLANS: "weakref.WeakValueDictionary[Any, GatherPlan]" = weakref.WeakValueDictionary()  # by what they are made of


class SendRow:
    """This rank's shards of a bucket, moved to lie one behind the other: what a gather sends without a copy.

    Args:
        shards: This rank's shards, in the order of the bucket; not referenced afterwards.
        plan: Of the bucket.
        pins: Whether the row lies in pinned memory.
    """

    __slots__ = ("_addresses", "_cast", "_cast_of", "row", "shards")

    def __init__(self, shards: Sequence[Tensor], plan: GatherPlan, *, pins: bool = False) -> None:
        first = shards[0]
        self.row = torch.zeros(plan.send_numel, dtype=first.dtype, device=first.device, pin_memory=pins)
        parts = plan.slots(self.row)
        torch._foreach_copy_(parts, [shard.reshape(-1) for shard in shards])
        stream = stream_on(first.device)
        for shard in shards if stream is not None else ():
            shard.record_stream(stream)  # it may have been made in another one
        # Each with a version counter of its own, that goes on from the old one: a write to one shard is none to the
        # others, and what remembers a version of the old memory is not met by a later write.
        self.shards = [part.view(shard.shape).data for part, shard in zip(parts, shards, strict=True)]
        versions = tuple(shard._version for shard in shards)
        torch._C._autograd._unsafe_set_version_counter(tuple(self.shards), versions)
        self._addresses = [shard.data_ptr() for shard in self.shards]
        self._cast: Tensor | None = None
        self._cast_of: list[int] = []  # versions of the shards that it is of

    def cast_into(self, memory: Tensor) -> None:
        """Write the row in another dtype, for all of what it holds was written to.

        Args:
            memory: Flat, at least as many elements of that dtype; may be written to again after `drop_cast`.
        """
        self._cast_of = []
        versions = [shard._version for shard in self.shards]  # ahead of the copy: who writes beside it counts later
        self._cast = memory[: self.row.numel()].copy_(self.row)
        self._cast_of = versions

    def drop_cast(self) -> None:
        """Let go of the memory for the other dtype; nothing may be copied from it any more."""
        self._cast, self._cast_of = None, []

    def travelling(self) -> Tensor:
        """The row, in the other dtype if nobody has written to the shards since it was cast to that."""
        if self._cast is None or self._cast_of != [shard._version for shard in self.shards]:
            return self.row
        return self._cast

    def holds(self, shards: Sequence[Tensor | None]) -> bool:
        """Whether these are its shards, and still lie in it."""
        return all(map(is_, shards, self.shards)) and list(map(Tensor.data_ptr, self.shards)) == self._addresses


@dataclass(frozen=True, slots=True)
class Places:
    """Where a plan puts everything in the memory of a bucket."""

    fulls: list[Tensor]  # the full tensors
    slots: list[Any]  # the place of each packed tensor, shape (num_ranks, slot), where that is its memory; else None
    values: Tensor | None  # all of it, flat; on a direct backend, else None
    rows: Tensor | None  # the packed rows of all ranks, shape (num_ranks, row); on a direct backend, else None
    own: list[Tensor]  # of these, where this rank's shards lie in its own; on a direct backend

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that share the memory."""
        return tuple(t for t in (*self.fulls, *self.slots, self.values, self.rows, *self.own) if t is not None)

    @classmethod
    def of(cls, plan: GatherPlan, memory: Tensor) -> "Places":
        """Cut the memory of a bucket; each full tensor has a version counter of its own."""
        values, num_ranks = memory.view(plan.dtype), plan.bucket.num_ranks
        regions = torch.unsafe_split_with_sizes(values, plan.regions)
        fulls = [
            torch.as_strided(region, layout.shape, stride)
            for region, layout, stride in zip(regions, plan.bucket.layouts, plan.strides, strict=False)
        ]
        slots = [
            torch.as_strided(regions[i], (num_ranks, size), (size, 1)) if is_front else None
            for i, size, is_front in zip(plan.packed, plan.row.slot_sizes, plan.in_front, strict=True)
        ]
        if len(regions) == len(fulls):
            return cls(fulls, slots, None, None, [])
        rows = regions[-1].view(num_ranks, -1)
        return cls(fulls, slots, values, rows, plan.slots_in(rows[plan.rank]))


@dataclass(frozen=True, slots=True)
class Rows:
    """What a backend's own all-gather gives: a row of shards of each rank."""

    flat: Tensor  # all of them
    own: Tensor  # this rank's, with padding behind it
    slots: list[Tensor]  # where this rank's shards lie in it, in their shapes
    segments: Tensor  # the rows without their padding, shape (num_ranks, segment)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that share the memory."""
        return (self.flat, self.own, *self.slots, self.segments)

    @classmethod
    def of(cls, plan: GatherPlan, memory: Tensor) -> "Rows":
        """Cut the memory of the rows of a plan."""
        flat = memory.view(plan.dtype)
        rows = flat.view(plan.bucket.num_ranks, plan.row_numel)
        own = rows[plan.rank]
        return cls(flat, own, plan.slots_in(own), rows[:, : plan.row.segment_numel])
