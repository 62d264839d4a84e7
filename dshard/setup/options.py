"""The arguments of `fully_shard`: what each may be, and what all ranks must pass alike."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dshard.errors import StateError
from dshard.policies import Offload, StrategyRules, read_bytes
from dshard.runtime.module import FSDPModule
from dshard.setup.auto_units import FoundUnit
from dshard.setup.specs import device_of
from dshard.units.placing import PlacementFn, replicated

if TYPE_CHECKING:  # loaded where a plan is given
    from dshard.planner import Plan


@dataclass(frozen=True, slots=True)
class Options:
    """The keyword arguments of one call of `fully_shard`, as they were given; their meanings are told there."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: PlacementFn | None
    mp_policy: Any
    offload_policy: Any
    ignored_params: Collection[nn.Parameter] | None
    dp_mesh_dims: Any
    sync: Any
    grad_reduce: Any
    buffers: Any
    memory_budget: Any
    auto_wrap_policy: Any
    strategy: Any
    plan: Any

    def check(self) -> None:
        """Refuse what does not go together.

        Raises:
            StateError: As said.
        """
        has_reshard, has_strategy = self.reshard_after_forward is not None, self.strategy is not None
        others = ("strategy", "reshard_after_forward", "memory_budget", "auto_wrap_policy")
        both = next((name for name in others if getattr(self, name) is not None), None)
        if self.plan is not None and both is not None:
            raise StateError(
                f"fully_shard: a plan says how each unit is cut and gathered, but {both} is given, too. Leave it out."
            )
        if has_strategy and has_reshard:
            raise StateError(
                "fully_shard: strategy says when gathered copies are freed, but reshard_after_forward is given, too "
                f"({self.strategy!r} and {self.reshard_after_forward!r}). Leave one of them out."
            )

    @property
    def ignored(self) -> set[nn.Parameter]:
        """Parameters to leave alone."""
        return set(self.ignored_params or ())

    @property
    def of_model(self) -> dict[str, Any]:
        """What is chosen for the whole model, by the names of `ModelSettings`; what is None stays as it was."""
        budget = self.memory_budget if self.memory_budget in (None, "auto") else read_bytes(self.memory_budget)
        return {} if budget is None else {"memory_budget": budget}

    @property
    def placement_fn(self) -> PlacementFn | None:
        """How parameters are cut; `dp_mesh_dims` may name no dims to shard over.

        Raises:
            StateError: Then there is nothing to say for a function.
        """
        dims = self.dp_mesh_dims
        if dims is None or dims.shard is not None:
            return self.shard_placement_fn
        if self.shard_placement_fn is not None:
            raise StateError(
                "fully_shard: shard_placement_fn says how a parameter is cut, but dp_mesh_dims names no dims to shard "
                f"over ({dims}). Leave one of them out."
            )
        return replicated

    @property
    def offloads(self) -> bool:
        """Whether parameters are to be kept elsewhere than on a mesh's devices, unless these are CPUs."""
        return isinstance(self.offload_policy, Offload) or type(self.offload_policy).__name__ == "CPUOffloadPolicy"

    def offload_on(self, mesh: DeviceMesh) -> Offload | None:
        """What the offload policy asks for on a mesh; None where a parameter is kept where it is used."""
        if isinstance(self.offload_policy, Offload):  # of any two devices
            return self.offload_policy
        if not self.offloads or mesh.device_type == "cpu":
            return None
        return Offload(torch.device("cpu"), device_of(mesh), pins=self.offload_policy.pin_memory)


@dataclass(frozen=True, slots=True)
class Followed:
    """What decides how a model is sharded.

    Args:
        strategies: Of its parameters, by their names in it.
        plan: That says so; None where none was given.
        choices: What of the plan is followed, unit by unit, as all ranks must have it alike.
        units: Of the plan, but for that of the root.
        away: Names of the parameters that an offload policy is for; None for all.
    """

    strategies: StrategyRules
    plan: "Plan | None" = None
    choices: Sequence[str] = ()
    units: tuple[FoundUnit[nn.Parameter], ...] = ()
    away: frozenset[str] | None = None


def checked_modules(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that a call is for, each once.

    Raises:
        StateError: One was sharded before.
    """
    modules = [module] if isinstance(module, nn.Module) else list(dict.fromkeys(module))
    for each in modules:
        if isinstance(each, FSDPModule):
            raise StateError(
                f"fully_shard: a module can be sharded once, but this {type(each).__name__} already is. Call "
                "fully_shard on each module once, children first."
            )
    return modules
