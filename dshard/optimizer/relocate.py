"""Sharded tensors change places, cut over other ranks or whole on each, and stay the objects that they are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from dshard import collectives
from dshard.autograd.modes import outside_autograd
from dshard.collectives import GatherPlan, shard_of
from dshard.errors import StateError
from dshard.layout import MIN_DIRECT_BYTES, BucketLayout
from dshard.tensor import ShardedTensor
from dshard.tensor.meshes import group_of, placements_of
from dshard.tensor.shard_storage import ShardStorage
from dshard.tensor.tp_layout import gathered_stride, tp_layout_of
from dshard.units.placing import Place

_MAX_BYTES = 16 << 20  # of full tensors that are there at the same time, as long as one is as large as they


@dataclass(frozen=True, slots=True)
class Move:
    """A tensor and the place that it is to have.

    Args:
        tensor: A parameter, gradient or optimizer state that is no view.
        place: Over which mesh, cut along which dim.
    """

    tensor: ShardedTensor
    place: Place

    @property
    def num_bytes(self) -> int:
        """Bytes of the full tensor, or for a DTensor of the local one."""
        return int(self.tensor.shard_layout.numel * self.tensor.storage_dtype.itemsize)

    @property
    def is_needed(self) -> bool:
        """Whether it is elsewhere."""
        here = place_of(self.tensor)
        return here.dim != self.place.dim or here.mesh != self.place.mesh  # a copy or pickle has a mesh of its own


def place_of(tensor: ShardedTensor) -> Place:
    """The place of a sharded tensor."""
    inner = tp_layout_of(tensor.shard_layout)
    return Place(tensor._spec.mesh if inner is None else inner.data_mesh, tensor.shard_layout.dim)


def relocate(moves: Sequence[Move]) -> None:
    """Cut tensors anew, some at a time; whoever held the old shards, as by `to_local()`, holds a copy from now on.

    Communicates:
        An all-gather of each tensor that is cut now and of 64 bytes beside, in chunks; nothing for whole ones.
    """
    with outside_autograd():
        for chunk in _chunks([move for move in moves if move.is_needed]):
            _relocate(chunk)


def _relocate(moves: Sequence[Move]) -> None:
    """Cut tensors anew, all at once; what was gathered for it goes at the end."""
    for move, full in zip(moves, _fulls([move.tensor for move in moves]), strict=True):
        _put(move, full)


def _chunks(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Moves that can be gathered together, in an order that is the same on all ranks."""
    kinds: dict[Any, list[Move]] = {}
    for move in moves:
        tensor = move.tensor
        kind = (
            tensor.shard_group.full_name,
            tensor.storage_dtype,
            tensor.storage_device,
            tensor.shard_layout.dim is None,
        )
        kinds.setdefault(kind, []).append(move)
    for same in kinds.values():
        max_bytes = min(_MAX_BYTES, max(move.num_bytes for move in same))
        chunk: list[Move] = []
        for move in sorted(same, key=lambda move: move.num_bytes, reverse=True):  # small ones fill up
            if chunk and sum(m.num_bytes for m in chunk) + move.num_bytes > max_bytes:
                yield chunk
                chunk = []
            chunk.append(move)
        yield chunk


def _fulls(tensors: Sequence[ShardedTensor]) -> list[Tensor]:
    """The full values of tensors that lie alike; not to be kept."""
    first, group = tensors[0], tensors[0].shard_group
    shards = [t.shard_storage.resolve() for t in tensors]
    if first.shard_layout.dim is None or first.is_meta or group.num_ranks == 1:
        return shards if not first.is_meta else [torch.empty(t.shard_layout.shape, device="meta") for t in tensors]
    strides = [gathered_stride(t.shard_layout, t.stride()) for t in tensors]
    bucket = BucketLayout.of([t.shard_layout for t in tensors])
    least = 0 if len(tensors) == 1 else MIN_DIRECT_BYTES  # one alone needs no rows to be cut out of, of its size again
    plan = GatherPlan.of(bucket, strides, first.storage_dtype, group, min_direct_bytes=least)
    here = [shard.to(group.device_type) for shard in shards]
    tag = hash(tuple(t.shard_storage.signature for t in tensors))
    return collectives.all_gather(here, plan, group, label=f"move of '{first.name}'", tag=tag).wait().tensors


def _put(move: Move, full: Tensor) -> None:
    """Give a tensor its part of the full value."""
    tensor, place, old = move.tensor, move.place, move.tensor.shard_storage
    group, inner = group_of(place.mesh), tp_layout_of(tensor.shard_layout)
    layout = replace(old.layout, dim=place.dim, num_ranks=group.num_ranks)
    part = shard_of(full, layout, group.rank)
    shard = torch.empty(part.shape, dtype=tensor.storage_dtype, device=tensor.storage_device).copy_(part)
    storage = ShardStorage(shard, layout, is_shared=True)
    storage.tag, storage.num_writes = old.signature
    placements = placements_of(place.dim, place.mesh) if inner is None else inner.over_both(place.dim)
    mesh = place.mesh if inner is None else tensor._spec.mesh
    tensor._spec = DTensorSpec(mesh, placements, tensor_meta=tensor._spec.tensor_meta)
    tensor.shard_storage, tensor.shard_group, tensor.origin, tensor.known_views = storage, group, None, None
    old.retire(
        StateError(
            f"{tensor.name}: set_strategy has moved its shards to other ranks, but an alias or a view from before is "
            "used. Take it from the parameter again."
        )
    )
