"""The parameters of a unit, sorted by what can travel in one buffer, and the memory in which shards lie for that."""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dshard.collectives import (
    Comms,
    GatherPlan,
    ReducePlan,
    SendRow,
    ShardGroup,
    with_comms,
)
from dshard.layout import BucketLayout, ShardLayout
from dshard.policies import Offload
from dshard.tensor import ShardedTensor
from dshard.tensor.meshes import gathered_stride
from dshard.tensor.storage import ShardStorage, shards_of


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters of a unit that travel in one buffer.

    Args:
        slots: Their numbers in the unit.
        index_of: For each of these, its place among them.
        dtype: In which they travel.
        is_cast: Whether that is another one than theirs.
        plan: How they are gathered.
        reduce_plan: How their gradients are reduced.
        group: The ranks that hold them.
        is_meta: Whether they have no memory yet.
        offload: Where they are kept and used, if those are two places.
    """

    slots: tuple[int, ...]
    index_of: Mapping[int, int]
    dtype: torch.dtype
    is_cast: bool
    plan: GatherPlan
    reduce_plan: ReducePlan
    group: ShardGroup
    is_meta: bool
    offload: Offload | None

    @property
    def is_sent_as_it_is(self) -> bool:
        """Whether a row of shards travels from where it lies."""
        return self.group.sends_rows and not self.is_cast


def part_layout(param: ShardedTensor, num_ranks: int) -> ShardLayout:
    """How a parameter is cut over as many ranks; its own layout for those that share it."""
    own = param.shard_layout
    if num_ranks == 1:  # what is whole is cut into one part
        return ShardLayout(own.shape, 0 if own.shape else None, 1)
    return own if own.num_ranks == num_ranks else ShardLayout(own.shape, own.dim, num_ranks)


def is_whole(param: ShardedTensor) -> bool:
    """Whether every rank holds a parameter whole."""
    return param.shard_storage.layout.dim is None


def are_whole(params: Sequence[ShardedTensor]) -> bool:
    """Whether nothing of a unit of some parameters is gathered."""
    return all(map(is_whole, params)) and any(map(ShardedTensor.dim, params))


def make_buckets(
    params: Sequence[ShardedTensor], slots: Sequence[int], dtypes: Sequence[torch.dtype | None], comms: Comms
) -> list[Bucket]:
    """One bucket per dtype of the parameters and on the wire, device and group, in order of first appearance.

    What every rank holds whole is a bucket of its own, that is not gathered and whose gradients are all-reduced; but
    numbers without a dim travel with others that are cut, if there are some, or else by themselves.

    Args:
        params: All of a unit.
        slots: The numbers of those that travel.
        dtypes: For each of `params`, the dtype in which it travels; None for its own.
        comms: Collectives in the place of the backend's.
    """
    return [
        _make_bucket(params, part, kind, with_comms(params[part[0]].shard_group, comms))
        for kind, part in _by_kind(params, slots, dtypes).items()
    ]


def make_part_buckets(
    params: Sequence[ShardedTensor], dtypes: Sequence[torch.dtype | None], num_ranks: int
) -> list[Bucket]:
    """Buckets to gather parameters of which every `num_ranks` neighbouring ranks hold all, in the dtypes of use.

    Args:
        params: All of a unit.
        dtypes: For each of them, the dtype that the parts are in; None for its own.
        num_ranks: Among which the parts lie; must divide the size of each group.
    """
    return [
        _make_bucket(params, part, replace(kind, own=kind.dtype), params[part[0]].shard_group.neighbours(num_ranks))
        for kind, part in _by_kind(params, range(len(params)), dtypes).items()
    ]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What parameters have in common that travel together.

    Args:
        own: Their dtype.
        dtype: That on the wire.
        device: Where they are kept.
        group: Name of the ranks that hold them.
        offload: Where they are kept and used, if those are two places.
        is_whole: Whether every rank holds them whole.
    """

    own: torch.dtype
    dtype: torch.dtype
    device: torch.device
    group: str
    offload: Offload | None
    is_whole: bool


def _by_kind(
    params: Sequence[ShardedTensor], slots: Sequence[int], dtypes: Sequence[torch.dtype | None]
) -> dict[_Kind, tuple[int, ...]]:
    """The numbers of parameters that can travel together, by what they have in common."""
    found: dict[_Kind, tuple[int, ...]] = {}
    numbers: dict[_Kind, list[int]] = {}  # that have no dim
    for slot in slots:
        param = params[slot]
        own, whole = param.storage_dtype, is_whole(param)
        kind = _Kind(own, dtypes[slot] or own, param.device, param.shard_group.full_name, param.offload, whole)
        if whole and not param.dim() and param.shard_group.num_ranks > 1:
            numbers.setdefault(kind, []).append(slot)
        else:
            found[kind] = (*found.get(kind, ()), slot)
    for kind, alone in numbers.items():
        cut = replace(kind, is_whole=False)
        joined = kind if kind in found and cut not in found else cut
        found[joined] = tuple(sorted((*found.get(joined, ()), *alone)))
    return found


def _make_bucket(params: Sequence[ShardedTensor], slots: tuple[int, ...], kind: _Kind, group: ShardGroup) -> Bucket:
    members = [params[slot] for slot in slots]
    if kind.is_whole:
        group = ShardGroup.alone(members[0].shard_group)
    layout = BucketLayout.of([part_layout(p, group.num_ranks) for p in members])
    plan = GatherPlan.of(layout, [gathered_stride(p.shard_layout, p.stride()) for p in members], kind.dtype, group)
    is_meta, is_cast = members[0].is_meta, kind.dtype != kind.own
    index_of = {slot: index for index, slot in enumerate(slots)}
    return Bucket(slots, index_of, kind.dtype, is_cast, plan, ReducePlan(layout, group), group, is_meta, kind.offload)


class LearnedCasts:
    """Which parameters of a unit `torch.autocast` casts: learned from use, to gather them in the dtype that it takes.

    A parameter that is used as it is too, an embedding that is the head at the same time, stays in its own dtype.

    Args:
        num_params: Of the unit.
    """

    def __init__(self, num_params: int) -> None:
        self._used_as_they_are: set[int] = set()
        self._dtypes: list[torch.dtype | None] = [None] * num_params

    def note_cast(self, slot: int, dtype: torch.dtype) -> None:
        """Parameter `slot` was cast to `dtype`."""
        if slot not in self._used_as_they_are:
            self._dtypes[slot] = dtype

    def note_use(self, slot: int) -> None:
        """Parameter `slot` was used as it is, under autocast."""
        self._used_as_they_are.add(slot)
        self._dtypes[slot] = None

    @property
    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        """The dtype to gather each parameter in, under autocast; None for its own."""
        return tuple(self._dtypes)


class SendRows:
    """The memory that shards lie in as they travel: of those of a unit that nobody would miss elsewhere.

    Args:
        params: Of the unit.
    """

    def __init__(self, params: Sequence[ShardedTensor]) -> None:
        self._params = params
        self._known: dict[tuple[int, ...], tuple[Bucket, SendRow]] = {}  # of each bucket, by its slots

    def of(self, buckets: Sequence[Bucket], storages: Sequence[ShardStorage]) -> list[Tensor | None]:
        """A row for each bucket; shards, one in each of `storages`, are moved there. Those for others are let go of.

        None where they travel in another dtype, where the backend takes them from where they are, and where somebody
        holds one of them (`to_local()`). Shards that are copied to another device first travel there in a row always.
        """
        for slots in [slots for slots, (bucket, _) in self._known.items() if bucket not in buckets]:
            del self._known[slots]  # shards that still lie in it keep its memory
        return [self._row_of(bucket, [storages[slot] for slot in bucket.slots]) for bucket in buckets]

    def _row_of(self, bucket: Bucket, storages: Sequence[ShardStorage]) -> Tensor | None:
        if bucket.offload is None and not bucket.is_sent_as_it_is:
            return None
        _, known = self._known.get(bucket.slots, (None, None))
        if known is not None and known.holds([storage.tensor for storage in storages]):
            if bucket.offload is None:
                return known.row
            shards_of(storages)  # one that awaits a step is cast by that
            return known.row if any(storage.is_exposed for storage in storages) else known.travelling()
        in_row = {id(shard) for shard in known.shards} if known is not None else set()
        sharing = Counter(_memory_of(param.shard_storage) for param in self._params)  # in a row that was forgotten
        for storage in storages:
            moved = id(storage.tensor) in in_row
            if storage.is_held(
                own_refs=int(moved), storage_refs=1 + len(in_row) if moved else sharing[_memory_of(storage)]
            ):
                return None
        pins = bucket.offload is not None and bucket.offload.pins
        row = SendRow([storage.resolve() for storage in storages], bucket.plan, pins=pins)
        self._known[bucket.slots] = bucket, row
        for storage, shard in zip(storages, row.shards, strict=True):
            storage.deliver(shard)
        return row.row

    def is_held(self, storage: ShardStorage) -> bool:
        """Whether somebody else refers to the shard of a parameter, or to its memory."""
        row = next((row for _, row in self._known.values() if id(storage.tensor) in map(id, row.shards)), None)
        if row is None:
            return storage.is_held(own_refs=0, storage_refs=1)
        for param in self._params:
            param.shard_storage.standin = None
        return storage.is_held(own_refs=1, storage_refs=1 + len(row.shards))

    def to_cast(self, written: Container[int]) -> list[tuple[SendRow, torch.dtype]]:
        """Rows of parameters that travel in another dtype than they are kept in, and that dtype.

        Args:
            written: Ids of the storages that whoever casts them writes to; only rows of such alone are given.
        """
        found = []
        for bucket, row in self._known.values():
            storages = [self._params[slot].shard_storage for slot in bucket.slots]
            is_all = all(id(storage) in written for storage in storages)
            if bucket.offload is not None and bucket.is_cast and is_all and row.holds([s.tensor for s in storages]):
                found.append((row, bucket.dtype))
        return found

    def drop_casts(self) -> None:
        """Let go of the memory of rows that were cast: gradients need as much."""
        for _, row in self._known.values():
            row.drop_cast()


def _memory_of(storage: ShardStorage) -> int:
    """Tells the memory of shards apart."""
    return storage.resolve().untyped_storage()._cdata
