"""The memory of a shard, which may still be in flight."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["ShardCell"]


class ShardCell:
    """Holds one shard; shared by a ShardedTensor and its detached aliases.

    Args:
        tensor: The shard, or None while it is in flight.
        pending: Called with the cell at the first use; must leave a tensor in it.
    """

    __slots__ = ("__weakref__", "_pending", "_tensor")

    def __init__(self, tensor: Tensor | None, pending: Callable[["ShardCell"], None] | None = None) -> None:
        self._tensor = tensor
        self._pending = pending

    @property
    def is_pending(self) -> bool:
        """Whether the shard still awaits a collective or an addition."""
        return self._pending is not None

    @property
    def version(self) -> int:
        """Counts the writes to the shard, ours and those to `to_local()` by others."""
        return int(self.resolve()._version)

    def resolve(self) -> Tensor:
        """The shard, after waiting for what it awaits."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending(self)
        assert self._tensor is not None, "a pending shard was not delivered"
        return self._tensor

    def deliver(self, tensor: Tensor) -> None:
        """Put the shard that was awaited, or another one, in place."""
        self._tensor = tensor

    def add_later(self, other: "ShardCell") -> None:
        """Add a shard that is in flight, once one of the two is used."""
        before = self._pending

        def add(cell: ShardCell) -> None:
            if before is not None:
                before(cell)
            assert cell._tensor is not None
            cell._tensor.add_(other.resolve())
            torch.autograd.graph.increment_version(cell._tensor)

        self._pending = add
