"""Which gathered copies stay between forward and backward."""

from collections.abc import Container, Iterable
from typing import Literal

from torch import nn

from dshard.units.schedule import Phase, Schedule, to_drop
from dshard.units.unit import Unit

__all__ = ["fit_into", "is_next", "reshards"]


def reshards(unit: Unit, root: nn.Module | None, memory_budget: int | Literal["auto"] | None) -> bool:
    """Whether `unit` is freed when its forward ends; by default all but the root's own unit are.

    With a memory budget, that decides instead for units that were not told.
    """
    if unit.settings.reshard_after_forward is not None:
        return bool(unit.settings.reshard_after_forward)
    if memory_budget not in (None, "auto"):
        return False
    return root not in unit.modules


def is_next(unit: Unit, root: nn.Module | None, schedule: Schedule[Unit]) -> bool:
    """Whether a unit that was formed for the root alone is the one that the last backward began with.

    It would be gathered again at once: the most bytes that are there at one time are the same.
    """
    if unit.settings.reshard_after_forward is not None or not schedule.knows(Phase.BACKWARD):
        return False
    formed = root.__dict__.get("_dshard_formed", ()) if root is not None else ()
    return schedule.distance(unit) == 0 and unit in formed


def fit_into(budget_bytes: int, gathered: Iterable[Unit], ahead: Container[Unit], schedule: Schedule[Unit]) -> None:
    """Drop the copies that the backward uses last, until the others fit into the budget.

    Args:
        budget_bytes: For those that were not told when they are freed.
        gathered: All that are.
        ahead: Those of them that are gathered ahead: they stay.
        schedule: What comes next.
    """
    kept = [
        (unit, unit.full_bytes, schedule.distance(unit))
        for unit in gathered
        if unit.settings.reshard_after_forward is None and not unit.is_requested
        if not unit.num_active and unit not in ahead
    ]
    for unit in to_drop(kept, budget_bytes):
        unit.free()
