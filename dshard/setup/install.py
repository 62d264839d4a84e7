"""Sharded parameters become units, and modules tell the runtime of their forwards."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dshard.agreement.same import check_same
from dshard.collectives import ShardGroup
from dshard.errors import StateError
from dshard.optimizer.replace import inherit
from dshard.policies import PrecisionRules, StrategyRules
from dshard.runtime.companions import keep_generation_in_step
from dshard.runtime.module import sharded_class, units_of
from dshard.runtime.module_hooks import attach
from dshard.runtime.pipelining import answer_as_fsdp2
from dshard.runtime.runtime import Runtime
from dshard.setup.auto_units import find_units
from dshard.setup.convert import Inherited, check_offload, replace_all
from dshard.setup.initial import compare_parameters
from dshard.setup.specs import ParamSpec, described, settle
from dshard.tensor import ShardedTensor
from dshard.tensor.extended import is_extended
from dshard.tensor.meshes import group_of
from dshard.tensor.sources import return_home
from dshard.units.observer import UnitObserver
from dshard.units.placing import PlacementFn, places_of
from dshard.units.settings import UnitSettings
from dshard.units.unit import Unit

__all__ = ["Conversion", "Part", "install", "joined_runtime", "take_in"]


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a `fully_shard` call made its parameters, for those that are added to the model later.

    Args:
        mesh: Of one dim, or of two of which the first replicates.
        shard_placement_fn: As of `fully_shard`.
        averages: Whether gradients are averaged over the ranks.
        precision: In which dtypes parameters and gradients travel.
        strategies: Which strategy holds for which parameters.
    """

    mesh: DeviceMesh
    shard_placement_fn: PlacementFn | None
    averages: bool
    precision: PrecisionRules
    strategies: StrategyRules

    @property
    def group(self) -> ShardGroup:
        """The ranks of the mesh."""
        return group_of(self.mesh)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Conversion":
        return self  # a mesh is a resource, all else are choices

    def __reduce__(self) -> Any:
        fn = self.shard_placement_fn
        fn = fn if fn is None or _is_importable(fn) else _LostPlacement(repr(fn))
        return Conversion, (self.mesh, fn, self.averages, self.precision, self.strategies)

    def resolve(self, found: Sequence[tuple[str, nn.Parameter]]) -> list[ParamSpec]:
        """What becomes of some parameters. Communicates nothing.

        Raises:
            PlacementError, UnsupportedOpError: As `places_of`, or of what is both a subclass and offloaded. On every
                rank alike, where all were given the same.
        """
        specs = []
        for (name, param), base in zip(found, places_of(found, self.mesh, self.shard_placement_fn), strict=True):
            rule = self.precision.precision_of_extended if is_extended(param) else self.precision.precision_of
            spec = ParamSpec(name, param, base, self.strategies.strategy_of(name), rule(name, param.dtype))
            check_offload(spec)
            specs.append(spec)
        return specs

    def replace(self, modules: Sequence[nn.Module], specs: Sequence[ParamSpec]) -> "Converted":
        """Put sharded parameters in the places of some, and sort them by what units are made of."""
        params, inherited = replace_all(modules, specs, settle(specs))
        parts: dict[UnitSettings, list[ShardedTensor]] = {}
        for param, spec in zip(params, specs, strict=True):
            if spec.strategy is not None:
                param.base_place = spec.base.mesh, spec.base.dim
            parts.setdefault(spec.settings(averages=self.averages), []).append(param)
        empty = UnitSettings(averages=self.averages)
        made = [Part(own, settings) for settings, own in (parts or {empty: []}).items()]
        slices = {param: spec.num_slices for param, spec in zip(params, specs, strict=True)}
        return Converted(made, slices, inherited)


def _is_importable(function: Any) -> bool:
    """Whether pickle, which writes down a function's name, would find it again."""
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class _LostPlacement:
    """In the place of a `shard_placement_fn` that pickle could not take along."""

    was: str

    def __call__(self, param: nn.Parameter) -> Any:
        raise StateError(
            f"a parameter of shape {tuple(param.shape)}: what is added to a sharded model is placed by its "
            f"shard_placement_fn, but this model was unpickled, and {self.was} is no function that can be imported. "
            "Define it in a module, not in a function, or add the parameter ahead of pickling."
        )


@dataclass(frozen=True, slots=True)
class Converted:
    """What a call has made.

    Args:
        parts: Of which units are made.
        slices: In how many slices each parameter is gathered.
        inherited: What the parameters have of those before.
    """

    parts: list["Part"]
    slices: dict[ShardedTensor, int]
    inherited: list[Inherited]


@dataclass(frozen=True, slots=True)
class Part:
    """Parameters that become a unit.

    Args:
        params: The parameters.
        settings: What is chosen for it; where no strategy is named, not yet when it is freed.
    """

    params: list[ShardedTensor]
    settings: UnitSettings

    def unit(
        self, modules: Sequence[nn.Module], label: str, reshard: bool | int | None, observer: UnitObserver
    ) -> Unit:
        """A unit of them; `reshard` is when it is freed after forward, where no strategy says that."""
        unit = Unit(self.params, modules, label=label, observer=observer, settings=self.settings)
        if self.settings.strategy is None:
            unit.set_reshard_after_forward(reshard)
        return unit


def take_in(runtime: Runtime, conversion: Conversion, found: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Shard trainable parameters that were added below a sharded root: a new head, what `weight_norm` made, adapters.

    Raises:
        DivergenceError: They differ between ranks. On every rank alike.

    Communicates:
        An all-reduce of 16 bytes, and one of 16 bytes per parameter.
    """
    assert runtime.root is not None
    conversion = replace(conversion, strategies=runtime.settings.strategies.over(conversion.strategies))
    specs = conversion.resolve(found)
    check_same(f"a forward of {type(runtime.root).__name__}", {"added parameters": described(specs)}, conversion.group)
    compare_parameters([runtime.root], specs, settle(specs), conversion.group, "check")
    converted = conversion.replace([runtime.root], specs)
    for part in converted.parts:
        unit = part.unit([runtime.root], f"added to {type(runtime.root).__name__}", None, runtime)
        runtime.adopt(unit)
        attach(runtime.root, unit)
    for heir in converted.inherited:
        inherit(*heir, mean=conversion.averages)


def joined_runtime(modules: Sequence[nn.Module]) -> Runtime:
    """One runtime for everything below: units that earlier calls made join it."""
    runtime = Runtime()
    parts: dict[Runtime, None] = {}
    for root in modules:
        for unit in units_of(root):
            if isinstance(unit.observer, Runtime) and unit.observer is not runtime:
                unit.observer.split = None
                parts[unit.observer] = None
            runtime.adopt(unit)
    runtime.settings = runtime.settings.joined([part.settings for part in parts])
    runtime.change()
    return runtime


def install(
    modules: Sequence[nn.Module], parts: Sequence[Part], runtime: Runtime, reshard: bool | int | None
) -> list[Unit]:
    """Make the units, hook the modules, and leave it to the first use to split what is a whole model."""
    is_first = not runtime.units
    label = type(modules[0]).__name__
    units = [part.unit(modules, label, reshard, runtime) for part in parts]
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
            param.given_name = name
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
        settings = replace(units[0].settings, reshard_after_forward=True)
        attach(root, Unit([], [root], label=units[0].label, observer=runtime, settings=settings))


def _split(runtime: Runtime, root: nn.Module, unit: Unit) -> None:
    """Cut a unit of the root into good ones."""
    for param in unit.params:
        if param.swapped_home is not None:
            return_home(param)
    plans = find_units(root, unit.params, unit.label)
    if len(plans) < 2:
        return
    unit.free()
    runtime.units.remove(unit)
    root.__dict__["_dshard_units"].remove(unit)
    for plan in plans:
        part = Unit(list(plan.params), plan.modules, label=plan.label, observer=runtime, settings=unit.settings)
        runtime.adopt(part)
        root.__dict__.setdefault("_dshard_formed", []).append(part)
        for module in plan.modules:
            attach(module, part)
