"""What programs may choose, for a unit and for a model: one object each, which copies and new units take whole."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import chain
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dshard.collectives import Comms
from dshard.policies import StrategyRules

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
    def changed(self) -> list[str]:
        """Names of what is not as it is by default."""
        return [each.name for each in fields(self) if getattr(self, each.name) != getattr(_DEFAULT, each.name)]

    @property
    def but_lifetime(self) -> "UnitSettings":
        """The same without what strategies say."""
        return replace(self, strategy=None, reshard_after_forward=None, reshard_after_backward=True)


_DEFAULT = UnitSettings()


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


def _largest(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _first(values: Sequence[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _over_one_another(values: Sequence[StrategyRules]) -> StrategyRules:
    return reduce(StrategyRules.over, values)


def _each_once(values: Sequence[tuple[BufferSync, ...]]) -> tuple[BufferSync, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(values)))


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What is chosen for a model; None and empty where nothing was.

    Each field says how that of a model and those of its parts become one.

    Args:
        prefetch: How many units are gathered ahead.
        max_input_buffers: Reduce-scatters whose send buffers may live at the same time, besides the one that fills.
        memory_budget: Bytes of gathered copies to keep between forward and backward; "auto" until they are known.
        strategies: Set since `fully_shard`, for parameters that come later.
        buffers: That are broadcast.
    """

    prefetch: int | None = field(default=None, metadata={"joined": _largest})
    max_input_buffers: int | None = field(default=None, metadata={"joined": _largest})
    memory_budget: int | Literal["auto"] | None = field(default=None, metadata={"joined": _first})
    strategies: StrategyRules = field(default_factory=StrategyRules, metadata={"joined": _over_one_another})
    buffers: tuple[BufferSync, ...] = field(default=(), metadata={"joined": _each_once})

    def joined(self, others: Sequence["ModelSettings"]) -> "ModelSettings":
        """These with those of models that become parts of this one: what was chosen for the whole stays so.

        Where several parts differ, each field says which holds: the largest number, the first budget.
        """
        every = [self, *others]
        own = {each.name: [getattr(settings, each.name) for settings in every] for each in fields(self)}
        return replace(self, **{each.name: each.metadata["joined"](own[each.name]) for each in fields(self)})
