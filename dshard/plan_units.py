"""The units of a plan, found again in the model that it was made for."""

from collections.abc import Sequence

from torch import nn

from dshard.errors import PlanError
from dshard.planner import Plan
from dshard.runtime.auto_units import UnitPlan, find_units

__all__ = ["units_of"]


def units_of(
    plan: Plan, modules: Sequence[nn.Module], found: Sequence[tuple[str, nn.Parameter]], num_ranks: int
) -> list[UnitPlan[nn.Parameter]]:
    """The units of a plan in a model that is to be sharded, but for that of the root.

    Args:
        plan: Made for the same model.
        modules: One: the model.
        found: All parameters of it, by name.
        num_ranks: That will share it.

    Raises:
        PlanError: The plan was made for another model, or another number of ranks. On every rank alike.
    """
    if len(modules) != 1 or plan.cluster.num_ranks != num_ranks:
        raise PlanError(
            f"fully_shard: a plan is for one model on the ranks that it was made for ({plan.cluster.num_ranks}), but "
            f"these are {len(modules)} modules on {num_ranks} ranks. Plan again."
        )
    units = find_units(modules[0], [param for _, param in found], "root")
    names = {id(param): name for name, param in found}
    here = {
        tuple(names[id(p)] for p in unit.params): tuple((p.shape[0] if p.ndim else 1, p.numel()) for p in unit.params)
        for unit in units
    }
    planned = {unit.param_names: tuple((p.length, p.numel) for p in unit.params) for unit in plan.model.units}
    if here != planned:
        wrong = next(key for key in (*here, *planned) if here.get(key) != planned.get(key))
        which = wrong[0] if wrong else "a unit without parameters"
        raise PlanError(
            f"fully_shard: a plan is for the model that it was made for, but the unit of {which} is another. Plan "
            "again, with this model."
        )
    return [unit for unit in units if modules[0] not in unit.modules]
