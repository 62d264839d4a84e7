"""The scales of blocks of optimizer states: each rank keeps those of the blocks that its shards have elements of.

In `optimizer.state` a sharded tensor stands for them, one number per block. Its shards are not there between steps:
they await `Scales`. Whoever uses one, as a checkpoint does, has all of them put together from what ranks keep, by a
collective; from then on the shards count, which anybody may write to or load, and the next step takes what it needs
from them again, by another collective. A step finds out which it is by what the shard awaits, on all ranks alike.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dshard import collectives
from dshard.autograd import outside_autograd
from dshard.collectives import ReduceOp, ShardGroup, shard_of
from dshard.errors import StateError
from dshard.layout import ShardLayout, by_kind, packs
from dshard.optimizer.blocks import Blocks
from dshard.optimizer.replace import full_values, place_beside, place_of, sharded_beside
from dshard.tensor.meshes import distinct_groups
from dshard.tensor.sharded_tensor import SHARDED, ShardedTensor
from dshard.tensor.storage import ShardStorage

_AT_ONCE = 1 << 22  # scales that are put together at a time


@dataclass(frozen=True, slots=True, eq=False)
class ParamScales:
    """The scales of a parameter's states.

    Args:
        param: The parameter.
        layout: How it was cut when they were found.
        groups: Over which ranks.
        rank: Number of this one in data parallelism.
        blocks: Of its shard.
        scales: Those of `blocks.here`, by the names of the states.
        storages: Of the sharded tensors that stand for them.
        awaited: Names of those that were handed over, and not put together since: the same on all ranks.
    """

    param: ShardedTensor
    layout: ShardLayout
    groups: list[ShardGroup]
    rank: int
    blocks: Blocks
    scales: dict[str, Tensor] = field(default_factory=dict)
    storages: dict[str, weakref.ref[ShardStorage]] = field(default_factory=dict)
    awaited: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, param: ShardedTensor, size: int) -> "ParamScales":
        """Where they are to be, for blocks of `size` elements."""
        layout, rank = param.shard_layout, param.shard_group.rank
        return cls(param, layout, distinct_groups(param), rank, Blocks.of(layout, rank, size, param.storage_device))

    @property
    def key(self) -> tuple[str, ...]:
        """Stands for the ranks."""
        return tuple(group.full_name for group in self.groups)

    def fits(self, size: int) -> bool:
        """Whether the parameter lies where it lay, and blocks are of that size."""
        is_there = self.layout == self.param.shard_layout and self.groups == distinct_groups(self.param)
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


_Missing = tuple[ParamScales, Wanted, str]


class Scales:
    """The scales of an optimizer's states; as what the shards of their sharded tensors await."""

    def __init__(self) -> None:
        self._params: list[ParamScales] = []  # in the order of the optimizer's groups

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank keeps for them between steps."""
        return sum(each.nbytes for of in self._params for each in (*of.scales.values(), of.blocks.here))

    def take(self, wanted: Sequence[Wanted], params: Iterable[Tensor]) -> list[ParamScales]:
        """Scales to read and write; the shards that stand for them await them from now on.

        Args:
            wanted: Which.
            params: All parameters of the optimizer.

        Raises:
            StateError: A state is of another number of blocks. On every rank alike.

        Communicates:
            Where shards are there, because somebody has used or loaded them, or a parameter was moved: all-gathers.
        """
        order = {id(param): place for place, param in enumerate(params)}
        sizes = {id(each.param): each.size for each in wanted}
        known: dict[int, ParamScales] = {}
        leaving = []
        for of in self._params:
            key = id(of.param)
            if key in order and of.fits(sizes.get(key, of.blocks.size)):
                known[key] = of
            else:
                leaving.append(of)
        self._settle(leaving)
        found = [known.get(id(each.param)) or ParamScales.of(each.param, each.size) for each in wanted]
        known.update((id(of.param), of) for of in found)
        self._params = sorted(known.values(), key=lambda of: order[id(of.param)])
        both = list(zip(found, wanted, strict=True))
        missing = self._missing(both)
        replaced = {of: None for of, _, name in missing if name in of.awaited}
        if replaced:  # whoever keeps what stood for them may use it yet
            self._settle(list(replaced))
            missing = self._missing(both)
        self._fetch(missing)
        return found

    def _missing(self, both: Sequence[tuple[ParamScales, Wanted]]) -> list[_Missing]:
        """Those that are not here, or that nothing which awaits them stands for."""
        given = [(of, each, name) for of, each in both for name in each.names]
        return [item for item in given if not self._holds(item[0], item[2], item[1].states.get(item[2]))]

    def _holds(self, of: ParamScales, name: str, value: Any) -> bool:
        """Whether what stands for the scales of a state awaits those that are here."""
        if type(value) not in SHARDED or name not in of.storages:
            return False
        storage: ShardStorage = value.shard_storage
        return of.storages[name]() is storage and storage.does_await(self)

    def _fetch(self, missing: Sequence[_Missing]) -> None:
        """Get scales from what stands for them in `optimizer.state`."""
        sharded: dict[int, list[_Missing]] = {}
        values: list[ShardedTensor] = []
        for item in missing:
            value: Any = item[1].states.get(item[2])
            if type(value) in SHARDED:
                if id(value) not in sharded:
                    values.append(value)
                sharded.setdefault(id(value), []).append(item)
            else:
                self._keep(item, value.full_tensor() if isinstance(value, DTensor) else value)
        for value, full in full_values(values):
            for item in sharded[id(value)]:
                self._keep(item, full)

    def _keep(self, item: _Missing, full: Tensor | None) -> None:
        """Keep what is this rank's of all scales of a state, and have what stands for them await it."""
        of, each, name = item
        blocks, param, shape = of.blocks, each.param, (of.blocks.num_all,)
        check_scales(param.name, name, full, blocks)
        scales = torch.zeros(blocks.here.numel(), dtype=torch.float32, device=param.storage_device)
        if full is not None:
            scales.copy_(full.to(scales.device)[blocks.here])
        value: Any = each.states.get(name)
        place = place_of(param)
        if type(value) not in SHARDED or place_beside(place, value) != place_of(value):
            value = each.states[name] = sharded_beside(param, shape, torch.float32)
        value.origin = None
        of.scales[name], of.storages[name] = scales, weakref.ref(value.shard_storage)
        of.awaited.add(name)
        value.shard_storage.hand_over(self)

    def __call__(self, storage: ShardStorage) -> None:
        """As what a shard awaits: those over the same ranks are put together."""
        key = next(of.key for of in self._params if any(each() is storage for each in of.storages.values()))
        self._settle([of for of in self._params if of.key == key], storage)

    def _settle(self, params: Sequence[ParamScales], asked: ShardStorage | None = None) -> None:
        """Give all ranks their shards of all scales of some parameters that shards await.

        Args:
            params: Which.
            asked: What has just been used.

        Communicates:
            An all-reduce of four bytes per block for each dim of a mesh that cuts parameters, in chunks.
        """
        with outside_autograd():
            for chunk in _chunks([(of, name) for of in params for name in of.scales if name in of.awaited]):
                for of, name, full in _put_together(chunk):
                    of.awaited.remove(name)
                    storage = of.storages[name]()
                    if storage is None or not (storage is asked or storage.does_await(self)):
                        continue  # nobody keeps it, or it was given another shard
                    storage.deliver(shard_of(full, storage.layout, of.rank).clone())


def check_scales(param_name: str, name: str, scales: Tensor | None, blocks: Blocks) -> None:
    """Refuse scales of another number of blocks.

    Raises:
        StateError: They are.
    """
    if scales is not None and tuple(scales.shape) != (blocks.num_all,):
        raise StateError(
            f"{param_name}: there must be one scale for each {blocks.size} elements, {blocks.num_all} in all, but "
            f"'{name}' in the optimizer's state has shape {tuple(scales.shape)}. Load states of the same block_size."
        )


def largest_of_all(values: Sequence[Tensor], groups: Sequence[ShardGroup], label: str) -> list[Tensor]:
    """The largest of numbers of at least 0, or NaN, over ranks: by their bits, of which those of NaN are largest.

    Communicates:
        An all-reduce over each group.
    """
    bits = [each.view(torch.int32) for each in values]
    for group in groups:
        bits = collectives.all_reduce(bits, group, ReduceOp.MAX, label=label).wait()
    return [each.view(torch.float32) for each in bits]


def _chunks(items: Sequence[tuple[ParamScales, str]]) -> Iterator[list[tuple[ParamScales, str]]]:
    """Scales that can be put together at once, by parameter and name."""
    for same in by_kind(items, lambda item: (item[0].key, item[0].blocks.here.device)):
        yield from packs(same, lambda item: item[0].blocks.num_all, _AT_ONCE)


def _put_together(items: Sequence[tuple[ParamScales, str]]) -> Iterator[tuple[ParamScales, str, Tensor]]:
    """The full scales of what lies over the same ranks, on each."""
    first = items[0][0]
    sizes = [of.blocks.num_all for of, _ in items]
    row = torch.zeros(sum(sizes), dtype=torch.float32, device=first.blocks.here.device)
    for (of, name), full in zip(items, row.split(sizes), strict=True):
        full[of.blocks.here] = of.scales[name]
    label = f"scales of optimizer states of '{first.param.name}' and {len(items) - 1} more"
    (row,) = largest_of_all([row], first.groups, label)  # ranks that have none of a block say zero
    for (of, name), full in zip(items, row.split(sizes), strict=True):
        yield of, name, full
