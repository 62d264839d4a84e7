"""The order in which the values of virtual ranks are added: a tree over their numbers alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Node(Generic[T]):
    """The sum over the virtual ranks from `start` on; there are `size` of them, a power of two that divides `start`.

    Args:
        start: First virtual rank.
        size: How many.
        value: Their sum; None where it is zero.
    """

    start: int
    size: int
    value: T | None


def nodes_between(start: int, stop: int) -> list[tuple[int, int]]:
    """The start and size of the largest nodes that make up some neighbouring virtual ranks, in order."""
    found = []
    while start < stop:
        size = 1 << (stop - start).bit_length() - 1
        size = min(size, start & -start) if start else size
        found.append((start, size))
        start += size
    return found


class TreeSum(Generic[T]):
    """A sum that is always taken in one order, whoever holds which part of it.

    The tree: neighbours are added in pairs, those sums in pairs, and so on, where a pair begins at a multiple of its
    size. What is left of a number that is no power of two is added from the right: 7 values are
    `((0+1)+(2+3)) + ((4+5)+6)`.

    Args:
        add: Gives the sum of two values, of which it may take the memory; either may be None, for zero.
    """

    def __init__(self, add: Callable[[T | None, T | None], T | None]) -> None:
        self._add = add
        self.nodes: list[Node[T]] = []  # that could not be added yet, in order

    def push(self, start: int, size: int, value: T | None) -> None:
        """Take the sum over the next virtual ranks, a node of the tree."""
        node = Node(start, size, value)
        while self.nodes and self.nodes[-1].size == node.size and not self.nodes[-1].start % (2 * node.size):
            left = self.nodes.pop()
            node = Node(left.start, 2 * left.size, self._add(left.value, node.value))
        self.nodes.append(node)

    def total(self) -> T | None:
        """The sum of all, which must be all virtual ranks."""
        total = self.nodes.pop().value
        while self.nodes:
            total = self._add(self.nodes.pop().value, total)
        return total
