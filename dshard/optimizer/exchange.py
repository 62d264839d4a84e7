"""Exchanges of whole tensors: what goes to their owners and what comes back, as rows of bytes.

A row has a segment for each owner, and in it a slot for each piece of each of its tensors.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Shard

from dshard import collectives
from dshard.collectives import Handle, ReduceOp, ShardGroup, cut_into, put_together
from dshard.layout import SLOT_BYTES, ShardLayout
from dshard.tensor.meshes import TPShardLayout, full_shape, joined, stride_like, tp_layout_of
from dshard.tensor.sharded_tensor import ShardedTensor


@dataclass(frozen=True, slots=True)
class Owner:
    """The rank that steps a parameter, by its numbers in the groups that the parameter lies on.

    Args:
        place: Its number among all ranks that the parameter lies on.
        group: The ranks that data parallelism cuts it over; this one by itself, with others as replicas, where each has
            all of it.
        number: Of the owner among all that train together there.
        axes: Placement and ranks along each dim of the mesh of tensor parallelism, if it lies on one.
        along: Number of the owner along each of these.
    """

    place: int
    group: ShardGroup
    number: int
    axes: tuple[tuple[Placement, ShardGroup], ...] = ()
    along: tuple[int, ...] = ()

    @classmethod
    def of(cls, param: ShardedTensor, place: int) -> "Owner":
        """The rank of a number below `num_owners(param)`."""
        axes, along, number = _axes_of(param), list[int](), place
        for _, group in reversed(axes):
            number, rank = divmod(number, group.num_ranks)
            along.insert(0, rank)
        group = param.shard_group
        if param.shard_layout.dim is None and group.num_ranks > 1:
            group = ShardGroup.alone(group)
        return cls(place, group, number, axes, tuple(along))

    @property
    def is_beside(self) -> bool:
        """Whether this rank and the owner are the same to data parallelism."""
        return self.number == self.group.world_rank

    def is_own(self, first: int = 0) -> bool:
        """Whether it is this rank, as far as data parallelism goes and the axes from one on."""
        numbers = zip(self.axes[first:], self.along[first:], strict=True)
        return self.is_beside and all(group.rank == number for (_, group), number in numbers)

    @property
    def key(self) -> tuple[str, ...]:
        """Tells apart the ranks that parameters lie on."""
        return self.group.full_name, *(group.name for _, group in self.axes)

    @property
    def everybody(self) -> ShardGroup:
        """All ranks that the parameter lies on, for what is to reach each of them."""
        return joined(self.group, [group for _, group in self.axes])


def num_owners(param: ShardedTensor) -> int:
    """How many ranks a parameter may be stepped by: all that it lies on."""
    return param.shard_group.world_size * math.prod(group.num_ranks for _, group in _axes_of(param))


def _axes_of(tensor: ShardedTensor) -> tuple[tuple[Placement, ShardGroup], ...]:
    tp = tp_layout_of(tensor.shard_layout)
    return tp.axes if tp is not None else ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of which parts travel.

    Args:
        layout: How it is cut over the ranks that they travel among; `along` tells of those of tensor parallelism.
        dtype: Of its elements.
        stride: Of the full tensor, over all meshes, whose dims follow each other in its parts as in that.
    """

    layout: ShardLayout
    dtype: torch.dtype
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: ShardedTensor) -> "Piece":
        """That of a sharded tensor."""
        return cls(tensor.shard_layout, tensor.storage_dtype, tensor.stride())

    def along(self, axes: Sequence[tuple[Placement, ShardGroup]], axis: int) -> "Piece":
        """What travels along a dim of the mesh of tensor parallelism: cut there, if the tensor is, or whole."""
        is_cut, shape = type(self.layout) is TPShardLayout, full_shape(self.layout)
        for number, (placement, group) in enumerate(axes[: axis + 1]):
            dim = placement.dim if is_cut and isinstance(placement, Shard) else None
            layout = ShardLayout(shape, dim, group.num_ranks)
            if number < axis:
                shape = layout.local_shape(group.rank)
        return Piece(layout, self.dtype, self.stride)

    @property
    def slot_bytes(self) -> int:
        """Of the place for one rank's shard."""
        return -(-self.layout.slot_numel * self.dtype.itemsize // SLOT_BYTES) * SLOT_BYTES

    def whole(self, rows: Tensor | Sequence[Tensor], at: int) -> Tensor:
        """The whole tensor, of shards that begin at a byte of the rows of all ranks."""
        end = at + self.layout.slot_numel * self.dtype.itemsize
        stride = stride_like(self.layout.shape, self.stride)
        full = torch.empty_strided(self.layout.shape, stride, dtype=self.dtype, device=rows[0].device)
        if not full.numel():
            return full
        if isinstance(rows, Tensor):
            slots: Tensor | list[Tensor] = rows[:, at:end].view(self.dtype)
        else:
            slots = [row[at:end].view(self.dtype) for row in rows]
        put_together(slots, self.layout, full)
        return full

    def cut(self, full: Tensor, rows: Tensor, at: int) -> None:
        """Write the shards of a whole tensor to where they begin in rows, shape (ranks, bytes)."""
        if full.numel():
            end = at + self.layout.slot_numel * self.dtype.itemsize
            cut_into(full, self.layout, rows[:, at:end].view(self.dtype))


def segments(pieces: Sequence[tuple[int, Piece]], group: ShardGroup) -> list[int]:
    """Bytes of the segment of each owner, by its number among all that train together."""
    sizes = [0] * group.world_size
    for owner, piece in pieces:
        sizes[owner] += piece.slot_bytes
    return sizes


def collect(
    owners: Sequence[Owner], pieces: Sequence[Piece], shards: Sequence[Tensor], label: str, capacity: int
) -> Callable[[], list[Tensor]]:
    """Begin to send owners the shards of what is theirs.

    Args:
        owners: Of each tensor, all over the same groups.
        pieces: The tensors.
        shards: This rank's, of each.
        label: What for.
        capacity: Of memory for it, in bytes.

    Returns:
        Waits, and gives the whole tensors of those that this rank owns.

    Communicates:
        An all-to-all over data parallelism, and then, waiting for each, one along each dim of tensor parallelism.
    """
    given = [(owner.number, piece) for owner, piece in zip(owners, pieces, strict=True)]
    handle = _collect(given, shards, owners[0].group, label, capacity)

    def finish() -> list[Tensor]:
        found = handle.wait()
        left = [each for each in zip(owners, pieces, strict=True) if each[0].is_beside]
        for axis in reversed(range(len(owners[0].axes))):
            taken: dict[int, Tensor] = {}
            for places, along, group in _kinds_along(left, axis):
                values = [found[place] for place in places]
                own = [place for place in places if left[place][0].is_own(axis)]
                taken.update(zip(own, _collect(along, values, group, label, 0).wait(), strict=True))
            left, found = [left[place] for place in sorted(taken)], [taken[place] for place in sorted(taken)]
        return found

    return finish


def spread(
    owners: Sequence[Owner], pieces: Sequence[Piece], fulls: Sequence[Tensor], label: str, capacity: int = 0
) -> Callable[[], Iterator[Tensor]]:
    """Begin to give all ranks their shards of what owners have: the way back of `collect`.

    Args:
        owners: Of each tensor, all over the same groups.
        pieces: The tensors.
        fulls: This rank's, in the order of the pieces that it owns.
        label: What for.
        capacity: Of memory for it, in bytes.

    Returns:
        Waits, and gives this rank's shard of each piece.

    Communicates:
        An all-to-all along each dim of tensor parallelism, waiting for each, and then one over data parallelism; in the
        place of one an all-gather where each rank has all of a tensor.
    """
    for axis in range(len(owners[0].axes)):
        left = [each for each in zip(owners, pieces, strict=True) if each[0].is_own(axis + 1)]
        owned = dict(zip((place for place, each in enumerate(left) if each[0].is_own(axis)), fulls, strict=True))
        taken: dict[int, Tensor] = {}
        for places, along, group in _kinds_along(left, axis):
            values = [owned[place] for place in places if place in owned]
            taken.update(zip(places, _spread(along, values, group, label)(), strict=True))
        fulls = [taken[place] for place in sorted(taken)]
    given = [(owner.number, piece) for owner, piece in zip(owners, pieces, strict=True)]
    return _spread(given, fulls, owners[0].group, label, capacity)


def _kinds_along(
    left: Sequence[tuple[Owner, Piece]], axis: int
) -> Iterator[tuple[list[int], list[tuple[int, Piece]], ShardGroup]]:
    """Tensors that travel together along a dim of tensor parallelism: places, what goes to whom, and the ranks."""
    pieces = [piece.along(owner.axes, axis) for owner, piece in left]
    for is_cut in (True, False):
        places = [place for place, piece in enumerate(pieces) if (piece.layout.dim is not None) is is_cut]
        if places:
            _, group = left[0][0].axes[axis]
            along = [(left[place][0].along[axis], pieces[place]) for place in places]
            yield places, along, group if is_cut else ShardGroup.alone(group)


def _own_replica(group: ShardGroup) -> int:
    """Number of the first rank, among all that train together, of those that this one shares shards with."""
    return group.world_rank - group.rank


def _collect(
    pieces: Sequence[tuple[int, Piece]], shards: Sequence[Tensor], group: ShardGroup, label: str, capacity: int
) -> Handle[list[Tensor]]:
    """Send owners the shards of what is theirs; gives the whole tensors of those that this rank owns.

    Args:
        pieces: With their owners.
        shards: This rank's, of each.
        group: The ranks that have shards.
        label: What for.
        capacity: Of memory for it, in bytes.
    """
    start = _own_replica(group)
    sizes = segments(pieces, group)[start : start + group.num_ranks]

    def fill(row: Tensor) -> None:
        at = list(accumulate(sizes, initial=0))
        outs, values = [], []
        for (owner, piece), shard in zip(pieces, shards, strict=True):
            if start <= owner < start + group.num_ranks:
                place = row[at[owner - start] :][: shard.numel() * piece.dtype.itemsize]
                outs.append(place.view(piece.dtype).view(shard.shape))
                values.append(shard)
                at[owner - start] += piece.slot_bytes
        if outs:
            torch._foreach_copy_(outs, values)

    def put(rows: Tensor | Sequence[Tensor]) -> list[Tensor]:
        own = [piece for owner, piece in pieces if owner == group.world_rank]
        at = [0, *accumulate(piece.slot_bytes for piece in own)]
        return [piece.whole(rows, start) for piece, start in zip(own, at, strict=False)]

    return collectives.to_owners(fill, sizes, group, put, label=label, capacity=capacity)


def _spread(
    pieces: Sequence[tuple[int, Piece]], fulls: Sequence[Tensor], group: ShardGroup, label: str, capacity: int = 0
) -> Callable[[], Iterator[Tensor]]:
    """Give all ranks their shards of what owners have.

    Args:
        pieces: With their owners.
        fulls: This rank's, in the order of the pieces that it owns.
        group: The ranks that have shards.
        label: What for.
        capacity: Of memory for it, in bytes.

    Returns:
        Waits, and gives this rank's shard of each piece.
    """
    sizes, start, first = segments(pieces, group), _own_replica(group), group.replicas

    def fill(rows: Tensor) -> None:
        own = [piece for owner, piece in pieces if owner == group.world_rank]
        at = accumulate((piece.slot_bytes for piece in own), initial=0)
        for piece, full, place in zip(own, fulls, at, strict=False):
            piece.cut(full, rows.view(group.num_ranks, -1), place)

    if group.num_ranks == 1 and first is not None:  # each replica has whole tensors: what it made goes to all at once
        handle = _from_level(fill, first, 1, sizes, group, label)
        further = partial(_from_replicas, level=first.replicas, num_together=first.num_ranks)
    else:
        sizes_here = sizes[start : start + group.num_ranks]
        handle = collectives.from_owners(fill, sizes_here, group, label=label, capacity=capacity)
        further = partial(_from_replicas, level=first, num_together=group.num_ranks)

    def finish() -> Iterator[Tensor]:
        row = further(handle.wait(), sizes=sizes, group=group, label=label)
        return iter(_shards_in(row, pieces, sizes, group.rank))

    return finish


def _from_replicas(
    row: Tensor, level: ShardGroup | None, num_together: int, sizes: Sequence[int], group: ShardGroup, label: str
) -> Tensor:
    """All segments, of those that the owners among some ranks have sent.

    Args:
        row: Those segments.
        level: The replicas of these ranks, which have what the owners among them have sent.
        num_together: How many ranks there are.
        sizes: Bytes of the segment of each owner.
        group: The ranks that have shards.
        label: What for.
    """
    while level is not None:
        row = _from_level(partial(_copy, row), level, num_together, sizes, group, label).wait()
        num_together *= level.num_ranks
        level = level.replicas
    return row


def _from_level(
    fill: Callable[[Tensor], object],
    level: ShardGroup,
    num_together: int,
    sizes: Sequence[int],
    group: ShardGroup,
    label: str,
) -> Handle[Tensor]:
    """Begin to get the segments that the replicas of one level have, each of so many ranks together."""
    block = num_together * level.num_ranks
    start = group.world_rank // block * block
    of_parts = [sum(sizes[part : part + num_together]) for part in range(start, start + block, num_together)]
    return collectives.all_gather_rows(fill, of_parts, level, label=label)


def _copy(values: Tensor, into: Tensor) -> None:
    into.copy_(values)


def _shards_in(row: Tensor, pieces: Sequence[tuple[int, Piece]], sizes: Sequence[int], rank: int) -> list[Tensor]:
    """This rank's shards in the segments of all owners."""
    at = list(accumulate(sizes, initial=0))
    found = []
    for owner, piece in pieces:
        numel = piece.layout.local_numel(rank)
        place = row[at[owner] :][: numel * piece.dtype.itemsize].view(piece.dtype)
        found.append(place.view(piece.layout.local_shape(rank)))
        at[owner] += piece.slot_bytes
    return found


def said_by_all(own: Any, group: ShardGroup) -> list[Any]:
    """What each rank has to say, as JSON, among those that train together."""
    text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8).to(group.device)
    lengths = torch.zeros(group.world_size, dtype=torch.int64, device=group.device)
    lengths[group.world_rank] = text.numel()
    label, start = "states of an optimizer", _own_replica(group)
    total = collectives.all_reduce([lengths], group, ReduceOp.SUM, label=label, everywhere=True).wait()[0]
    sizes: list[int] = total.tolist()
    row = collectives.all_gather_rows(
        partial(_copy, text), sizes[start : start + group.num_ranks], group, label=label
    ).wait()
    row = _from_replicas(row, group.replicas, group.num_ranks, sizes, group, label)
    texts = row.cpu().numpy().tobytes()
    return [json.loads(texts[end - size : end]) for end, size in zip(accumulate(sizes), sizes, strict=True)]
