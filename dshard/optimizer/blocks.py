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

_AT_ONCE = 1 << 20  # elements whose blocks are looked for at a time


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The blocks of one parameter, and of this rank's shard of it.

    Args:
        size: Elements of a block.
        num_all: Blocks of the full parameter.
        shape: Of the shard.
        strides: From one element of the shard to the next along each dim, in elements of the full parameter.
        start: Place of the shard's first element there.
        whole: The elements of the shard that are all of their blocks.
        parts: Other elements, whose blocks other ranks have some of.
        here: Numbers of the blocks that the shard has elements of, ascending, in int32.
        cut: Numbers of those that some ranks share, ascending, the same on all ranks; None if it may be any.
    """

    size: int
    num_all: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    whole: Range
    parts: tuple[Range, ...]
    here: Tensor
    cut: Tensor | None

    @classmethod
    def of(cls, layout: ShardLayout, rank: int, size: int, device: torch.device) -> "Blocks":
        """Find them for the shard of a rank, of a parameter whose elements fill blocks of `size`.

        Args:
            layout: How the parameter is cut.
            rank: Number of the rank in data parallelism.
            size: Of a block.
            device: Where the shard is.
        """
        full = torch.empty(full_shape(layout), device="meta")
        shard = part_of(full, layout, rank)
        start, numel = int(shard.storage_offset()), shard.numel()
        shape, strides = tuple(shard.shape), tuple(shard.stride())
        whole: Range = (0, numel)
        parts: list[Range] = []
        cut: Tensor | None = torch.empty(0, dtype=torch.int64, device=device)
        if _are_ranges(layout):
            begin, end = min(-start % size, numel), max(numel - (start + numel) % size, 0)
            whole = (begin, end) if begin < end else (0, 0)
            parts = [(0, begin), (max(begin, end), numel)]
            cut = torch.tensor(sorted({at // size for at in _starts(layout) if at % size}), device=device).long()
            first, last = (start // size, -(-(start + numel) // size)) if numel else (0, 0)
            here = torch.arange(first, last, device=device)
        else:
            if not _are_aligned(layout, size):
                whole, parts, cut = (0, 0), [(0, numel)], None
            found = [torch.empty(0, dtype=torch.int64, device=device)]
            for part in chunks((0, numel), _AT_ONCE):
                places = _places(part, shape, strides, start, device)
                found += [places.div_(size, rounding_mode="floor").unique()]
            here = torch.cat(found).unique()
        parts = [part for part in parts if part[0] < part[1]]
        return cls(size, full.numel() // size, shape, strides, start, whole, tuple(parts), here.int(), cut)

    @property
    def num_cut(self) -> int:
        """How many blocks ranks may share."""
        return self.num_all if self.cut is None else self.cut.numel()

    def numbers(self, part: Range) -> Tensor:
        """The block of each of some elements of the shard, by number."""
        places = _places(part, self.shape, self.strides, self.start, self.here.device)
        return places.div_(self.size, rounding_mode="floor")

    def places_here(self, numbers: Tensor) -> Tensor:
        """Where in `here` blocks are that the shard has elements of."""
        return torch.searchsorted(self.here, numbers.int())

    def places_in_cut(self, numbers: Tensor) -> Tensor:
        """Where among those that ranks may share blocks are."""
        return numbers if self.cut is None else torch.searchsorted(self.cut, numbers)

    def put_shared(self, values: Tensor, into: Tensor) -> None:
        """Write values of the blocks that ranks may share to where those are in `here`."""
        if self.cut is None:
            into.copy_(values[self.here])
        elif self.cut.numel() and self.here.numel():
            places = self.places_here(self.cut).clamp_(max=self.here.numel() - 1)
            is_here = self.here[places] == self.cut
            into[places[is_here]] = values[is_here]


def chunks(part: Range, most: int) -> Iterator[Range]:
    """Some elements, at most so many at a time."""
    for start in range(part[0], part[1], most):
        yield start, min(start + most, part[1])


def _places(part: Range, shape: tuple[int, ...], strides: tuple[int, ...], start: int, device: torch.device) -> Tensor:
    """Places in the full parameter of some elements of a shard."""
    left = torch.arange(*part, device=device)
    places = torch.full_like(left, start)
    for size, step in reversed(list(zip(shape, strides, strict=True))):
        places += left.remainder(size) * step
        left.div_(size, rounding_mode="floor")
    return places


def _cuts(layout: ShardLayout) -> list[tuple[int, int]]:
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


def _are_aligned(layout: ShardLayout, size: int) -> bool:
    """Whether no rank shares a block with another one, though shards are no neighbours."""
    shape = full_shape(layout)
    lengths: dict[int, set[int]] = {}
    for dim, num_ranks in _cuts(layout):
        step = math.prod(shape[dim + 1 :])
        found: set[int] = set()
        for length in lengths.get(dim, {shape[dim]}):
            cut = ShardLayout((length,), 0, num_ranks)
            if cut.chunk_size * step % size:
                return False
            found.update(cut.extent(rank).size for rank in range(num_ranks))
        lengths[dim] = found
        if shape[dim] * step % size:
            return False
    return True


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
