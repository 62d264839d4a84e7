"""Weights that travel in slices: each is gathered, or its gradient reduced, while the one before it is computed with.

Slice `j` of `q` takes the same part of every rank's shard, so every rank sends and receives as much for each of them,
and all of them together send what the whole weight would. Its rows are scattered over the weight, in runs of one
length: one run per shard, of which the last may be shorter.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dshard import collectives
from dshard.autograd.modes import outside_autograd, profiled
from dshard.collectives import (
    Gathered,
    GatherPlan,
    Handle,
    ReduceBucket,
    Reduced,
    ReducePlan,
    Steps,
    all_reduce_row,
    with_comms,
)
from dshard.gradients.reducer import Reducer
from dshard.gradients.reduction import reduce_steps, told_label
from dshard.layout import BucketLayout, ShardLayout
from dshard.tensor import ShardedTensor
from dshard.tensor.shard_storage import ShardStorage
from dshard.units.buckets import Bucket
from dshard.units.residency import refuse_meta
from dshard.units.unit import Unit


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a weight in one slice: of each shard those from `start` to `stop`, as far as it has them.

    Args:
        layout: How the weight is cut, along dim 0.
        start: First row in a shard.
        stop: Behind the last one.
    """

    layout: ShardLayout
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Rows of a whole shard in it."""
        return self.stop - self.start

    @property
    def num_whole(self) -> int:
        """Shards that are not shorter than the others."""
        return self.layout.shape[0] // self.layout.chunk_size

    @property
    def num_rest(self) -> int:
        """Rows in it of the one shard that may be shorter."""
        rest = self.layout.shape[0] - self.num_whole * self.layout.chunk_size
        return max(0, min(self.stop, rest) - self.start)

    @property
    def num_rows(self) -> int:
        """How many there are."""
        return self.num_whole * self.size + self.num_rest

    @property
    def sliced_layout(self) -> ShardLayout:
        """How the slice, as a tensor of its own, is cut: each rank holds the rows of its shard."""
        return ShardLayout((self.num_rows, *self.layout.shape[1:]), 0, self.layout.num_ranks)

    def of_shard(self, shard: Tensor, rank: int) -> Tensor:
        """The part of a rank's shard that is in it."""
        size = self.layout.extent(rank).size
        start = min(self.start, size)
        return shard[start : min(self.stop, size)] if start else shard[: min(self.stop, size)]

    def _places(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Its elements of `values`, whose last dim is that of the rows: those of whole shards, and the rest."""
        chunk = self.layout.chunk_size
        end = self.num_whole * chunk
        whole = values[..., :end].unflatten(-1, (self.num_whole, chunk))[..., self.start : self.stop]
        return whole, values[..., end + self.start : end + self.start + self.num_rest]

    def take(self, values: Tensor) -> Tensor:
        """Its elements of `values`, shape (..., rows of the weight), as (..., rows of the slice)."""
        whole, rest = self._places(values)
        return torch.cat([whole.flatten(-2), rest], -1) if self.num_rest else whole.flatten(-2)

    def put(self, values: Tensor, into: Tensor) -> None:
        """Copy `values`, shape (..., rows of the slice), to their places in (..., rows of the weight)."""
        whole, rest = self._places(into)
        end = self.num_whole * self.size
        whole.copy_(values[..., :end].unflatten(-1, (self.num_whole, self.size)))
        if self.num_rest:
            rest.copy_(values[..., end:])

    def find(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Which of some rows of the weight, shape (n,), are in it, and their numbers there; shapes (found,)."""
        shard = rows.div(self.layout.chunk_size, rounding_mode="floor")
        own = rows - shard * self.layout.chunk_size
        at = ((own >= self.start) & (own < self.stop)).nonzero().squeeze(1)
        return at, (shard * self.size + own - self.start)[at]


def cut_rows(layout: ShardLayout, num_slices: int) -> list[Rows]:
    """The slices of a weight: as many as asked for, or one per row of a shard; none of a weight without rows."""
    chunk = layout.chunk_size
    size = max(1, -(-chunk // num_slices))
    return [Rows(layout, start, min(start + size, chunk)) for start in range(0, chunk, size)]


@dataclass(frozen=True, slots=True)
class Slice(Bucket):
    """One slice of a weight, which travels as any bucket of its unit would.

    Args:
        rows: Which rows it has.
        label: For messages, and for the check that all ranks are at the same one.
    """

    rows: Rows
    label: str

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return self.rows.sliced_layout.numel * self.dtype.itemsize


def slices_of(unit: Unit, dtype: torch.dtype) -> Sequence[Slice]:
    """The slices of the weight that a unit consists of, as they travel in a dtype."""
    key = "slices", unit.settings.num_slices, unit.label, dtype
    return unit.known_buckets(key, partial(_make, unit, dtype))


def _make(unit: Unit, dtype: torch.dtype) -> list[Slice]:
    param, num_slices = unit.params[0], unit.settings.num_slices
    group, parts = with_comms(param.shard_group, unit.settings.comms), cut_rows(param.shard_layout, num_slices)
    slices = []
    for number, rows in enumerate(parts, 1):
        layout = BucketLayout.of([rows.sliced_layout])
        plan = GatherPlan.of(layout, [(max(1, param.shape[1]), 1)], dtype, group)
        label, is_cast = f"{unit.label}, slice {number} of {len(parts)}", dtype != param.storage_dtype
        reduce_plan = ReducePlan.of(layout, group)
        slices.append(Slice((0,), dtype, is_cast, plan, reduce_plan, group, param.is_meta, None, rows, label))
    return slices


def for_each_slice(unit: Unit, dtype: torch.dtype, use: Callable[[Rows, Tensor], object]) -> None:
    """Gather the weight that a unit consists of slice by slice; the next one is on its way while this one is used.

    The first one may have been gathered ahead, and with the last one what the last step used next is.

    Args:
        unit: Of that weight alone.
        dtype: In which it is gathered.
        use: Called with the rows and the values of each slice, which it must not keep. Called once, with all of them,
            where somebody has gathered the whole weight.

    Communicates:
        An all-gather per slice: together the bytes of that of the weight, and a header each.
    """
    if names := unit.copies.on_meta():
        refuse_meta(names)
    ahead = unit.first_slice = unit.first_slice or FirstSlice(unit)
    whole = unit.copies.at_hand(0)
    if whole is not None and whole.dtype == dtype:
        ahead.drop()
        for rows in cut_rows(unit.params[0].shard_layout, 1):
            use(rows, whole)
        return
    unit.model.eviction.before_touch(unit)
    slices = slices_of(unit, dtype)
    handle = ahead.take(dtype)
    unit.free()  # what is there is stale
    if handle is None and slices:
        handle = _start(unit, slices[0])
    try:
        for number, part in enumerate(slices, 1):
            assert handle is not None
            with outside_autograd(), profiled("gather_wait", part.label, unit.model.token):
                gathered = handle.wait()
            handle = _start(unit, slices[number]) if number < len(slices) else None
            if handle is None:
                unit.model.eviction.after_touch(unit)
            values, memory = gathered.tensors[0], gathered.memory
            del gathered
            try:
                use(part.rows, values)
            finally:
                del values  # the pool takes back what nobody refers to
                unit.slice_bytes -= part.num_bytes
                if memory is not None:
                    unit.model.pool.give(memory)
                memory = None
    finally:
        if not ahead.is_there:
            unit.slice_bytes = 0
            if not unit.is_gathered:
                unit.model.eviction.note_free(unit)


class FirstSlice:
    """The first slice of a weight, if it is gathered ahead of its use.

    Args:
        unit: Of that weight alone.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._dtype: torch.dtype | None = None  # in which it was gathered last
        self._started: tuple[Slice, int, Handle[Gathered]] | None = None

    @property
    def is_there(self) -> bool:
        """Whether it is here or under way."""
        return self._started is not None

    def prefetch(self) -> bool:
        """Start to gather it in the dtype of the last use, if there was one; gives whether it did."""
        if self._started is not None or self._dtype is None:
            return False
        slices = slices_of(self._unit, self._dtype)
        if not slices or slices[0].is_meta:
            return False
        version = self._unit.params[0].shard_storage.resolve()._version
        self._started = slices[0], version, _start(self._unit, slices[0])
        return True

    def take(self, dtype: torch.dtype) -> Handle[Gathered] | None:
        """The gather that is under way, if it is of what is wanted now; else it is dropped."""
        if self._started is not None:
            part, version, handle = self._started
            shard = self._unit.params[0].shard_storage.resolve()
            is_wanted = part is slices_of(self._unit, dtype)[0] and version == shard._version
            if is_wanted:
                self._started = None
                return handle
            self.drop()
        self._dtype = dtype
        return None

    def drop(self) -> None:
        """Wait for it, and let it go."""
        if self._started is None:
            return
        (part, _, handle), self._started = self._started, None
        self._unit.slice_bytes -= part.num_bytes
        with outside_autograd():
            gathered = handle.discard()
        memory = gathered.memory if gathered is not None else None
        del gathered, handle
        if memory is not None:
            self._unit.model.pool.give(memory)


def _start(unit: Unit, part: Slice) -> Handle[Gathered]:
    """Start to gather a slice."""
    param = unit.params[0]
    unit.slice_bytes += part.num_bytes
    unit.model.eviction.note_gather(unit)
    with outside_autograd(), profiled("gather", part.label, unit.model.token):
        shard = part.rows.of_shard(param.shard_storage.resolve(), part.group.rank)
        is_row = not (part.group.is_direct or part.is_cast) and shard.numel() == part.plan.row_numel
        return collectives.all_gather(
            [shard],
            part.plan,
            part.group,
            label=part.label,
            tag=hash(param.shard_storage.signature),
            pool=unit.model.pool,
            row=shard.reshape(-1) if is_row else None,
        )


class SliceReduction:
    """The gradient of a weight on its way: one slice is reduced while that of the next one is computed.

    Slices are reduced in every backward, also where gradients of other units are added up unreduced, for what would be
    added up is as large as the weight. The last one may still be in flight when the gradient is given out: until the
    next reduction of the model leaves.

    Args:
        unit: Of that weight alone.
        reducer: Of the model.
    """

    def __init__(self, unit: Unit, reducer: Reducer) -> None:
        # Weak, for the gradient that this is in belongs to the weight: the model would be kept alive.
        self._reducer, self._unit = weakref.ref(reducer), weakref.ref(unit)
        param = unit.params[0]
        self._replicas, self._tag = param.shard_group.replicas, hash(param.shard_storage.signature)
        self._pool, self._hook = unit.model.pool, unit.settings.reduce_hook
        self._model_token = unit.model.token
        divisor = unit.settings.divisor
        self._mean, self._divisor = unit.settings.averages and divisor is None, divisor
        self._dtype = unit.reduce_dtypes[0] or param.storage_dtype
        self._shard = torch.zeros_like(param.shard_storage.resolve(), memory_format=torch.contiguous_format)
        self._in_flight: tuple[Slice, Steps[Reduced]] | None = None

    def add(self, part: Slice, grad: Tensor) -> None:
        """Start to reduce the gradient of a slice, once the one before it is here.

        Communicates:
            A reduce-scatter of its elements, as `ReduceBucket.launch`; where the shards exist more than once, an
            all-reduce of this rank's part of the slice before it.
        """
        with outside_autograd(), profiled("reduce", part.label, self._model_token):
            reducer = self._reducer()
            if reducer is not None:
                reducer.make_room_for_slice(self)
            self.settle()
            label = told_label(part.label, self._divisor)
            plan = part.reduce_plan
            bucket = ReduceBucket(plan, dtype=self._dtype, device=grad.device, label=label, pool=self._pool)
            bucket.add(0, grad)
            all_reduce = None
            if self._replicas is not None:
                all_reduce = partial(
                    all_reduce_row,
                    replicas=self._replicas,
                    mean=self._mean,
                    label=label,
                    tag=self._tag,
                    pool=self._pool,
                    num_flags=plan.num_flags,
                )
            self._in_flight = part, Steps(reduce_steps(bucket, None, all_reduce, self._hook, mean=self._mean))

    def settle(self) -> None:
        """Wait for the slice that is in flight, if one is, and put it in its place."""
        if self._in_flight is None:
            return
        part, steps = self._in_flight
        with outside_autograd(), profiled("reduce_wait", part.label, self._model_token):
            steps.advance(sys.maxsize)  # raises again, if it is called again
            self._in_flight = None
            own = part.rows.of_shard(self._shard, part.group.rank).copy_(steps.result.shards[0])
            if self._divisor is not None:
                own.div_(self._divisor)

    def gradient(self) -> ShardedTensor:
        """The reduced gradient, when all slices were added."""
        unit = self._unit()
        assert unit is not None  # its backward runs
        param = unit.params[0]
        if self._hook is not None or self._replicas is not None:
            self.settle()  # what follows is started by all ranks at one point of the program
        pending = self if self._in_flight is not None else None
        shard = None if pending is not None else self._shard
        storage = ShardStorage(shard, param.shard_storage.layout, pending, is_shared=True)
        storage.is_reduced = True
        return param.like(storage)

    def __call__(self, storage: ShardStorage) -> None:
        """The gradient in `storage` is used."""
        self.settle()
        storage.deliver(self._shard)
