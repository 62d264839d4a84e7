"""Pure shard arithmetic: which elements each rank holds, where they lie in a bucket, and what travels beside them.

Collectives do it so, and the planner counts with the same numbers.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from dshard.errors import PlacementError

HEADER_BYTES = 64  # of what each rank says to each peer ahead of a collective, where rows are received one by one
INLINE_BYTES = 1 << 14  # of values that travel in the message of their header, at most
MIN_DIRECT_BYTES = 1 << 16  # of a full tensor whose shards travel alone, to their place; others are cut out of rows
ALIGN_BYTES = 256  # of each full tensor within the memory of its bucket: no kernel of cuBLAS asks for more
ROW_NUMEL = 1 << 10  # up to this size an optimizer steps shards in rows with others
SLOT_BYTES = 16  # of which what owners are sent of a tensor is a multiple: as every element size is a part of it
ROUND_BYTES = 8 << 20  # of the tensors that one owner steps at a time, unless one alone is larger
SMALL_GRAD_BYTES = 1 << 16  # up to this size gradients wait as they are, to be packed when their bucket leaves
_FLAGS_NUMEL = 16  # of which a row of flags is a multiple
_T = TypeVar("_T")


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


def assign(costs: Sequence[float], num_owners: int) -> list[int]:
    """Share work out so that the rank with the most has as little as possible, or nearly.

    The largest first, each to the rank with the least so far (LPT, Graham 1969); then moves and swaps away from the
    rank with the most, as long as they help or until it is within 1 % of what no assignment can be below. A dozen
    pieces or fewer are shared out as well as can be.

    Args:
        costs: Of each piece of work, not negative.
        num_owners: Ranks.

    Returns:
        The rank of each.
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    loads, owners = [0.0] * num_owners, [0] * len(costs)
    for i in order:
        owner = min(range(num_owners), key=loads.__getitem__)
        owners[i] = owner
        loads[owner] += costs[i]
    two = [costs[order[i]] for i in (num_owners - 1, num_owners) if len(order) > num_owners]
    least = max(sum(costs) / num_owners, max(costs, default=0.0), sum(two))  # two of the largest are on one rank
    for _ in range(_MAX_EXCHANGES):
        most = max(range(num_owners), key=loads.__getitem__)
        if loads[most] <= 1.01 * least or not _relieve(most, costs, owners, loads):
            break
    if max(loads) > 1.01 * least and len(order) <= _MAX_SEARCHED:
        search = _Search([costs[i] for i in order], num_owners, max(loads))
        for i, owner in zip(order, search.found, strict=False):
            owners[i] = owner
    return owners


_MAX_EXCHANGES = 200
_MAX_SEARCHED = 12  # pieces of work


class _Search:
    """All ways to share out a few pieces of work, but for those that cannot be better than what is known.

    Args:
        costs: Of each, the largest first.
        num_owners: Ranks.
        best: The largest load of an assignment that is known.

    Attributes:
        found: The rank of each, in a better one; empty if there is none.
    """

    def __init__(self, costs: list[float], num_owners: int, best: float) -> None:
        self._costs, self._best = costs, best
        self._loads, self._owners = [0.0] * num_owners, [0] * len(costs)
        self.found: list[int] = []
        self._go(0)

    def _go(self, number: int) -> None:
        if number == len(self._costs):
            self._best, self.found = max(self._loads), list(self._owners)
            return
        cost, tried = self._costs[number], set()
        for owner, load in enumerate(self._loads):
            if load not in tried and load + cost < self._best:
                tried.add(load)
                self._owners[number] = owner
                self._loads[owner] += cost
                self._go(number + 1)
                self._loads[owner] = load


def _relieve(most: int, costs: Sequence[float], owners: list[int], loads: list[float]) -> bool:
    """Move work from the rank with the most to another one, or swap some, so that both have less; gives whether it did.

    The best pair is taken: that after which the larger of the two loads is least.
    """
    own = {costs[i]: i for i, owner in enumerate(owners) if owner == most}
    others = {(owner, costs[i]): i for i, owner in enumerate(owners) if owner != most}
    nothing = {(owner, 0.0): -1 for owner in range(len(loads)) if owner != most}
    best, found = loads[most], None
    for cost, i in own.items():
        for (owner, other), j in (*nothing.items(), *others.items()):
            after = max(loads[most] - cost + other, loads[owner] + cost - other)
            if after < best:
                best, found = after, (i, j, owner, cost - other)
    if found is None:
        return False
    i, j, owner, moved = found
    owners[i] = owner
    if j >= 0:
        owners[j] = most
    loads[most] -= moved
    loads[owner] += moved
    return True


def product_cost(shape: Sequence[int]) -> float:
    """Work of a step that multiplies a matrix with itself, in products of numbers; of a vector its elements."""
    numel = math.prod(shape)
    return float(numel * min(shape[0], numel // shape[0])) if len(shape) > 1 and numel else float(numel)


def rounds_of(num_bytes: Sequence[int], owners: Sequence[int]) -> list[list[int]]:
    """Which tensors are stepped at a time: of each owner a few, the largest first.

    Args:
        num_bytes: Of each tensor.
        owners: The rank that steps each.

    Returns:
        The places of those of each round, by owner.
    """
    places = sorted(range(len(owners)), key=lambda i: (owners[i], -num_bytes[i]))
    owned = [list(packs(mine, num_bytes.__getitem__, ROUND_BYTES)) for mine in by_kind(places, owners.__getitem__)]
    num_rounds = max(map(len, owned), default=0)
    return [[i for mine in owned if number < len(mine) for i in mine[number]] for number in range(num_rounds)]


def by_kind(items: Iterable[_T], kind_of: Callable[[_T], Hashable]) -> Iterable[list[_T]]:
    """Items of one kind together, kinds in the order in which their first ones come."""
    kinds: dict[Hashable, list[_T]] = {}
    for item in items:
        kinds.setdefault(kind_of(item), []).append(item)
    return kinds.values()


def packs(items: Iterable[_T], size_of: Callable[[_T], int], most: int) -> Iterator[list[_T]]:
    """Items in order, as many together as are no larger than `most` in all; a larger one is alone."""
    pack: list[_T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if pack and total + size > most:
            yield pack
            pack, total = [], 0
        pack.append(item)
        total += size
    if pack:
        yield pack
