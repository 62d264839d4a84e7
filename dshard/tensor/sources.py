"""Where the full value of a ShardedTensor comes from: a unit, or the tensor that it is a copy of."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dshard.tensor.shard_storage import ShardStorage
from dshard.tensor.views import View


@dataclass(slots=True, eq=False)
class Use:
    """The use of full values by one operation. Nobody writes to a shard while its operands are gathered.

    Args:
        operands: What the operation was given.
        fresh: The gathered copies that were last found fresh for it.
    """

    operands: tuple[Any, ...]
    fresh: object = None


class GatherSource(Protocol):
    """What keeps gathered copies: a unit."""

    params: list[Any]  # ShardedTensors
    num_active: int  # forwards of its modules that are running

    @property
    def is_running(self) -> bool:
        """Whether any forward of its model runs."""

    def full(self, slot: int, view: View | None = None, use: Use | None = None) -> Tensor:
        """The full value of the unit's parameter number `slot`, or a view of it, gathered if need be, for a use."""

    def full_in(self, slot: int, dtype: torch.dtype, use: Use | None = None) -> Tensor:
        """The full value in a given dtype, converted from the one that the parameter is kept in."""

    def compute_dtype(self, slot: int) -> torch.dtype | None:
        """The dtype of a parameter in the forward that is running, if that is not the one it is kept in."""

    def computes(self, slot: int, use: Use | None = None) -> bool:
        """Whether a use of a parameter here means its value in the compute dtype."""

    def pinned(self, slot: int) -> Tensor | None:
        """The full value of a parameter, if an open `gathered` scope holds it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The tensor of which another is a cast or copy, for as long as neither was written to since."""

    tensor: Any  # a ShardedTensor
    storage: ShardStorage
    version: int
    own_version: int

    def holds_for(self, copy: Any) -> bool:
        """Whether neither was written to, nor swapped for another tensor."""
        return (
            self.tensor is not copy  # a swap of tensors can make it so
            and self.tensor.shard_storage is self.storage
            and not self.storage.is_retired
            and self.storage.version == self.version
            and copy.shard_storage.version == self.own_version
        )


def is_used_away(compute: torch.device, use: Use | None) -> bool:
    """Whether an operation's other operands are on a compute device, or autograd records it, or runs it."""
    if use is None:
        return False
    operands = [x for arg in use.operands for x in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    tensors = [x for x in operands if isinstance(x, Tensor)]
    if any(x.device == compute for x in tensors if x.dim()):
        return True
    is_recorded = torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1
    return is_recorded and any(x.requires_grad for x in tensors)


def rejoin_source(tensor: Any) -> None:
    """Have a cast or copy that `module.to(...)` swapped into a parameter's place belong to that one's unit."""
    unit, slot = tensor.swapped_source
    if unit.params[slot] is tensor:
        tensor.gather_source, tensor.gather_slot = unit, slot
        # The hook is that of another object, and the origin is the tensor itself, with memory that it has no more.
        tensor.swapped_source = tensor.grad_hook_handle = tensor.origin = None
