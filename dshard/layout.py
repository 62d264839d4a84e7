"""Pure shard arithmetic: which elements each rank holds, where they lie in a bucket, and what travels beside them.

Collectives do it so, and the planner counts with the same numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dshard.errors import PlacementError

HEADER_BYTES = 64  # of what each rank says to each peer ahead of a collective, where rows are received one by one
INLINE_BYTES = 1 << 14  # of values that travel in the message of their header, at most
MIN_DIRECT_BYTES = 1 << 16  # of a full tensor whose shards travel alone, to their place; others are cut out of rows
ALIGN_BYTES = 256  # of each full tensor within the memory of its bucket: no kernel of cuBLAS asks for more
SMALL_GRAD_BYTES = 1 << 16  # up to this size gradients wait as they are, to be packed when their bucket leaves
_FLAGS_NUMEL = 16  # of which a row of flags is a multiple


def flags_numel(num_tensors: int) -> int:
    """Elements ahead of each row of a reduction: a flag per tensor, whether a rank had a gradient, and padding."""
    return -(-num_tensors // _FLAGS_NUMEL) * _FLAGS_NUMEL


@dataclass(frozen=True, slots=True)
class Extent:
    """Half-open range `[start, stop)` of indices along one dim, in elements."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of indices in the range."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """How a tensor of `shape` is cut along `dim` over `num_ranks` ranks.

    The cut follows `torch.chunk`: every rank but the last non-empty one holds `ceil(D / N)` indices; ranks past the
    end hold an empty shard of the right rank and dtype. With `dim=None` every rank holds the whole tensor (the
    layout of 0-d tensors, and of `Replicate()`).

    Args:
        shape: Full (global) shape.
        dim: Dim that is cut, non-negative; None for a whole copy on every rank.
        num_ranks: Number of ranks, at least 1.

    Raises:
        PlacementError: `dim` is not a dim of `shape`, or `num_ranks` is below 1. A function of the arguments alone, so
            every rank raises alike.

    Communicates:
        Nothing.
    """

    shape: tuple[int, ...]
    dim: int | None
    num_ranks: int
    chunk_size: int = field(init=False)
    slot_numel: int = field(init=False)

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise PlacementError(
                f"layout: num_ranks must be at least 1, but it is {self.num_ranks}. Pass the mesh size."
            )
        if self.dim is not None and not 0 <= self.dim < len(self.shape):
            raise PlacementError(
                f"layout: the sharded dim must be in [0, {len(self.shape)}), but it is {self.dim} (shape "
                f"{self.shape}). Use a dim that the tensor has."
            )
        chunk = 0 if self.dim is None else -(-self.shape[self.dim] // self.num_ranks)
        object.__setattr__(self, "chunk_size", chunk)
        object.__setattr__(self, "slot_numel", self.local_numel(0))

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return math.prod(self.shape)

    def extent(self, rank: int) -> Extent:
        """Indices along `dim` that `rank` holds; `[0, 1)` for a layout that is not cut."""
        if self.dim is None:
            return Extent(0, 1)
        size = self.shape[self.dim]
        start = min(rank * self.chunk_size, size)
        return Extent(start, min(start + self.chunk_size, size))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the shard of `rank`."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.extent(rank).size, *self.shape[self.dim + 1 :])

    def local_numel(self, rank: int) -> int:
        """Elements of the shard of `rank`."""
        return math.prod(self.local_shape(rank))


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Where the shards of several tensors of one dtype lie in a bucket.

    A bucket holds one *segment* per rank, all of one size; a segment holds one *slot* per tensor, sized for the largest
    shard. A shard fills the front of its slot; what is left is padding, which is never read.

    Args:
        layouts: One layout per tensor, all over the same number of ranks.
    """

    layouts: tuple[ShardLayout, ...]
    offsets: tuple[int, ...] = field(init=False)
    slot_sizes: tuple[int, ...] = field(init=False)
    segment_numel: int = field(init=False)

    def __post_init__(self) -> None:
        offsets, total = [], 0
        for layout in self.layouts:
            offsets.append(total)
            total += layout.slot_numel
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "slot_sizes", tuple(layout.slot_numel for layout in self.layouts))
        object.__setattr__(self, "segment_numel", total)

    @classmethod
    def of(cls, layouts: Sequence[ShardLayout]) -> "BucketLayout":
        """Lay out `layouts` one after the other."""
        return cls(tuple(layouts))

    @property
    def num_ranks(self) -> int:
        """Ranks over which the bucket is cut."""
        return self.layouts[0].num_ranks if self.layouts else 1
