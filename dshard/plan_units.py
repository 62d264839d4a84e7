"""A plan, found again in the model that is to follow it: its units, and the strategy of each parameter."""

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dshard.collectives import ShardGroup
from dshard.errors import DivergenceError, DShardError, PlanError, StateError
from dshard.planner import Plan
from dshard.planner.names import plain_name
from dshard.policies import Precision, PrecisionRules, Strategy, StrategyRules
from dshard.runtime.auto_units import UnitPlan, find_units
from dshard.runtime.sync import agree

__all__ = ["Followed", "check_given", "follow"]

_ALIKE = 0.02  # norms and biases may compute in a dtype of their own; a plan has one for all


@dataclass(frozen=True, slots=True)
class Followed:
    """What decides how a model is sharded.

    Args:
        strategies: Of its parameters, by their names in it.
        plan: That says so; None where none was given.
        units: Of the plan, but for that of the root.
    """

    strategies: StrategyRules
    plan: Plan | None = None
    units: tuple[UnitPlan[nn.Parameter], ...] = ()


def check_given(
    plan: Any, strategy: Any, reshard_after_forward: Any, memory_budget: Any, auto_wrap_policy: Any
) -> None:
    """Refuse what is neither a plan nor a path, and options that it takes the place of: all as of `fully_shard`.

    Raises:
        PlanError: It is something else.
        StateError: One of the options is given, too; or a plan is given as the strategy.
    """
    if isinstance(strategy, Plan):
        raise StateError("fully_shard: a Plan is no strategy, but it is given as one. Pass plan= instead.")
    if plan is None:
        return
    if not isinstance(plan, (Plan, str, os.PathLike)):
        raise PlanError(
            "fully_shard: plan must be a Plan, or the path of a file that holds one, but it is "
            f"{plan!r} ({type(plan).__name__}). Pass what dshard.plan gave."
        )
    others = {"strategy": strategy, "reshard_after_forward": reshard_after_forward, "memory_budget": memory_budget}
    others["auto_wrap_policy"] = auto_wrap_policy
    both = next((name for name, value in others.items() if value is not None), None)
    if both is not None:
        raise StateError(
            f"fully_shard: a plan says how each unit is cut and gathered, but {both} is given, too. Leave it out."
        )


def follow(
    plan: Plan | str | os.PathLike[str] | None,
    strategies: StrategyRules,
    modules: Sequence[nn.Module],
    found: Sequence[tuple[str, nn.Parameter]],
    group: ShardGroup,
    precision: PrecisionRules,
) -> Followed:
    """What a plan says of a model; without one, the strategies that were given.

    Args:
        plan: Made for the same model, or the path of its file; or None.
        strategies: Of `strategy=`.
        modules: One: the model.
        found: All parameters of it, by name.
        group: The ranks that will share it.
        precision: The parameters' dtypes on their ways.

    Raises:
        PlanError: The file is missing or holds no plan, on every rank that sees it so; or the plan was made for another
            model, another number of ranks or other dtypes, on every rank alike.
        DivergenceError: The ranks have different plans, or some of them none. On every other rank.

    Communicates:
        With a plan an all-reduce of 16 bytes.
    """
    if plan is None:
        return Followed(strategies)
    read = _read_plan(plan, group)
    units = _units_of(read, modules, found, group.num_ranks)
    _check_bytes(read, found, precision)
    planned = {plain_name(name): strategy for name, strategy in read.by_parameter.items()}
    return Followed(StrategyRules(named={name: planned[plain_name(name)] for name, _ in found}), read, tuple(units))


def _read_plan(plan: Plan | str | os.PathLike[str], group: ShardGroup) -> Plan:
    """A plan, from its file where a path is given, that is the same on all ranks."""
    found: Plan | None = None
    error: PlanError | None = None
    try:
        found = plan if isinstance(plan, Plan) else _load(plan)
    except PlanError as raised:  # the other ranks must hear of it
        error = raised
    crc = -1 if found is None else zlib.crc32(repr(_choices(found)).encode())
    is_same = bool(agree(torch.tensor([crc], device=group.device_type), group, "plan")[0])
    if error is not None:
        raise error
    if found is None or not is_same:
        raise DivergenceError(
            "fully_shard: all ranks must follow the same plan, but they do not: on some of them it is another one, or "
            "its file is missing. Plan with mesh= or device=, or give all ranks one file."
        )
    return found


def _choices(plan: Plan) -> list[tuple[tuple[str, ...], str]]:
    """What of it is followed."""
    units = zip(plan.model.units, plan.strategies, strict=True)
    return [(unit.param_names, str(strategy)) for unit, strategy in units]


def _load(path: str | os.PathLike[str]) -> Plan:
    if not Path(path).exists():
        way_out = f'Did you mean strategy="{path}"?' if _is_strategy(path) else "Pass a path that exists."
        raise PlanError(
            "fully_shard: plan must be a Plan or the path of a file that Plan.save or dshard plan --out wrote, but "
            f"there is no file {str(path)!r}. {way_out}"
        )
    try:
        return Plan.load(path)
    except PlanError as error:
        raise PlanError(f"fully_shard: {error}") from error


def _is_strategy(text: Any) -> bool:
    try:
        Strategy.of(text)
    except DShardError:
        return False
    return True


def _units_of(
    plan: Plan, modules: Sequence[nn.Module], found: Sequence[tuple[str, nn.Parameter]], num_ranks: int
) -> list[UnitPlan[nn.Parameter]]:
    """The units of a plan in a model that is to be sharded, but for that of the root."""
    if len(modules) != 1 or plan.cluster.num_ranks != num_ranks:
        raise PlanError(
            f"fully_shard: a plan is for one model on the ranks that it was made for ({plan.cluster.num_ranks}), but "
            f"these are {len(modules)} modules on {num_ranks} ranks. Plan again."
        )
    units = find_units(modules[0], [param for _, param in found], "root")
    names = {id(param): plain_name(name) for name, param in found}
    here = {
        tuple(names[id(p)] for p in unit.params): tuple((p.shape[0] if p.ndim else 1, p.numel()) for p in unit.params)
        for unit in units
    }
    planned = {
        tuple(map(plain_name, unit.param_names)): tuple((p.length, p.numel) for p in unit.params)
        for unit in plan.model.units
    }
    if here != planned:
        wrong = next(key for key in (*here, *planned) if here.get(key) != planned.get(key))
        which = wrong[0] if wrong else "a unit without parameters"
        raise PlanError(
            f"fully_shard: a plan is for the model that it was made for, but the unit of {which} is another. Plan "
            "again, with this model."
        )
    return [unit for unit in units if modules[0] not in unit.modules]


def _check_bytes(plan: Plan, found: Sequence[tuple[str, nn.Parameter]], precision: PrecisionRules) -> None:
    """Refuse dtypes, and frozen parameters, that take other bytes than those that were planned with."""
    costs = {plain_name(param.name): param for unit in plan.model.units for param in unit.params}
    totals: dict[str, list[int]] = {"stored": [0, 0], "gathered": [0, 0], "reduced": [0, 0]}
    first: dict[str, str] = {}  # that differs
    for name, param in found:
        way, known = precision.precision_of(name, param.dtype) or Precision(), costs[plain_name(name)]
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
                "says (of dshard plan: --dtype and --reduce-dtype), and freeze parameters before planning."
            )
