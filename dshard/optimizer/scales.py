"""The scales of blocks of optimizer states: each rank keeps those of the blocks that its shards have elements of.

In `optimizer.state` they are sharded tensors, one number per block, whose shards are put together when somebody uses
one; so they follow to other numbers of ranks and strategies. As long as nobody writes to them, steps do not look there.
"""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dshard import collectives
from dshard.autograd import outside_autograd
from dshard.collectives import ReduceOp, ShardGroup, shard_of
from dshard.errors import StateError
from dshard.layout import ShardLayout
from dshard.optimizer.blocks import Blocks
from dshard.optimizer.replace import full_values, place_beside, place_of, sharded_beside
from dshard.tensor.meshes import distinct_groups
from dshard.tensor.sharded_tensor import SHARDED, ShardedTensor
from dshard.tensor.storage import ShardStorage

_AT_ONCE = 1 << 22  # scales that are put together at a time


@dataclass(slots=True)
class _Kept:
    """The scales of one state of a parameter, of the blocks in `Blocks.span`.

    Args:
        scales: They.
        storage: Of the sharded tensor that stands for them.
        version: Of that as it was put together; None as long as it awaits this.
    """

    scales: Tensor
    storage: weakref.ref[ShardStorage]
    version: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class OfParam:
    """The scales of a parameter's states.

    Args:
        name: Of the parameter.
        layout: How it is cut.
        groups: Over which ranks.
        rank: Number of this one in data parallelism.
        blocks: Of its shard.
        kept: The scales, by the names of the states.
    """

    name: str
    layout: ShardLayout
    groups: list[ShardGroup]
    rank: int
    blocks: Blocks
    kept: dict[str, _Kept] = field(default_factory=dict)

    def holds(self, name: str, value: Any) -> bool:
        """Whether the scales that a state of the optimizer stands for are those that are here."""
        kept = self.kept.get(name)
        storage: ShardStorage | None = value.shard_storage if type(value) in SHARDED else None
        if kept is None or storage is None or kept.storage() is not storage:
            return False
        return storage.is_pending if kept.version is None else storage.version == kept.version

    def fits(self, param: ShardedTensor, size: int) -> bool:
        """Whether the parameter lies where it lay, and blocks are of that size."""
        is_there = self.layout == param.shard_layout and self.groups == distinct_groups(param)
        return is_there and self.blocks.size == size


@dataclass(frozen=True, slots=True)
class Wanted:
    """Scales that a step is about to change.

    Args:
        param: Of which parameter.
        states: Of that; what is missing is added, as zeros.
        names: The states that are scales.
        size: Of a block, in elements.
    """

    param: ShardedTensor
    states: dict[str, Any]
    names: Sequence[str]
    size: int


class Scales:
    """The scales of an optimizer's states; as what their sharded tensors await."""

    def __init__(self) -> None:
        self._params: dict[int, OfParam] = {}

    def take(self, wanted: Sequence[Wanted]) -> list[OfParam]:
        """Scales to read and write; their sharded tensors await them from now on.

        Raises:
            StateError: A state is of another number of blocks. On every rank alike.

        Communicates:
            Where somebody has written to the states, or a parameter was moved, all-gathers of them.
        """
        known = [self._params.get(id(each.param)) for each in wanted]
        if any(
            old is not None and not old.fits(each.param, each.size) for old, each in zip(known, wanted, strict=True)
        ):
            self.settle()
        found = []
        for old, each in zip(known, wanted, strict=True):
            param, layout = each.param, each.param.shard_layout
            if old is not None and old.fits(param, each.size):
                found.append(old)
                continue
            rank = param.shard_group.rank
            blocks = Blocks.of(layout, rank, each.size)
            found.append(OfParam(param.name, layout, distinct_groups(param), rank, blocks))
            self._params[id(param)] = found[-1]
        both = list(zip(found, wanted, strict=True))
        self._fetch([(of, each, n) for of, each in both for n in each.names if not of.holds(n, each.states.get(n))])
        for of, each in both:
            for name in each.names:
                kept, storage = of.kept[name], each.states[name].shard_storage
                if kept.version is not None or not storage.is_pending:
                    storage.hand_over(self)
                    kept.version = None
        return found

    def _fetch(self, missing: Sequence[tuple[OfParam, Wanted, str]]) -> None:
        """Get scales from what stands for them in `optimizer.state`."""
        values = {id(each.states[n]): each.states[n] for _, each, n in missing if n in each.states}
        sharded = [value for value in values.values() if type(value) in SHARDED]
        parts: dict[int, list[tuple[OfParam, Wanted, str]]] = {}
        for item in missing:
            parts.setdefault(id(item[1].states.get(item[2])), []).append(item)
        for value, full in full_values(sharded):
            for item in parts.pop(id(value)):
                self._cut(*item, full)
        for of, each, name in (item for items in parts.values() for item in items):
            found: Any = each.states.get(name)
            self._cut(of, each, name, found.full_tensor() if isinstance(found, DTensor) else found)

    def _cut(self, of: OfParam, each: Wanted, name: str, full: Tensor | None) -> None:
        """Keep what is this rank's of all scales of a state, and have a sharded tensor stand for them."""
        blocks, param = of.blocks, each.param
        shape, device = (blocks.num_all,), param.storage_device
        if full is not None and tuple(full.shape) != shape:
            raise StateError(
                f"{param.name}: there must be one scale for each {blocks.size} elements, {blocks.num_all} in all, but "
                f"'{name}' in the optimizer's state has shape {tuple(full.shape)}. Load states of the same block_size."
            )
        first, last = blocks.span
        scales = torch.zeros(last - first, device=device)
        if full is not None:
            scales.copy_(full[first:last])
        value: Any = each.states.get(name)
        place = place_of(param)
        if type(value) not in SHARDED or place_beside(place, value) != place_of(value):
            value = each.states[name] = sharded_beside(param, shape, torch.float32)
        value.origin = None
        of.kept[name] = _Kept(scales, weakref.ref(value.shard_storage), version=0)

    def __call__(self, storage: ShardStorage) -> None:
        """As what a shard awaits: all are put together."""
        self.settle()

    def settle(self) -> None:
        """Give all ranks their shards of all scales that some await.

        Communicates:
            An all-reduce of four bytes per block for each dim of a mesh that cuts parameters, in chunks.
        """
        waiting = [(of, kept) for of in self._params.values() for kept in of.kept.values() if kept.version is None]
        with outside_autograd():
            for chunk in _chunks(waiting):
                _put_together(chunk)


_Item = tuple[OfParam, _Kept]


def _chunks(items: Sequence[_Item]) -> Iterator[list[_Item]]:
    """Scales that can be put together at once."""
    kinds: dict[Any, list[_Item]] = {}
    for item in items:
        key = tuple(group.full_name for group in item[0].groups), item[1].scales.device
        kinds.setdefault(key, []).append(item)
    for same in kinds.values():
        chunk: list[_Item] = []
        num = 0
        for item in same:
            if chunk and num + item[0].blocks.num_all > _AT_ONCE:
                yield chunk
                chunk, num = [], 0
            chunk.append(item)
            num += item[0].blocks.num_all
        yield chunk


def _put_together(items: Sequence[_Item]) -> None:
    """Give all ranks their shards of some scales, which lie over the same ranks."""
    of = items[0][0]
    sizes = [each.blocks.num_all for each, _ in items]
    row = torch.zeros(sum(sizes), device=items[0][1].scales.device)
    for (each, kept), full in zip(items, row.split(sizes), strict=True):
        full[slice(*each.blocks.span)] = kept.scales
    for group in of.groups:  # of a block that is cut several ranks have the scale, and the others zero
        label = f"scales of optimizer states of '{of.name}' and {len(items) - 1} more"
        row = collectives.all_reduce([row], group, ReduceOp.MAX, label=label).wait()[0]
    for (each, kept), full in zip(items, row.split(sizes), strict=True):
        storage = kept.storage()
        kept.version = 0
        if storage is not None:
            storage.deliver(shard_of(full, storage.layout, each.rank).clone())
            kept.version = storage.version
