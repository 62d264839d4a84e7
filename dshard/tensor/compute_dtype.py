"""The two dtypes of a parameter under mixed precision: the one it is kept in, and the one of forwards."""

from typing import Any

import torch

from dshard.policies import Offload

__all__ = ["ComputeDtype"]

_DTYPE: Any = torch.Tensor.dtype  # descriptor; autograd and torch's own code go by it


class ComputeDtype:
    """The part of ShardedTensor that tells its dtype, and converts it; its `self` is one.

    In the forward of a sharded module a parameter under mixed precision has its compute dtype, for programs that ask
    and for operations; elsewhere the dtype that it is kept in.
    """

    has_compute_dtype: bool = False
    is_used_in_functions: bool = False  # in a forward, without autograd: in that of a custom function, maybe
    is_used_exactly: bool = False  # outside of any forward, with autograd

    def _dtype_here(self: Any) -> torch.dtype:
        """Of its value where it is used now."""
        return (self.compute_dtype() if self.has_compute_dtype else None) or self.storage_dtype

    dtype: Any = property(_dtype_here)

    @property
    def storage_dtype(self) -> torch.dtype:
        """Of its shards; of a view, that of its elements."""
        found: torch.dtype = _DTYPE.__get__(self)
        return found

    def compute_dtype(self: Any) -> torch.dtype | None:
        """The dtype that it has in the forward that is running, where that is not the one it is kept in; of no view."""
        if not self.has_compute_dtype or self._view is not None or not self.belongs_to_source():
            return None
        dtype: torch.dtype | None = self.gather_source.compute_dtype(self.gather_slot)
        return dtype

    @property
    def storage_device(self: Any) -> torch.device:
        """Of its shard."""
        found: torch.device = self.device
        return found

    @property
    def offload(self: Any) -> Offload | None:
        """Where a parameter is kept and used, if those are two places."""
        return self.wire_precision.offload if self.wire_precision is not None else None

    def computes(self: Any) -> bool:
        """Whether a use of it here means its value in the compute dtype."""
        if self._view is not None:
            return bool(self._view.computes)
        return self.has_compute_dtype and self.belongs_to_source() and self.gather_source.computes(self.gather_slot)

    def belongs_to_source(self: Any) -> bool:
        """Whether its unit gathers it: a detached alias of a parameter whose `.data` was replaced is on its own."""
        source = self.gather_source
        return source is not None and source.params[self.gather_slot].shard_storage is self.shard_storage
