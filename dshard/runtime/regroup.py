"""Units are formed anew, when some of their parameters follow another strategy than the others."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from dshard.runtime.install import Part, Setting
from dshard.runtime.runtime import Runtime
from dshard.runtime.unit import Unit
from dshard.tensor import ShardedTensor

__all__ = ["regroup"]

_KEPT = ("requires_sync", "requires_all_reduce", "averages", "comms", "reduce_hook", "divisor", "num_slices")
_LISTS = ("_dshard_units", "_dshard_formed")


def regroup(tops: Sequence[nn.Module], runtime: Runtime, bases: Mapping[int, str]) -> None:
    """Sort the parameters of units that have the same modules by their strategies; one unit for each.

    Args:
        tops: The outermost modules of the units.
        runtime: Theirs.
        bases: By the identity of a parameter, the base of its new strategy; others keep what they have.
    """
    families: dict[Any, list[Unit]] = {}
    for unit in runtime.units:
        key = tuple(map(id, unit.modules)), *(getattr(unit, name) for name in _KEPT)
        families.setdefault(key, []).append(unit)
    changed = {}
    for family in families.values():
        parts = _parts(family, bases)
        old = [unit.params for unit in family if unit.params]
        if [list(map(id, params)) for params in old] == [list(map(id, params)) for params in parts.values()]:
            for setting, unit in zip(parts, [u for u in family if u.params], strict=True):
                setting.apply(unit)
        elif parts:
            changed[family[0]] = [_unit_like(family[0], params, setting) for setting, params in parts.items()]
            changed.update({unit: [] for unit in family[1:]})
    if changed:
        for module in dict.fromkeys(module for top in tops for module in top.modules()):
            for name in _LISTS:
                if name in module.__dict__:
                    module.__dict__[name] = _replaced(module.__dict__[name], changed)
    runtime.units = _replaced(runtime.units, changed)
    for place, unit in enumerate(runtime.units):
        unit.place = place
        unit.restart()
    runtime.schedule.forget()


def _parts(family: Sequence[Unit], bases: Mapping[int, str]) -> dict[Setting, list[ShardedTensor]]:
    """Parameters by what their new strategy says, or else by what their unit does."""
    parts: dict[Setting, list[ShardedTensor]] = {}
    for unit in family:
        for param in unit.params:
            base = bases.get(id(param))
            parts.setdefault(Setting.of(base) if base is not None else Setting.from_unit(unit), []).append(param)
    return parts


def _unit_like(old: Unit, params: list[ShardedTensor], setting: Setting) -> Unit:
    """A unit of other parameters, but of the same modules."""
    unit = Part(setting.base, params).unit(old.modules, old.label, None, old.observer)
    setting.apply(unit)
    for name in _KEPT:
        setattr(unit, name, getattr(old, name))
    return unit


def _replaced(units: Sequence[Unit], changed: Mapping[Unit, Sequence[Unit]]) -> list[Unit]:
    return [new for unit in units for new in changed.get(unit, [unit])]
