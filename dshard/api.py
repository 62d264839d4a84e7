"""`fully_shard` and its companions."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dshard.collectives import ShardGroup
from dshard.errors import StateError
from dshard.plan_units import check_given, follow
from dshard.planner import Plan
from dshard.policies import Offload, PrecisionRules, StrategyRules, read_bytes, reshard_choice
from dshard.report import PlanReport
from dshard.runtime import Runtime
from dshard.runtime.auto_units import UnitPlan
from dshard.runtime.buffers import broadcast_buffers, check_buffers
from dshard.runtime.casts import cast_at
from dshard.runtime.convert import check_offload, device_of, follow_replaced, move_buffers, own_parameters
from dshard.runtime.hooks import watch
from dshard.runtime.initial import compare_parameters
from dshard.runtime.install import Conversion, install, joined_runtime, take_in
from dshard.runtime.module import FSDPModule
from dshard.runtime.placing import Place, PlacementFn, check_mesh, replicated
from dshard.runtime.replace import inherit
from dshard.runtime.sliced import check_sliced, is_sliced, set_slices
from dshard.runtime.wrap import AutoWrapPolicy, chosen_modules
from dshard.tensor.meshes import data_parallel_mesh, default_mesh, group_of

__all__ = ["fully_shard"]


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    sync: Literal["check", "broadcast"] | None = "check",
    grad_reduce: Literal["mean", "sum"] = "mean",
    buffers: Literal["leave", "broadcast", "check"] = "leave",
    memory_budget: int | str | None = None,
    auto_wrap_policy: AutoWrapPolicy | None = None,
    strategy: Any = None,
    plan: Plan | str | os.PathLike[str] | None = None,
) -> Any:
    """Shard the parameters of a module over the ranks of a mesh, in place.

    Every parameter becomes a `ShardedTensor`: each rank keeps one shard of it, and it means its full value wherever
    it is used. The parameters that one call takes form a *unit*, which is gathered at the first touch of any of
    them and freed after the module's forward, and again in backward; their gradients are reduce-scattered once per
    backward. Call it bottom-up on blocks and then on the root, as with FSDP2, or on the root alone: then units are
    formed at the first use.

    Tensor subclasses with FSDP2's `fsdp_pre_all_gather` and `fsdp_post_all_gather` say themselves what travels of them,
    and what a forward computes with; everything else sees their exact value.

    Args:
        module: A module, or several that are gathered together.
        mesh: One-dimensional device mesh, by default of all ranks; or a two-dimensional one, over whose second dim the
            parameters are sharded and over whose first they are replicated (HSDP). Parameters that are DTensors over
            other dims of the same mesh (`parallelize_module`) are cut further.
        reshard_after_forward: Whether the unit is freed between forward and backward, and gathered again. None
            means True, except for what stays with the root. A number of ranks that divides that of a parameter's shards
            keeps a part of the gathered copies in each, so that backward gathers among as many neighbours alone; 1
            means False, and the number of the shards True.
        shard_placement_fn: Gives each parameter's placement: `Shard(dim)`, `Replicate()`, or None for `Shard(0)`; or
            torch's `ShardPlacementResult`, which names a mesh for that parameter, too. Uneven dims are padded on the
            wire alone.
        mp_policy: torch's `MixedPrecisionPolicy`: the dtypes in which parameters are gathered and computed with, and
            gradients reduced; they are kept in their own. Or a dtype to gather in; or a dict of either by patterns of
            parameter names, of which the first that matches decides, as in
            `{"*norm*": torch.float32, "*": MixedPrecisionPolicy(...)}`.
        offload_policy: torch's `CPUOffloadPolicy`: shards, their gradients and the optimizer's state are kept in the
            CPU's memory, and copied to the mesh's device and back; calls on other modules may have none. On a CPU mesh,
            where everything is on the CPU already, it changes nothing.
        ignored_params: Parameters to leave alone: not sharded, not moved, their gradients not reduced.
        dp_mesh_dims: torch's `DataParallelMeshDims`: the names of the dims of `mesh` to shard over, and to replicate
            over; several of either count as one. Parameters may be DTensors over all of `mesh`, replicated over these
            dims. Without dims to shard over every rank keeps whole copies, as under DDP.
        sync: What to do about initial weights that differ between ranks: raise and name them, take those of rank 0, or
            trust.
        grad_reduce: Whether gradients are averaged over the ranks or added.
        buffers: "leave" leaves them to each rank, as FSDP2 does; "check" raises if they differ now; "broadcast" takes
            those of rank 0 now and at the start of every training forward, as DDP does.
        memory_budget: Bytes, as a number or as text ("2GiB"), of gathered copies that may stay between forward and
            backward, for the whole model; in the place of `reshard_after_forward=None`. Those that the backward uses
            last go first. 0 gathers every unit twice a step, the model's size once. "auto" takes four fifths of what
            is free on the rank that has the least, when the first step is over.
        auto_wrap_policy: Which modules below become units of their own, as if this had been called on each of them
            first, children before parents: a set of module classes, a function that is given a module and returns a
            bool, or a policy of torch's FSDP1. Modules of which no parameter is left to take are passed over.
        strategy: What is whole on every rank and what is sharded, in the place of `reshard_after_forward`: "ddp",
            "zero1", "zero2", "keep", "full", "hybrid(k)" for shards over `k` neighbours that are replicated across,
            "split(q)" for weights of layers that are gathered and used in `q` slices, or a `Strategy`; or a dict of
            those by patterns of parameter names, of which the first that matches decides, as in
            `{"*embed*": "ddp", "layers.*": "full"}`. `set_strategy` changes it between two steps.
        plan: What `dshard.plan` made for this model and as many ranks, or the path of its file (of `Plan.save`, or
            `dshard plan --out`): its units, and the strategy of each. After the second step the logger "dshard", and
            `plan_report(model)`, say how that compares with it.

    Returns:
        `module` itself, whose class is now a subclass of `FSDPModule` too.

    Raises:
        PlacementError: A placement that a parameter cannot have. On every rank alike.
        DivergenceError: The ranks hold different models or weights. On every rank alike.
        StateError: No process group, or a module that cannot be sharded. On every rank alike.
        PlanError: `plan` is none, or for another model, number of ranks or dtypes. On every rank alike.
        UnsupportedOpError: An option that is not supported yet.

    Communicates:
        With `sync="check"` an all-reduce of 16 bytes per parameter, with "broadcast" a broadcast of all weights;
        always an all-reduce of 16 bytes that compares names and shapes; with a plan another one.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_modules(modules)
    _check_options(sync, grad_reduce, buffers)
    budget = _budget_of(memory_budget)
    check_given(plan, strategy, reshard_after_forward, memory_budget, auto_wrap_policy)
    mesh, shard_placement_fn = _mesh_of(mesh, dp_mesh_dims, shard_placement_fn)
    precision = PrecisionRules.of(mp_policy, _offload_of(offload_policy, mesh))
    reshard = reshard_choice(reshard_after_forward, mesh.size(mesh.ndim - 1))
    strategies = _strategies_of(strategy, reshard)
    group = group_of(mesh)
    follow_replaced(modules)
    ignored = ignored_params or set()
    found = own_parameters(modules, ignored)
    followed = follow(plan, strategies, modules, found, group, precision)
    check_offload(found, precision)
    children = chosen_modules(modules, auto_wrap_policy, ignored)
    followed.strategies.check_names("fully_shard", [name for name, _ in found])
    conversion = Conversion(mesh, group, shard_placement_fn, grad_reduce == "mean", precision, followed.strategies)
    places = conversion.places(found)
    _check_slices(modules, found, places, conversion)
    compare_parameters(modules, found, places, group, sync)
    names = {id(param): name for name, param in found}
    for child, child_reshards in children.items():
        _convert([child], ignored, names, conversion, child_reshards if child_reshards is not None else reshard)
    _convert_planned(followed.units, ignored, names, conversion)
    runtime = _convert(modules, ignored, names, conversion, reshard, budget)
    _handle_buffers(modules, group, runtime, buffers)
    runtime.plan_report = PlanReport(modules[0], runtime, followed.plan) if followed.plan is not None else None
    return module


def _check_slices(
    modules: Sequence[nn.Module],
    found: Sequence[tuple[str, nn.Parameter]],
    places: Sequence[Place],
    conversion: Conversion,
) -> None:
    """Refuse what cannot be gathered in slices, before anything is changed."""
    for (name, param), place in zip(found, places, strict=True):
        if is_sliced(param, conversion.strategies.num_slices_of(name)):
            check_sliced(modules, name, param, dim=place.dim, offload=conversion.precision.offload)


def _convert_planned(
    planned: Sequence[UnitPlan[nn.Parameter]],
    ignored: set[nn.Parameter],
    names: Mapping[int, str],
    conversion: Conversion,
) -> None:
    """Make the units of a plan; what several of them hold is left to the root."""
    wanted = {id(param) for unit in planned for param in unit.params}
    for unit in planned:
        shared = {param for module in unit.modules for param in module.parameters() if id(param) not in wanted}
        _convert(unit.modules, ignored | shared, names, conversion, None)


def _handle_buffers(modules: Sequence[nn.Module], group: ShardGroup, runtime: Runtime, choice: str) -> None:
    """Compare the buffers of the ranks, or take those of rank 0 now and before each training forward."""
    if choice == "check":
        check_buffers(modules, group)
    elif choice == "broadcast":
        broadcast_buffers(modules, group)
        runtime.sync_buffers.append(partial(broadcast_buffers, modules, group))


def _convert(
    modules: Sequence[nn.Module],
    ignored: set[nn.Parameter],
    names: Mapping[int, str],
    conversion: Conversion,
    reshard: bool | int | None,
    memory_budget: int | Literal["auto"] | None = None,
) -> Runtime:
    """Make one unit of the parameters of some modules that no earlier call has taken; `names` by identity."""
    follow_replaced(modules)
    found = [(names[id(param)], param) for _, param in own_parameters(modules, ignored)]
    parts, inherited = conversion.replace(modules, found)
    slices = {p: conversion.strategies.num_slices_of(p.name) for part in parts for p in part.params}
    move_buffers(modules, conversion.mesh)
    runtime = joined_runtime(modules)
    if memory_budget is not None:
        runtime.memory_budget = memory_budget
    for unit in install(modules, parts, runtime, reshard):
        unit.averages = conversion.averages
    set_slices(modules, slices)
    for heir in inherited:
        inherit(*heir, mean=conversion.averages)
    runtime.late.note(modules, partial(take_in, runtime, conversion))
    cast_at(modules, conversion.precision, watch)
    return runtime


def _check_modules(modules: Sequence[nn.Module]) -> None:
    """Refuse what is not there, before anything is changed."""
    if not modules:
        raise StateError("fully_shard: needs a module or a list of them, but the list is empty. Pass the model.")
    for module in modules:
        if isinstance(module, FSDPModule):
            raise StateError(
                f"fully_shard: a module can be sharded once, but this {type(module).__name__} already is. Call "
                "fully_shard on each module once, children first."
            )
        if not isinstance(module, nn.Module):
            raise StateError(f"fully_shard: needs a module or a list of them, but got {type(module).__name__}.")


def _check_options(sync: Any, grad_reduce: Any, buffers: Any) -> None:
    """Refuse what is none of the choices."""
    _check_choice("sync", sync, ("check", "broadcast", None))
    _check_choice("grad_reduce", grad_reduce, ("mean", "sum"))
    _check_choice("buffers", buffers, ("leave", "broadcast", "check"))


def _check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise StateError(f"fully_shard: {name} must be one of {allowed}, but it is {value!r}. Pass one of them.")


def _budget_of(value: Any) -> int | Literal["auto"] | None:
    """A budget in bytes, or one of its other two values."""
    if value is None:
        return None
    if isinstance(value, str) and value == "auto":
        return "auto"
    num_bytes = read_bytes(value)
    if num_bytes is None:
        raise StateError(
            "fully_shard: memory_budget must be a number of bytes, text such as '2GiB', 'auto' or None, but it is "
            f"{value!r}. Pass 0 to keep nothing."
        )
    return num_bytes


def _mesh_of(
    mesh: DeviceMesh | None, dims: Any, shard_placement_fn: PlacementFn | None
) -> tuple[DeviceMesh, PlacementFn | None]:
    """The mesh to shard over, and how parameters are cut on it."""
    mesh = mesh if mesh is not None else default_mesh()
    if dims is not None:
        mesh = data_parallel_mesh(mesh, dims)
        shard_placement_fn = _placement_on(dims, shard_placement_fn)
    check_mesh(mesh)
    return mesh, shard_placement_fn


def _placement_on(dims: Any, shard_placement_fn: PlacementFn | None) -> PlacementFn | None:
    """How parameters are cut where `dp_mesh_dims` may name no dims to shard over."""
    if dims.shard is not None:
        return shard_placement_fn
    if shard_placement_fn is not None:
        raise StateError(
            "fully_shard: shard_placement_fn says how a parameter is cut, but dp_mesh_dims names no dims to shard over "
            f"({dims}). Leave one of them out."
        )
    return replicated


def _strategies_of(value: Any, reshard: bool | int | None) -> StrategyRules:
    """The strategies of `strategy=`."""
    if value is not None and reshard is not None:
        raise StateError(
            "fully_shard: strategy says when gathered copies are freed, but reshard_after_forward is given, too "
            f"({value!r} and {reshard!r}). Leave one of them out."
        )
    return StrategyRules.of(value)


def _offload_of(policy: Any, mesh: DeviceMesh) -> Offload | None:
    """What a policy asks for on a mesh; None where a parameter is kept where it is used."""
    if isinstance(policy, Offload):  # of any two devices
        return policy
    name = type(policy).__name__
    if policy is not None and name not in ("OffloadPolicy", "CPUOffloadPolicy"):
        raise StateError(
            f"fully_shard: offload_policy must be an OffloadPolicy or a CPUOffloadPolicy, but it is {policy!r}. Pass "
            "CPUOffloadPolicy(), or leave it out."
        )
    if name != "CPUOffloadPolicy" or mesh.device_type == "cpu":
        return None
    return Offload(torch.device("cpu"), device_of(mesh), pins=policy.pin_memory)
