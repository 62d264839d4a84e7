"""Sharded parameters become units, and modules tell the runtime of their forwards."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dshard.collectives import ShardGroup
from dshard.runtime.auto_units import find_units
from dshard.runtime.convert import PlacementFn, replace_all
from dshard.runtime.hooks import hook_forward
from dshard.runtime.module import sharded_class, units_of
from dshard.runtime.replace import inherit
from dshard.runtime.runtime import Runtime
from dshard.runtime.sync import check_same_structure, check_same_weights
from dshard.runtime.unit import Unit
from dshard.tensor import ShardedTensor

__all__ = ["Conversion", "install", "joined_runtime", "take_in"]


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a `fully_shard` call made its parameters, for those that are added to the model later.

    Args:
        mesh: One-dimensional mesh.
        group: Its ranks.
        shard_placement_fn: As of `fully_shard`.
        averages: Whether gradients are averaged over the ranks.
    """

    mesh: DeviceMesh
    group: ShardGroup
    shard_placement_fn: PlacementFn | None
    averages: bool


def take_in(runtime: Runtime, conversion: Conversion, found: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Shard trainable parameters that were added below a sharded root: a new head, what `weight_norm` made, adapters.

    Raises:
        DivergenceError: They differ between ranks. On every rank alike.

    Communicates:
        An all-reduce of 16 bytes, and one of 16 bytes per parameter.
    """
    check_same_structure(found, conversion.group)
    check_same_weights(found, conversion.group)
    assert runtime.root is not None
    params, inherited = replace_all([runtime.root], found, conversion.mesh, conversion.shard_placement_fn)
    label = f"added to {type(runtime.root).__name__}"
    unit = Unit(params, [runtime.root], label=label, reshard_after_forward=None, observer=runtime)
    unit.averages = conversion.averages
    runtime.adopt(unit)
    _attach(runtime.root, unit)
    for heir in inherited:
        inherit(*heir, mean=conversion.averages)


def joined_runtime(modules: Sequence[nn.Module]) -> Runtime:
    """One runtime for everything below: units that earlier calls made join it."""
    runtime = Runtime()
    for root in modules:
        for unit in units_of(root):
            if isinstance(unit.observer, Runtime):
                unit.observer.split = None
                runtime.memory_budget = runtime.memory_budget or unit.observer.memory_budget
                runtime.sync_buffers += [s for s in unit.observer.sync_buffers if s not in runtime.sync_buffers]
            runtime.adopt(unit)
    return runtime


def install(
    modules: Sequence[nn.Module], params: Sequence[ShardedTensor], runtime: Runtime, reshard: bool | None
) -> Unit:
    """Make the unit, hook the modules, and leave it to the first use to split what is a whole model."""
    is_first = not runtime.units
    label = type(modules[0]).__name__
    unit = Unit(params, modules, label=label, reshard_after_forward=reshard, observer=runtime)
    runtime.adopt(unit)
    for module in modules:
        module.__class__ = sharded_class(type(module))  # type: ignore[arg-type]
        _attach(module, unit)
    unit.modules = [m for module in modules for m in _with_forward(module)]
    for module in unit.modules:
        if module not in modules:
            _attach(module, unit)
    if len(modules) == 1:
        runtime.root = modules[0]
        _rename(modules[0])
        if is_first:
            runtime.split = partial(_split, runtime, unit)
    return unit


def _with_forward(module: nn.Module) -> list[nn.Module]:
    """`module` itself, or for a container without a forward the modules in it that are called."""
    if type(module).forward is not nn.Module.forward:
        return [module]
    return [m for child in module.children() for m in _with_forward(child)]


def _attach(module: nn.Module, unit: Unit) -> None:
    """Tie a unit to a module's forward."""
    units = module.__dict__.get("_dshard_units")
    if units is None:
        module.__dict__["_dshard_units"] = [unit]
        hook_forward(module)
    else:
        units.append(unit)


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


def _split(runtime: Runtime, unit: Unit) -> None:
    """Cut the one unit of a model whose root alone was sharded into good ones."""
    root = runtime.root
    assert root is not None
    plans = find_units(root, unit.params, unit.label)
    if len(plans) < 2:
        return
    unit.free()
    runtime.units.remove(unit)
    root.__dict__["_dshard_units"].remove(unit)
    for plan in plans:
        part = Unit(
            plan.params,
            plan.modules,
            label=plan.label,
            reshard_after_forward=unit.reshard_after_forward,
            observer=runtime,
        )
        part.requires_sync, part.averages = unit.requires_sync, unit.averages
        runtime.adopt(part)
        root.__dict__.setdefault("_dshard_formed", []).append(part)
        for module in plan.modules:
            _attach(module, part)
    if not root.__dict__["_dshard_units"]:
        # Nothing stays with the root itself, but its forward's end is where everything is freed.
        _attach(root, Unit([], [root], label=unit.label, reshard_after_forward=True, observer=runtime))
