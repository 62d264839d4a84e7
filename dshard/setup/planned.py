"""Following a plan: its units and strategies in the model that it was made for, and how far its prediction was off."""

import logging
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from dshard import arguments
from dshard.autograd import MODES, apply_checkpointing, check_plain
from dshard.errors import DShardError, PlanError
from dshard.optimizer.steps import after_steps
from dshard.planner import Comparison, Measured, Plan
from dshard.planner.plan import plain_name
from dshard.planner.steps import shape_of
from dshard.policies import Precision, PrecisionRules, Strategy, StrategyRules
from dshard.runtime import Runtime
from dshard.runtime.module import FSDPModule
from dshard.runtime.runtime import runtime_of
from dshard.setup.auto_units import UnitSpec
from dshard.setup.options import Followed
from dshard.units.placing import Place

log = logging.getLogger("dshard")

_MAX_STEPS = 8  # of the optimizer; a model that a compiled function calls never says when it starts: there is no report
_ALIKE = 0.02  # norms and biases may compute in a dtype of their own; a plan has one for all


def read_plan(plan: Plan | str | os.PathLike[str]) -> Plan:
    """A plan, from its file where a path is given.

    Raises:
        PlanError: The file is missing or holds no plan.
    """
    if isinstance(plan, Plan):
        return plan
    if not Path(plan).exists():
        way_out = f'Did you mean strategy="{plan}"?' if _is_strategy(plan) else "Pass a path that exists."
        raise PlanError(
            "fully_shard: plan must be a Plan or the path of a file that Plan.save or dshard plan --out wrote, but "
            f"there is no file {str(plan)!r}. {way_out}"
        )
    try:
        return Plan.load(plan)
    except PlanError as error:
        raise PlanError(f"fully_shard: {error}") from error


def choices(plan: Plan) -> list[str]:
    """What of a plan is followed, unit by unit; all ranks must follow the same."""
    units = zip(plan.model.units, plan.strategies, strict=True)
    cut = [f"{strategy} for {', '.join(unit.param_names) or 'nothing'}" for unit, strategy in units]
    away = [f"{unit.name} is{'' if unit.is_offloaded else ' not'} in the CPU's memory" for unit in plan.model.units]
    return [*cut, *(f"{mode!r} checkpointing" for mode in getattr(plan, "checkpointing", ())), *away]


def follow(
    plan: Plan,
    modules: Sequence[nn.Module],
    found: Sequence[tuple[str, nn.Parameter]],
    places: Sequence[Place],
    mesh: DeviceMesh,
    precision: PrecisionRules,
    *,
    offloads: bool = False,
) -> Followed:
    """What a plan says of a model.

    Args:
        plan: Made for the same model.
        modules: One: the model.
        found: All parameters of it, by name.
        places: Where each would go without a plan.
        mesh: Ranks that will share it; of two dims, that replicate it, and that share it.
        precision: The parameters' dtypes on their ways.
        offloads: Whether some are to be kept in the CPU's memory, if that is another than the mesh's.

    Raises:
        PlanError: It was made for another model, another number of ranks, another mesh or other dtypes.
    """
    mesh_shape = tuple(mesh.shape)
    units = _units_of(plan, modules, found, mesh_shape)
    _check_places(plan, found, places, mesh)
    _check_bytes(plan, found, precision)
    away = _kept_away(plan, offloads)
    whole = {plain_name(param.name) for unit in plan.model.units for param in unit.params if not param.can_split}
    planned = {}
    for name, strategy in plan.by_parameter.items():
        own = replace(strategy, num_slices=1) if plain_name(name) in whole else strategy
        planned[plain_name(name)] = _on_mesh(own, plan.cluster.num_ranks, mesh_shape)
    for mode, checkpointed in _checkpointed(modules[0], plan).items():
        check_plain(checkpointed, mode, root=modules[0])
    named = {name: planned[plain_name(name)] for name, _ in found}
    names = None if away is None else frozenset(name for name in named if plain_name(name) in away)
    return Followed(StrategyRules(named=named), plan, choices(plan), tuple(units), names)


def _on_mesh(strategy: Strategy, num_ranks: int, shape: tuple[int, ...]) -> Strategy:
    """A strategy among the ranks of a plan, as one on a mesh that says itself who replicates and who shares.

    Raises:
        PlanError: Others would share a parameter than the mesh has.
    """
    if len(shape) == 1 or strategy.base == "ddp":
        return strategy
    within = num_ranks if strategy.within is None else strategy.within
    if within != shape[-1]:
        raise PlanError(
            f"fully_shard: on a mesh of shape {shape} {shape[-1]} ranks share a parameter, but the plan has "
            f"{strategy}, which is for {within}. Pass a mesh of one dim, or plan with this mesh: dshard.plan(mesh=...)."
        )
    return replace(strategy, within=None)


def checkpoint_as_planned(model: nn.Module, plan: Any) -> None:
    """Have each unit of a plan keep for backward what the plan says: `apply_checkpointing` on its modules.

    Ahead of the units' hooks or after them: these stand around a module's forward, and this in it.

    Args:
        model: That the plan is for.
        plan: With a mode per unit as `checkpointing`; none means "none" for all.

    Raises:
        PlanError: It has modes for other units, one that is none, or one for the whole model.
        StateError: A module is checkpointed already.
    """
    for mode, modules in _checkpointed(model, plan).items():
        apply_checkpointing(modules, mode, root=model)


def _checkpointed(model: nn.Module, plan: Any) -> dict[str, list[nn.Module]]:
    """The modules that a plan has checkpointed, by mode.

    Raises:
        PlanError: As `checkpoint_as_planned`.
    """
    modes, units = getattr(plan, "checkpointing", ()), plan.model.units
    wrong = next((mode for mode in modes if mode not in MODES), None)
    if wrong is not None or len(modes) not in (0, len(units)):
        raise PlanError(
            f"fully_shard: a plan's checkpointing must be one of {', '.join(MODES)} for each of its {len(units)} "
            f"units, but it has {len(modes)} modes{'' if wrong is None else f', and one is {wrong!r}'}. Plan again."
        )
    runs = _by_plain_name(model)
    found: dict[str, dict[nn.Module, None]] = {}
    for mode, unit in zip(modes, units, strict=False):
        if mode != "none" and any(not _plain_module(name) for name in unit.modules):
            raise PlanError(
                f"fully_shard: the whole model must not be checkpointed, for its backward would begin with all that is "
                f"saved, but this plan has {mode!r} for {unit.name or 'it'}. Give that unit 'none'."
            )
        if mode != "none":
            found.setdefault(mode, {}).update(dict.fromkeys(runs[_plain_module(name)] for name in unit.modules))
    return {mode: list(modules) for mode, modules in found.items()}


def _is_strategy(text: Any) -> bool:
    try:
        Strategy.of(text)
    except DShardError:
        return False
    return True


def _units_of(
    plan: Plan, modules: Sequence[nn.Module], found: Sequence[tuple[str, nn.Parameter]], mesh_shape: tuple[int, ...]
) -> list[UnitSpec]:
    """The units of a plan in a model that is to be sharded, but for that of the root."""
    if len(modules) != 1 or plan.cluster.num_ranks not in (prod(mesh_shape), mesh_shape[-1]):  # those that share alone
        raise PlanError(
            f"fully_shard: a plan is for one model on the ranks that it was made for ({plan.cluster.num_ranks}), but "
            f"these are {len(modules)} modules on {prod(mesh_shape)} ranks. Plan again."
        )
    params = {plain_name(name): param for name, param in found}
    runs = _by_plain_name(modules[0])
    is_cut = plan.model.tensor_parallel > 1  # else it is for the model as it was before its layers were cut
    shapes = {name: shape_of(param) if is_cut else tuple(param.shape) for name, param in params.items()}
    costs = [param for unit in plan.model.units for param in unit.params]
    planned = {plain_name(param.name): (param.length, param.numel) for param in costs}
    cut = {plain_name(param.name): param.dim for param in costs}
    here = {name: (_length(shape, cut.get(name, 0)), prod(shape)) for name, shape in shapes.items()}
    wrong = [name for name in (*here, *planned) if here.get(name) != planned.get(name)]
    wrong += [name for unit in plan.model.units for name in unit.modules if _plain_module(name) not in runs]
    if wrong:
        raise PlanError(
            f"fully_shard: a plan is for the model that it was made for, but the unit of {wrong[0]} is another. Plan "
            "again, with this model."
        )
    units = [
        UnitSpec(
            unit.name,
            tuple(runs[_plain_module(name)] for name in unit.modules),
            tuple(params[plain_name(name)] for name in unit.param_names),
        )
        for unit in plan.model.units
    ]
    of_root = [unit.label for unit in units if modules[0] in unit.modules]
    apart = [unit.label for unit in units if not _holds_its_own(unit)]
    if len(of_root) > 1 or apart or len(costs) > len(planned):
        which = ", ".join([*apart, *of_root][:4])
        raise PlanError(
            "fully_shard: each unit of a plan has parameters of its own modules, each parameter once, and one unit at "
            f"most is that of the model itself, but this plan has others ({which}). Make it with dshard.plan, or say "
            "in UnitCosts which modules use each unit."
        )
    return [unit for unit in units if modules[0] not in unit.modules]


def _length(shape: tuple[int, ...], dim: int) -> int:
    """Of the dim that is cut; of a number 1."""
    return (shape or (1,))[dim] if dim < max(1, len(shape)) else -1


def _by_plain_name(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model; of wrappers of one the outermost."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        found.setdefault(_plain_module(name), module)
    return found


def _plain_module(name: str) -> str:
    """The name of a module without wrappers; that of the model is empty."""
    return plain_name(f"{name}.")[:-1]


def _holds_its_own(unit: UnitSpec) -> bool:
    """Whether all parameters of a unit lie in its modules."""
    held = {id(param) for module in unit.modules for param in module.parameters()}
    return all(id(param) in held for param in unit.params)


def _check_places(
    plan: Plan, found: Sequence[tuple[str, nn.Parameter]], places: Sequence[Place], mesh: DeviceMesh
) -> None:
    """Refuse to cut a parameter along another dim, or among other ranks, than was planned with: it may take more."""
    planned = {plain_name(param.name): param.dim for unit in plan.model.units for param in unit.params}
    is_whole = {plain_name(name): strategy.base == "ddp" for name, strategy in plan.by_parameter.items()}
    for (name, param), place in zip(found, places, strict=True):
        known, whole = planned[plain_name(name)], is_whole[plain_name(name)] or not param.ndim
        if place.mesh == mesh and (whole or place.dim == known):
            continue
        cut = "whole on every rank" if place.dim is None else f"cut along dim {place.dim}"
        raise PlanError(
            f"fully_shard: a plan is for the dims that its parameters are cut along, and one mesh, but {name} (shape "
            f"{tuple(param.shape)}) is cut along dim {known} in the plan, and here {cut} of {tuple(place.mesh.shape)}. "
            "Pass both dshard.plan and fully_shard the same shard_placement_fn, or neither."
        )


def _kept_away(plan: Plan, offloads: bool) -> set[str] | None:
    """The parameters of a plan that are kept in the CPU's memory, by plain names; None for all.

    Raises:
        PlanError: Something would be kept on the device that was planned to be elsewhere: it may not fit.
    """
    planned = {plain_name(name) for unit in plan.model.units if unit.is_offloaded for name in unit.param_names}
    if planned and not offloads:
        raise PlanError(
            "fully_shard: this plan is for parameters in the CPU's memory, but there is no offload_policy that keeps "
            'them there. Pass offload_policy=CPUOffloadPolicy(), or plan with offload="none".'
        )
    is_choice = any(each.is_offloaded for unit in plan.model.units for each in unit.alternatives)
    if offloads and not planned and not is_choice:  # the other way round it fits
        log.warning(
            "fully_shard: the plan is for parameters on the device, but offload_policy keeps them in the CPU's memory: "
            'a step takes longer than planned. Plan with offload="all", or dshard plan --offload.'
        )
        return None
    return None if planned == {plain_name(name) for name in plan.by_parameter} else planned


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


class PlanReport:
    """Watches the second step of a model that follows a plan, since the first one learns the order of use.

    A step lasts from the start of a training forward to the end of the `step` of the first optimizer that has a
    parameter of the model. On CUDA its peak is the allocator's, whose statistics are reset for that; on CPU there is
    none without torch's profiler, which is the program's own matter (`measure_step` uses it). The comparison goes to
    the logger "dshard", as information, or as a warning where the peak is above the prediction; on every rank, for its
    own figures.

    Args:
        model: The root, sharded.
        runtime: Of the model.
        plan: That it follows.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, plan: Plan) -> None:
        self._model, self._runtime = weakref.ref(model), weakref.ref(runtime)
        self.plan = plan
        self._num_steps = self._num_ended = 0
        self._start_s: float | None = None
        self.comparison: Comparison | None = None
        runtime.on_training_forward = self._begin
        self._leave = after_steps(self._end)

    def _begin(self) -> None:
        """A training forward of the model starts, of a step's first micro-batch or of a later one."""
        model = self._model()
        if self._start_s is not None or model is None:
            return
        device = _device_of(model)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        self._start_s = time.perf_counter()

    def _end(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        model = self._model()
        own = {id(param) for param in model.parameters()} if model is not None else set()
        if own and not any(id(param) in own for group in optimizer.param_groups for param in group["params"]):
            return
        self._num_ended += 1
        if model is None or self._num_ended > _MAX_STEPS:
            self._stop()
        elif self._start_s is not None:
            self._num_steps += 1
            if self._num_steps == 2:
                self.comparison = self.plan.compared(_measured(self._start_s, _device_of(model)))
                self._tell()
                self._stop()
            self._start_s = None

    def _tell(self) -> None:
        assert self.comparison is not None
        error = self.comparison.peak_error
        level = logging.WARNING if error is not None and error < 0 else logging.INFO
        log.log(level, "the plan against the second step:\n%s", self.comparison)

    def _stop(self) -> None:
        self._leave()
        runtime = self._runtime()
        if runtime is not None and runtime.on_training_forward == self._begin:
            runtime.on_training_forward = None


def _device_of(model: nn.Module) -> torch.device:
    """The device of the model now; a plan may have been given to it on meta."""
    return next(model.parameters()).device


def _measured(start_s: float, device: torch.device) -> Measured:
    """What has passed since then, on a device."""
    if device.type != "cuda":
        return Measured(time.perf_counter() - start_s)
    torch.cuda.synchronize(device)
    return Measured(time.perf_counter() - start_s, torch.cuda.max_memory_allocated(device))


def plan_report(model: nn.Module) -> Comparison | None:
    """What `fully_shard(model, plan=plan)` predicted against what the second step took; None until that has ended.

    Communicates nothing: the figures are this rank's. On CPU there is a time alone.
    """
    arguments.module("plan_report", "model", model)
    report = runtime_of(model).plan_report if isinstance(model, FSDPModule) else None
    return report.comparison if isinstance(report, PlanReport) else None
