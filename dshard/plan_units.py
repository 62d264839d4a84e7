"""The units of a plan, found again in the model that it was made for."""

from collections.abc import Sequence

from torch import nn

from dshard.errors import PlanError
from dshard.planner import Plan
from dshard.policies import Precision, PrecisionRules
from dshard.runtime.auto_units import UnitPlan, find_units

__all__ = ["units_of"]

_ALIKE = 0.02  # norms and biases may compute in a dtype of their own; a plan has one for all


def units_of(
    plan: Plan,
    modules: Sequence[nn.Module],
    found: Sequence[tuple[str, nn.Parameter]],
    num_ranks: int,
    precision: PrecisionRules,
) -> list[UnitPlan[nn.Parameter]]:
    """The units of a plan in a model that is to be sharded, but for that of the root.

    Args:
        plan: Made for the same model.
        modules: One: the model.
        found: All parameters of it, by name.
        num_ranks: That will share it.
        precision: Their dtypes on their ways.

    Raises:
        PlanError: The plan was made for another model, another number of ranks or other dtypes. On every rank alike.
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
    _check_bytes(plan, found, precision)
    return [unit for unit in units if modules[0] not in unit.modules]


def _check_bytes(plan: Plan, found: Sequence[tuple[str, nn.Parameter]], precision: PrecisionRules) -> None:
    """Refuse dtypes, and frozen parameters, that take other bytes than those that were planned with."""
    costs = {param.name: param for unit in plan.model.units for param in unit.params}
    totals: dict[str, list[int]] = {"stored": [0, 0], "gathered": [0, 0], "reduced": [0, 0]}
    first: dict[str, str] = {}  # that differs
    for name, param in found:
        way, known = precision.precision_of(name, param.dtype) or Precision(), costs[name]
        sizes = {
            "stored": (known.stored_itemsize, param.dtype.itemsize),
            "gathered": (known.gather_itemsize, (way.compute or param.dtype).itemsize),
            "reduced": (known.grad_itemsize, (way.reduce or param.dtype).itemsize if param.requires_grad else 0),
        }
        for what, pair in sizes.items():
            if pair[0] != pair[1]:
                first.setdefault(what, f"{name} for one {pair[1]} per element, and {pair[0]} in the plan")
            totals[what] = [total + param.numel() * size for total, size in zip(totals[what], pair, strict=True)]
    for what, (planned, here) in totals.items():
        if abs(planned - here) > _ALIKE * max(planned, here):
            raise PlanError(
                f"fully_shard: a plan is for the dtypes that it was made for, but all parameters {what} are {here:,} "
                f"bytes here, and {planned:,} in the plan ({first[what]}). Pass the mp_policy that the plan's Training "
                "says (dtypes of computation and reduction, or dshard plan --dtype), and freeze parameters before "
                "planning."
            )
