"""Where the blocks of a parameter lie in its shards: a block is some neighbours in the order of the full parameter.

So what is kept per block is the same at any number of ranks. A block may be cut: some of it is on one rank, and some on
another one; then both keep its scale.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from dshard.layout import ShardLayout
from dshard.tensor.meshes import full_shape, part_of, tp_layout_of

Range = tuple[int, int]  # half-open, of elements of a shard in their order there


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The blocks of one parameter, and of this rank's shard of it.

    Args:
        size: Elements of a block.
        shape: Of the shard.
        strides: From one element of the shard to the next along each dim, in elements of the full parameter.
        start: Place of the shard's first element there.
        whole: The elements of the shard that are all of their blocks.
        parts: Other elements, whose blocks other ranks have some of.
        cut: Numbers of the blocks that no rank has all of, ascending; the same on all ranks.
        span: The blocks from the first to the last that the shard has elements of.
        num_all: Blocks of the full parameter.
    """

    size: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    whole: Range
    parts: tuple[Range, ...]
    cut: Tensor
    span: Range
    num_all: int

    @classmethod
    def of(cls, layout: ShardLayout, rank: int, size: int) -> "Blocks":
        """Find them for the shard of a rank, of a parameter whose elements fill blocks of `size`.

        Args:
            layout: How the parameter is cut.
            rank: Number of the rank in data parallelism.
            size: Of a block.
        """
        full = torch.empty(full_shape(layout), device="meta")
        shard, num_all = part_of(full, layout, rank), full.numel() // size
        start, numel = int(shard.storage_offset()), shard.numel()
        whole: Range = (0, 0)
        if _are_ranges(layout):
            stop = start + numel
            begin, end = min(-start % size, numel), max(numel - stop % size, 0)
            whole = (begin, end) if begin < end else whole
            parts = [(0, begin), (max(begin, end), numel)]
            cut = torch.tensor(sorted({at // size for at in _starts(layout) if at % size}), dtype=torch.int64)
        else:
            stop = start + 1 + sum((n - 1) * step for n, step in zip(shard.shape, shard.stride(), strict=True))
            parts, cut = [(0, numel)], torch.arange(num_all)
        span = (start // size, -(-stop // size)) if numel else (0, 0)
        parts = [part for part in parts if part[0] < part[1]]
        return cls(size, tuple(shard.shape), shard.stride(), start, whole, tuple(parts), cut, span, num_all)

    def numbers(self, part: Range, device: torch.device) -> Tensor:
        """The block of each of some elements of the shard, by number."""
        left = torch.arange(*part, device=device)
        places = torch.full_like(left, self.start)
        for size, step in reversed(list(zip(self.shape, self.strides, strict=True))):
            places += left.remainder(size) * step
            left = left.div(size, rounding_mode="floor")
        return places.div(self.size, rounding_mode="floor")

    def places_in_cut(self, part: Range, device: torch.device) -> Tensor:
        """Where in `cut` the block of each of some elements is, all of which are in one of those."""
        return torch.searchsorted(self.cut.to(device), self.numbers(part, device))

    @property
    def cut_here(self) -> Range:
        """Which entries of `cut` are in `span`."""
        first, last = torch.searchsorted(self.cut, torch.tensor(self.span)).tolist()
        return first, last

    @property
    def whole_blocks(self) -> Range:
        """Which entries of `span` are blocks that are whole here."""
        first = (self.start + self.whole[0]) // self.size - self.span[0]
        return first, first + (self.whole[1] - self.whole[0]) // self.size


def chunks(part: Range, most: int) -> Iterator[Range]:
    """Some elements, at most so many at a time."""
    for start in range(part[0], part[1], most):
        yield start, min(start + most, part[1])


def _cuts(layout: ShardLayout) -> list[Range]:
    """The dims along which a parameter is cut, one after the other, and over how many ranks each."""
    tp = tp_layout_of(layout)
    axes = () if tp is None else tp.axes
    found = [(placement.dim, group.num_ranks) for placement, group in axes if isinstance(placement, Shard)]
    found += [] if layout.dim is None else [(layout.dim, layout.num_ranks)]
    return [each for each in found if each[1] > 1]


def _are_ranges(layout: ShardLayout) -> bool:
    """Whether all shards of a parameter are neighbours in its order."""
    shape = full_shape(layout)
    return all(math.prod(shape[:dim]) == 1 for dim, _ in _cuts(layout))


def _starts(layout: ShardLayout) -> list[int]:
    """Where the shards of all ranks begin, if they are neighbours."""
    shape = full_shape(layout)
    pieces = [(0, shape)]
    for dim, num_ranks in _cuts(layout):
        found, step = [], math.prod(shape[dim + 1 :])
        for start, part in pieces:
            cut = ShardLayout(part, dim, num_ranks)
            found += [(start + cut.extent(rank).start * step, cut.local_shape(rank)) for rank in range(num_ranks)]
        pieces = found
    return [start for start, part in pieces if math.prod(part)]
