"""Sharded parameters become units, and modules tell the runtime of their forwards."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dshard.collectives import ShardGroup
from dshard.policies import PrecisionRules, StrategyRules
from dshard.runtime.auto_units import find_units
from dshard.runtime.companions import keep_generation_in_step
from dshard.runtime.convert import Inherited, replace_all
from dshard.runtime.deferral import Deferral
from dshard.runtime.hooks import attach
from dshard.runtime.initial import compare_parameters
from dshard.runtime.module import sharded_class, units_of
from dshard.runtime.observer import UnitObserver
from dshard.runtime.pipelining import answer_as_fsdp2
from dshard.runtime.placing import Place, PlacementFn, placed_by, places_of
from dshard.runtime.replace import inherit
from dshard.runtime.runtime import Runtime
from dshard.runtime.unit import Unit
from dshard.tensor import ShardedTensor
from dshard.tensor.sources import return_home

__all__ = ["Conversion", "Part", "Setting", "follow", "install", "joined_runtime", "take_in"]


_FREES = {  # whether gathered copies are freed after forward, and after backward
    "ddp": (True, True),
    "zero1": (False, False),
    "zero2": (False, False),
    "keep": (False, True),
    "full": (True, True),
}


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a `fully_shard` call made its parameters, for those that are added to the model later.

    Args:
        mesh: One-dimensional mesh.
        group: Its ranks.
        shard_placement_fn: As of `fully_shard`.
        averages: Whether gradients are averaged over the ranks.
        precision: In which dtypes parameters and gradients travel.
        strategies: Which strategy holds for which parameters.
    """

    mesh: DeviceMesh
    group: ShardGroup
    shard_placement_fn: PlacementFn | None
    averages: bool
    precision: PrecisionRules
    strategies: StrategyRules

    def places(self, found: Sequence[tuple[str, nn.Parameter]]) -> list[Place]:
        """Where each of some parameters goes: as the function says, and then the strategies."""
        places = places_of(found, self.mesh, self.shard_placement_fn)
        return [
            placed_by(name, param, place, self.strategies.strategy_of(name))
            for (name, param), place in zip(found, places, strict=True)
        ]

    def replace(
        self, modules: Sequence[nn.Module], found: Sequence[tuple[str, nn.Parameter]]
    ) -> tuple[list["Part"], list[Inherited]]:
        """Put sharded parameters in the places of some, and sort them by what units are made of."""
        bases = places_of(found, self.mesh, self.shard_placement_fn)
        params, inherited = replace_all(modules, found, self.places(found), self.precision)
        parts: dict[str | None, Part] = {}
        for param, (name, _), base in zip(params, found, bases, strict=True):
            strategy = self.strategies.strategy_of(name)
            if strategy is not None:
                param._own_place = base.mesh, base.dim
            key = strategy.on(base.num_ranks).base if strategy is not None else None
            parts.setdefault(key, Part(key, [])).params.append(param)
        return list(parts.values()), inherited


@dataclass(frozen=True, slots=True)
class Part:
    """Parameters that become a unit.

    Args:
        base: Of their strategies; None if they follow `reshard_after_forward` or a memory budget.
        params: The parameters.
    """

    base: str | None
    params: list[ShardedTensor]

    def unit(
        self, modules: Sequence[nn.Module], label: str, reshard: bool | int | None, observer: UnitObserver
    ) -> Unit:
        """A unit of them."""
        unit = Unit(self.params, modules, label=label, reshard_after_forward=None, observer=observer)
        follow(unit, self.base, reshard)
        return unit


def follow(unit: Unit, base: str | None, reshard: bool | int | None = None) -> None:
    """Have a unit gather and free, and reduce its gradients, as a strategy says."""
    if base is None:
        unit.set_reshard_after_forward(reshard)
    else:
        Setting.of(base).apply(unit)


@dataclass(frozen=True, slots=True)
class Setting:
    """When a unit is freed, and its gradients are reduced.

    Args:
        base: Of its strategy; None if it follows `reshard_after_forward` or a memory budget.
        after_forward: Whether it is freed after forward.
        after_backward: Whether it is freed after backward.
    """

    base: str | None
    after_forward: bool | int | None
    after_backward: bool

    @classmethod
    def of(cls, base: str) -> "Setting":
        """That of a strategy."""
        return cls(base, *_FREES[base])

    @classmethod
    def from_unit(cls, unit: Unit) -> "Setting":
        """The one that a unit has, as `set_reshard_after_forward` and its like may have changed it."""
        return cls(unit.strategy, unit.reshard_after_forward, unit.reshard_after_backward)

    def apply(self, unit: Unit) -> None:
        """Have a unit follow it."""
        unit.reshard_after_forward, unit.reshard_after_backward = self.after_forward, self.after_backward
        unit.strategy, unit.deferral = self.base, Deferral() if self.base == "zero1" else None


def take_in(runtime: Runtime, conversion: Conversion, found: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Shard trainable parameters that were added below a sharded root: a new head, what `weight_norm` made, adapters.

    Raises:
        DivergenceError: They differ between ranks. On every rank alike.

    Communicates:
        An all-reduce of 16 bytes, and one of 16 bytes per parameter.
    """
    assert runtime.root is not None
    conversion = replace(conversion, strategies=runtime.strategies.over(conversion.strategies))
    compare_parameters([runtime.root], found, conversion.places(found), conversion.group, "check")
    parts, inherited = conversion.replace([runtime.root], found)
    for part in parts:
        unit = part.unit([runtime.root], f"added to {type(runtime.root).__name__}", None, runtime)
        unit.averages = conversion.averages
        runtime.adopt(unit)
        attach(runtime.root, unit)
    for heir in inherited:
        inherit(*heir, mean=conversion.averages)


def joined_runtime(modules: Sequence[nn.Module]) -> Runtime:
    """One runtime for everything below: units that earlier calls made join it."""
    runtime = Runtime()
    for root in modules:
        for unit in units_of(root):
            if isinstance(unit.observer, Runtime):
                unit.observer.split = None
                if runtime.memory_budget is None:
                    runtime.memory_budget = unit.observer.memory_budget
                runtime.sync_buffers += [s for s in unit.observer.sync_buffers if s not in runtime.sync_buffers]
            runtime.adopt(unit)
    return runtime


def install(
    modules: Sequence[nn.Module], parts: Sequence[Part], runtime: Runtime, reshard: bool | int | None
) -> list[Unit]:
    """Make the units, hook the modules, and leave it to the first use to split what is a whole model."""
    is_first = not runtime.units
    label = type(modules[0]).__name__
    units = [part.unit(modules, label, reshard, runtime) for part in parts or [Part(None, [])]]
    hooked = [m for module in modules for m in _with_forward(module)]
    for unit in units:
        runtime.adopt(unit)
        unit.modules = list(hooked)
    for module in modules:
        module.__class__ = sharded_class(type(module))  # type: ignore[arg-type]
        answer_as_fsdp2(module)
    for module in dict.fromkeys([*modules, *hooked]):
        for unit in units:
            attach(module, unit)
    if len(modules) == 1:
        runtime.root = modules[0]
        _rename(modules[0])
        keep_generation_in_step(modules[0])
        if is_first:
            runtime.split = partial(_split_all, runtime, units)
    return units


def _with_forward(module: nn.Module) -> list[nn.Module]:
    """`module` itself, or for a container without a forward the modules in it that are called."""
    if type(module).forward is not nn.Module.forward:
        return [module]
    return [m for child in module.children() for m in _with_forward(child)]


def _rename(root: nn.Module) -> None:
    """Name parameters and units as the outermost module knows them."""
    for name, param in root.named_parameters():
        if isinstance(param, ShardedTensor):
            param._name = name
    names = {id(m): name for name, m in root.named_modules()}
    for unit in units_of(root):
        known = [names[id(m)] for m in unit.modules if id(m) in names]
        if known and root not in unit.modules:
            unit.label = known[0] if len(known) == 1 else f"{known[0]}..{known[-1]}"


def _split_all(runtime: Runtime, units: Sequence[Unit]) -> None:
    """Cut the units of a model whose root alone was sharded into good ones."""
    root = runtime.root
    assert root is not None
    for unit in units:
        _split(runtime, root, unit)
    if not root.__dict__["_dshard_units"]:
        # Nothing stays with the root itself, but its forward's end is where everything is freed.
        attach(root, Unit([], [root], label=units[0].label, reshard_after_forward=True, observer=runtime))


def _split(runtime: Runtime, root: nn.Module, unit: Unit) -> None:
    """Cut a unit of the root into good ones."""
    for param in unit.params:
        if param._home is not None:
            return_home(param)
    plans = find_units(root, unit.params, unit.label)
    if len(plans) < 2:
        return
    unit.free()
    runtime.units.remove(unit)
    root.__dict__["_dshard_units"].remove(unit)
    for plan in plans:
        part = Part(unit.strategy, list(plan.params)).unit(
            plan.modules, plan.label, unit.reshard_after_forward, runtime
        )
        part.requires_sync, part.averages = unit.requires_sync, unit.averages
        runtime.adopt(part)
        root.__dict__.setdefault("_dshard_formed", []).append(part)
        for module in plan.modules:
            attach(module, part)
