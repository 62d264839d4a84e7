"""torch's caching allocator of CUDA memory, as far as sizes go: which blocks requests find, and which they make."""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

ROUND_BYTES = 512  # every block is a multiple
SMALL_BYTES = 1 << 20  # requests up to this come out of the small pool
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_LARGE_FROM = 10 << 20  # requests from here on have a segment of their own
_ROUND_LARGE = 2 << 20


def rounded(num_bytes: int) -> int:
    """Bytes of the block that a request takes."""
    return -(-num_bytes // ROUND_BYTES) * ROUND_BYTES


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment, in use or free.

    Args:
        num_bytes: Of it.
        place: Number that tells it from others of its size: those that were made first are taken first.
        pool: Stream, and whether it is of the small pool.
        is_free: Whether it may be handed out.
        before: Its neighbour in the segment.
        after: The other one.
    """

    num_bytes: int
    place: tuple[int, int]
    pool: tuple[str, bool]
    is_free: bool = False
    before: "Block | None" = field(default=None, repr=False)
    after: "Block | None" = field(default=None, repr=False)


class CachingAllocator:
    """Hands out blocks as `c10/cuda/CUDACachingAllocator.cpp` does, without a limit and with its default settings.

    A request takes the smallest free block of its stream and pool, of which what is left over stays free; free
    neighbours become one. Without such a block, a segment is made; with `expandable` the one segment of the stream
    and pool grows by whole pages. Segments are kept.

    Args:
        expandable: `expandable_segments:True`.

    Attributes:
        active_bytes: Of blocks in use, and of those let go that another stream may still use.
        reserved_bytes: Of segments.
        peak_active_bytes: The most of these.
        peak_reserved_bytes: The most of those.
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self.active_bytes = self.reserved_bytes = 0
        self.peak_active_bytes = self.peak_reserved_bytes = 0
        self._expandable = expandable
        self._free: dict[tuple[str, bool], list[tuple[int, tuple[int, int], Block]]] = {}
        self._last: dict[tuple[str, bool], Block] = {}  # of a segment that grows, the block at its end
        self._num_segments = 0

    def allocate(self, num_bytes: int, stream: str = "compute") -> Block:
        """A block of at least so many bytes, at least one."""
        size = rounded(num_bytes)
        pool = stream, size <= SMALL_BYTES
        block = self._found(size, pool)
        if block is None:
            block = self._grown(size, pool) if self._expandable else self._made(size, pool)
        rest = block.num_bytes - size
        if rest >= ROUND_BYTES if pool[1] or self._expandable else rest > SMALL_BYTES:
            self._cut(block, size)
        block.is_free = False
        self.active_bytes += block.num_bytes
        self.peak_active_bytes = max(self.peak_active_bytes, self.active_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back, once no stream uses it."""
        self.active_bytes -= block.num_bytes
        after, before = block.after, block.before
        if after is not None and after.is_free:
            self._take(after)
            self._join(block, after)
        if before is not None and before.is_free:
            self._take(before)
            self._join(before, block)
            block = before
        self._put(block)

    def _found(self, size: int, pool: tuple[str, bool]) -> Block | None:
        """The smallest free block that is large enough; the end of a segment that grows counts as larger than any."""
        free, last = self._free.setdefault(pool, []), self._last.get(pool)
        place = bisect_left(free, size, key=lambda entry: entry[0])
        if place < len(free) and free[place][2] is last and place + 1 < len(free):
            place += 1
        return free.pop(place)[2] if place < len(free) else None

    def _made(self, size: int, pool: tuple[str, bool]) -> Block:
        """A segment."""
        if pool[1]:
            segment = _SMALL_SEGMENT
        else:
            segment = _LARGE_SEGMENT if size < _LARGE_FROM else -(-size // _ROUND_LARGE) * _ROUND_LARGE
        self._reserve(segment)
        self._num_segments += 1
        return Block(segment, (self._num_segments, 0), pool)

    def _grown(self, size: int, pool: tuple[str, bool]) -> Block:
        """The end of the segment, with as many pages more as it lacks."""
        last = self._last.get(pool)
        if last is not None and last.is_free:
            self._take(last)
        else:
            before, last = last, Block(0, (0, 0) if last is None else (0, last.place[1] + last.num_bytes), pool)
            last.before = before
            if before is not None:
                before.after = last
            self._last[pool] = last
        page = _SMALL_SEGMENT if pool[1] else _LARGE_SEGMENT
        more = -(-(size - last.num_bytes) // page) * page
        self._reserve(more)
        last.num_bytes += more
        return last

    def _reserve(self, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _cut(self, block: Block, size: int) -> None:
        """Leave what is beyond `size` free."""
        place = block.place[0], block.place[1] + size
        rest = Block(block.num_bytes - size, place, block.pool, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.num_bytes = rest, size
        if self._last.get(block.pool) is block:
            self._last[block.pool] = rest
        self._put(rest)

    def _join(self, block: Block, after: Block) -> None:
        block.num_bytes += after.num_bytes
        block.after = after.after
        if after.after is not None:
            after.after.before = block
        if self._last.get(block.pool) is after:
            self._last[block.pool] = block

    def _put(self, block: Block) -> None:
        block.is_free = True
        insort(self._free.setdefault(block.pool, []), (block.num_bytes, block.place, block), key=_size_and_place)

    def _take(self, block: Block) -> None:
        """Out of the free ones, by its size and place, which no other shares."""
        free = self._free[block.pool]
        free.pop(bisect_left(free, (block.num_bytes, block.place), key=_size_and_place))


def _size_and_place(entry: tuple[int, tuple[int, int], Block]) -> tuple[int, tuple[int, int]]:
    return entry[:2]
