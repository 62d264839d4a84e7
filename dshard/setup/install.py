"""Specs become units, and modules tell the runtime of their forwards."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from dshard.agreement.same import check_same
from dshard.optimizer.replace import inherit
from dshard.runtime.companions import say_managed
from dshard.runtime.module import sharded_class
from dshard.runtime.module_hooks import attach, watch
from dshard.runtime.pipelining import answer_as_fsdp2
from dshard.runtime.runtime import Runtime, units_of
from dshard.setup.auto_units import ENOUGH_BYTES, find_units
from dshard.setup.convert import convert
from dshard.setup.initial import compare_parameters
from dshard.setup.specs import Resolver, UnitSpec, described, settle
from dshard.tensor import ShardedTensor
from dshard.tensor.sources import rejoin_source
from dshard.units.context import ModelContext
from dshard.units.unit import Unit


def install(
    specs: Sequence[UnitSpec], runtime: Runtime, sharded: Mapping[int, ShardedTensor], owners: Iterable[nn.Module] = ()
) -> list[Unit]:
    """Make units of specs: of a call, of a plan, of what the first use forms, and of what is added later.

    Args:
        specs: The units to be.
        runtime: Of the model that they belong to.
        sharded: By the identity of each parameter, what it has become; those that were sharded before may lack.
        owners: Modules besides those of the specs that know of the units.

    Communicates:
        For a number of ranks as `reshard_after_forward`, the making of process groups, the first time.
    """
    units = []
    for spec in specs:
        params: list[Any] = [sharded.get(id(param), param) for param in spec.params]
        unit = Unit(params, spec.modules, label=spec.label, model=runtime.context, settings=spec.settings)
        if spec.settings.strategy is None:
            unit.set_reshard_after_forward(spec.settings.reshard_after_forward)
        runtime.adopt(unit)
        for module in dict.fromkeys([*owners, *spec.modules]):
            attach(module, unit)
        units.append(unit)
    return units


@dataclass(frozen=True, slots=True)
class Wrapping:
    """Modules that become `FSDPModule`s together, and the units of what they hold.

    Args:
        modules: As a call of `fully_shard` on them is given.
        units: The units to be.
    """

    modules: tuple[nn.Module, ...]
    units: tuple[UnitSpec, ...]


def wrap(
    wrappings: Sequence[Wrapping],
    modules: Sequence[nn.Module],
    sharded: Mapping[int, ShardedTensor],
    *,
    may_split: bool,
) -> Runtime:
    """Make the units of a call, and have its modules tell of their forwards.

    Units that earlier calls made below become this model's. What is left with the root is split at the first use.

    Args:
        wrappings: Of the modules below, and last of `modules`.
        modules: What the call was given.
        sharded: By the identity of each parameter, what it has become.
        may_split: Whether that is left to the first use: there is no plan.
    """
    context = _joined_context(modules)
    runtime = context.get(Runtime)
    own: list[Unit] = []
    for wrapping in wrappings:
        for module in wrapping.modules:
            module.__class__ = sharded_class(type(module))  # type: ignore[arg-type]
            answer_as_fsdp2(module)
            watch(module)
        own = install(wrapping.units, runtime, sharded, wrapping.modules)
        for module in wrapping.modules:
            say_managed(module)
    below = [unit for root in modules for unit in units_of(root) if unit not in own]
    context.reorder([*dict.fromkeys(below), *own])
    if len(modules) == 1:
        context.root = modules[0]
        _rename(modules[0])
        if may_split:
            context.split = partial(_split_all, context, own, least_bytes=ENOUGH_BYTES if below else None)
    return runtime


def _joined_context(modules: Sequence[nn.Module]) -> ModelContext:
    """Make one context for everything below: units that earlier calls made join it."""
    context = ModelContext()
    runtime = context.get(Runtime)
    parts: dict[ModelContext, None] = {}
    for unit in dict.fromkeys(unit for root in modules for unit in units_of(root)):
        unit.model.split = None
        parts[unit.model] = None
        runtime.adopt(unit)
    context.settings = context.settings.joined([part.settings for part in parts])
    context.change()
    return context


def take_in(resolver: Resolver, context: ModelContext, found: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Shard trainable parameters that were added below a sharded root: a new head, what `weight_norm` made, adapters.

    Raises:
        DivergenceError: They differ between ranks. On every rank alike.

    Communicates:
        An all-reduce of 16 bytes, and one of 16 bytes per parameter.
    """
    root = context.root
    assert root is not None
    resolver = resolver.under(context.settings.strategies)
    specs = resolver.params(found)
    check_same(f"a forward of {type(root).__name__}", {"added parameters": described(specs)}, resolver.group)
    places = settle(specs)
    compare_parameters([root], specs, places, resolver.group, "check")
    sharded, inherited = convert([root], specs, places)
    units = resolver.units(specs, [root], label=f"added to {type(root).__name__}")
    install(units, context.get(Runtime), sharded)
    for heir in inherited:
        inherit(*heir, mean=resolver.averages)


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


def _split_all(context: ModelContext, units: Sequence[Unit], *, least_bytes: int | None) -> None:
    """Cut the units of a root into good ones: the whole model, or what calls on modules below have left of it."""
    root = context.root
    assert root is not None
    for unit in units:
        _split(context, root, unit, least_bytes)
    if not root.__dict__["_dshard_units"]:
        # Nothing stays with the root itself, but its forward's end is where everything is freed.
        settings = replace(units[0].settings, reshard_after_forward=True)
        attach(root, Unit([], [root], label=units[0].label, model=context, settings=settings))


def _split(context: ModelContext, root: nn.Module, unit: Unit, least_bytes: int | None) -> None:
    """Cut a unit of the root into good ones."""
    for param in unit.params:
        if param.swapped_source is not None:
            rejoin_source(param)
    plans = find_units(root, unit.params, unit.label, least_bytes=least_bytes)
    if len(plans) < 2:
        return
    unit.free()
    context.units.remove(unit)
    root.__dict__["_dshard_units"].remove(unit)
    specs = [UnitSpec(plan.label, plan.modules, plan.params, unit.settings) for plan in plans]
    root.__dict__.setdefault("_dshard_formed", []).extend(install(specs, context.get(Runtime), {}))
