"""What programs may choose, for a unit and for a model: one object each, which copies and new units take whole."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dshard.collectives import Comms
from dshard.policies import StrategyRules

__all__ = ["BufferSync", "ModelSettings", "UnitSettings"]

_LIFETIMES: dict[str, tuple[bool, bool]] = {  # whether gathered copies are freed after forward, and after backward
    "ddp": (True, True),
    "zero1": (False, False),
    "zero2": (False, False),
    "keep": (False, True),
    "full": (True, True),
}


@dataclass(frozen=True, slots=True)
class UnitSettings:
    """What is chosen for a unit.

    Args:
        reshard_after_forward: Whether it is freed after forward; None for the default of a root or child; a number of
            ranks to keep what as many need for the next gather.
        reshard_after_backward: Whether it is freed after backward.
        strategy: The base of its strategy, if one was named.
        requires_sync: Whether backward reduces its gradients; else they are added up unreduced.
        requires_all_reduce: Whether they are reduced over replicas too; else what is reduced within each is added up.
        averages: Whether they are averaged over the ranks; else they are added.
        divisor: Of summed gradients, in the place of the number of ranks.
        reduce_hook: Called with reduced gradients.
        comms: What takes the place of the backend's collectives.
        num_slices: In which its only parameter is gathered and used.
    """

    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    strategy: str | None = None
    requires_sync: bool = True
    requires_all_reduce: bool = True
    averages: bool = True
    divisor: float | None = None
    reduce_hook: Callable[[Tensor], object] | None = None
    comms: Comms = field(default_factory=Comms)
    num_slices: int = 1

    def under(self, strategy: str) -> "UnitSettings":
        """The same with what a strategy says of when copies are freed and gradients are reduced."""
        after_forward, after_backward = _LIFETIMES[strategy]
        return replace(
            self, strategy=strategy, reshard_after_forward=after_forward, reshard_after_backward=after_backward
        )

    @property
    def but_lifetime(self) -> "UnitSettings":
        """The same without what strategies say."""
        return replace(self, strategy=None, reshard_after_forward=None, reshard_after_backward=True)


@dataclass(frozen=True, slots=True)
class BufferSync:
    """Buffers that are broadcast at the start of each training forward.

    Args:
        modules: All buffers in these.
        mesh: The first rank of it has the values.
    """

    modules: tuple[nn.Module, ...]
    mesh: DeviceMesh

    def __deepcopy__(self, memo: dict[int, Any]) -> "BufferSync":
        return BufferSync(copy.deepcopy(self.modules, memo), self.mesh)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What is chosen for a model; None and empty where nothing was.

    Args:
        prefetch: How many units are gathered ahead.
        max_input_buffers: Reduce-scatters whose send buffers may live at the same time, besides the one that fills.
        memory_budget: Bytes of gathered copies to keep between forward and backward; "auto" until they are known.
        strategies: Set since `fully_shard`, for parameters that come later.
        buffers: That are broadcast.
        virtual_ranks: Whose gradients are added up, whatever the number of processes.
    """

    prefetch: int | None = None
    max_input_buffers: int | None = None
    memory_budget: int | Literal["auto"] | None = None
    strategies: StrategyRules = field(default_factory=StrategyRules)
    buffers: tuple[BufferSync, ...] = ()
    virtual_ranks: int | None = None

    def joined(self, others: Sequence["ModelSettings"]) -> "ModelSettings":
        """These with those of models that become parts of this one: what was chosen for the whole stays so.

        Where several parts differ, the larger number holds, and the first budget.
        """
        every = [self, *others]
        budgets = [each.memory_budget for each in every if each.memory_budget is not None]
        strategies = self.strategies
        for each in others:
            strategies = strategies.over(each.strategies)
        return ModelSettings(
            prefetch=_largest(each.prefetch for each in every),
            max_input_buffers=_largest(each.max_input_buffers for each in every),
            memory_budget=budgets[0] if budgets else None,
            strategies=strategies,
            buffers=tuple(dict.fromkeys(sync for each in every for sync in each.buffers)),
            virtual_ranks=_largest(each.virtual_ranks for each in every),
        )


def _largest(numbers: Any) -> int | None:
    return max((number for number in numbers if number is not None), default=None)
