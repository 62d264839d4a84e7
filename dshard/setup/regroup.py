"""Units are formed anew, when some of their parameters follow another strategy than the others."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from dshard.gradients.backward import Backward
from dshard.tensor import ShardedTensor
from dshard.units.context import ModelContext
from dshard.units.settings import UnitSettings
from dshard.units.unit import Unit

_LISTS = ("_dshard_units", "_dshard_formed")


def regroup(tops: Sequence[nn.Module], context: ModelContext, bases: Mapping[int, str]) -> None:
    """Sort the parameters of units that have the same modules by their strategies; one unit for each.

    Args:
        tops: The outermost modules of the units.
        context: Theirs.
        bases: By the identity of a parameter, the base of its new strategy; others keep what they have.
    """
    families: dict[Any, list[Unit]] = {}
    for unit in context.units:
        key = tuple(map(id, unit.modules)), unit.settings.but_lifetime
        families.setdefault(key, []).append(unit)
    changed = {}
    for family in families.values():
        parts = _parts(family, bases)
        old = [unit.params for unit in family if unit.params]
        if [list(map(id, params)) for params in old] == [list(map(id, params)) for params in parts.values()]:
            for settings, unit in zip(parts, [u for u in family if u.params], strict=True):
                unit.settings = settings  # and what it implies, as it restarts
        elif parts:
            changed[family[0]] = [_unit_like(family[0], params, settings) for settings, params in parts.items()]
            changed.update({unit: [] for unit in family[1:]})
    if changed:
        for module in dict.fromkeys(module for top in tops for module in top.modules()):
            for name in _LISTS:
                if name in module.__dict__:
                    module.__dict__[name] = _replaced(module.__dict__[name], changed)
    context.reorder(_replaced(context.units, changed))
    for unit in context.units:
        unit.restart()
    context.get(Backward).on_regrouped()


def _parts(family: Sequence[Unit], bases: Mapping[int, str]) -> dict[UnitSettings, list[ShardedTensor]]:
    """Parameters by what their new strategy says, or else by what their unit does."""
    parts: dict[UnitSettings, list[ShardedTensor]] = {}
    for unit in family:
        for param in unit.params:
            base = bases.get(id(param))
            parts.setdefault(unit.settings.under(base) if base is not None else unit.settings, []).append(param)
    return parts


def _unit_like(old: Unit, params: list[ShardedTensor], settings: UnitSettings) -> Unit:
    """A unit of other parameters, but of the same modules."""
    return Unit(params, old.modules, label=old.label, model=old.model, settings=settings)


def _replaced(units: Sequence[Unit], changed: Mapping[Unit, Sequence[Unit]]) -> list[Unit]:
    return [new for unit in units for new in changed.get(unit, [unit])]
