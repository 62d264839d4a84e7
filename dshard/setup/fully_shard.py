"""`fully_shard` and its companions."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dshard.agreement import VERSIONS, Fact, broadcast_buffers, check_buffers, check_same, refused_together, versions
from dshard.autograd import modules_that_run
from dshard.collectives import ShardGroup
from dshard.optimizer.replace import inherit
from dshard.policies import Precision, PrecisionRules, StrategyRules, reshard_choice
from dshard.runtime import Runtime
from dshard.runtime.module_hooks import cast_at, watch
from dshard.setup.auto_units import AutoWrapPolicy, chosen_modules
from dshard.setup.dcp import stage_shards
from dshard.setup.options import Followed, Options, checked_modules, read_modules, read_options
from dshard.setup.specs import (
    ParamSpec,
    Resolver,
    Wrapping,
    compare_parameters,
    convert,
    described,
    follow_replaced,
    groups_cut_over,
    move_buffers,
    own_parameters,
    settle,
    take_in,
    wrap,
)
from dshard.slices import check_sliced, is_sliced, set_slices
from dshard.tensor.meshes import data_parallel_mesh, default_mesh, group_of
from dshard.units.context import BufferSync, ModelContext
from dshard.units.placing import Place, PlacementFn, check_mesh, places_of

if TYPE_CHECKING:  # loaded where a plan is given
    from dshard.planner import Plan

M = TypeVar("M", bound="nn.Module | list[Any] | tuple[Any, ...]")


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: Collection[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    sync: Literal["check", "broadcast"] | None = "check",
    grad_reduce: Literal["mean", "sum"] = "mean",
    buffers: Literal["leave", "broadcast", "check"] = "leave",
    memory_budget: int | str | None = None,
    auto_wrap_policy: AutoWrapPolicy | None = None,
    strategy: Any = None,
    plan: "Plan | str | os.PathLike[str] | None" = None,
) -> M:
    """Shard the parameters of a module over the ranks of a mesh, in place.

    Every parameter becomes a `ShardedTensor`: each rank keeps one shard of it, and it means its full value wherever
    it is used. The parameters that one call takes form a *unit*, which is gathered at the first touch of any of
    them and freed after the module's forward, and again in backward; their gradients are reduce-scattered once per
    backward. Call it bottom-up on blocks and then on the root, as with FSDP2, or on the root alone: what a call on the
    root takes is cut into units at the first use.

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
            means False, and the number of the shards True. What False keeps outlives forwards without gradients, too,
            until its weights are written or a backward frees it.
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
        memory_budget: Bytes of gathered copies that may stay between forward and backward, for the whole model; in
            the place of `reshard_after_forward=None`. Those that the backward uses last go first. 0 gathers every
            unit twice a step, the model's size once. "auto" takes four fifths of what is free on the rank that has
            the least, when the first step is over. Forwards without gradients keep as many bytes.
        auto_wrap_policy: Which modules below become units of their own, as if this had been called on each of them
            first, children before parents: a set of module classes, a function that is given a module and returns a
            bool, or a policy of torch's FSDP1. Modules of which no parameter is left to take are passed over.
        strategy: What is whole on every rank and what is sharded, in the place of `reshard_after_forward`: "ddp",
            "zero1", "zero2", "keep", "full", "hybrid(k)" for shards over `k` neighbours that are replicated across,
            "split(q)" for weights of layers that are gathered and used in `q` slices, or a `Strategy`; or a dict of
            those by patterns of parameter names, of which the first that matches decides, as in
            `{"*embed*": "ddp", "layers.*": "full"}`. `set_strategy` changes it between two steps.
        plan: What `dshard.plan` made for this model and as many ranks (on a mesh of two dims one where those of the
            second share parameters), or the path of its file (of `Plan.save`, or
            `dshard plan --out`): its units, and the strategy of each. After the second step the logger "dshard", and
            `plan_report(model)`, say how that compares with it.

    Returns:
        `module` itself, whose class is now a subclass of `FSDPModule` too. To a type checker it is of the class that it
        was of; `assert isinstance(module, FSDPModule)` tells it of both.

    Raises:
        PlacementError: A placement that a parameter cannot have. On every rank alike.
        DivergenceError: The ranks hold different models or weights, were given different options, or one of them raised
            one of the other errors alone. On every rank alike.
        ArgumentError: An argument is none of what it may be. On every rank alike.
        StateError: No process group, options that do not go together, or a module that cannot be sharded.
        PlanError: `plan` is for another model, number of ranks or dtypes.
        UnsupportedOpError: An option that is not supported yet.

    Communicates:
        With `sync="check"` an all-reduce of 16 bytes per parameter, with "broadcast" a broadcast of all weights;
        always an all-reduce of 288 bytes that compares options, names and shapes; with `plan` one more of 32 bytes for
        each dim of the meshes of DTensors.
    """
    given = locals()
    with refused_together("fully_shard", _Call.FACTS, _group_to_ask(mesh)):
        modules = read_modules(module)
        call = _Call.resolved(modules, Options(**read_options(given)))
    check_same("fully_shard", call.facts(), call.resolver.group)
    places = settle(call.specs)
    if call.followed.plan is not None:  # what is recomputed sends among ranks over which layers are cut
        for group in groups_cut_over(call.modules, call.specs, places):
            check_same("fully_shard", {"plan": call.followed.choices}, group)
    compare_parameters(call.modules, call.specs, places, call.resolver.group, sync)
    runtime = call.apply(places)
    runtime.context.change(**call.options.of_model)
    _handle_buffers(call.modules, call.resolver.mesh, runtime.context, buffers)
    runtime.plan_report = None
    if call.followed.plan is not None:
        from dshard.setup.planned import PlanReport

        runtime.plan_report = PlanReport(call.modules[0], runtime, call.followed.plan)
    return module


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of `fully_shard`, resolved: nothing has changed yet, and nothing was communicated.

    Args:
        modules: That it was given.
        options: The same.
        resolver: How parameters are resolved.
        specs: What becomes of each parameter.
        children: Modules below that become units of their own, and whether each is freed after forward.
        followed: What a plan says, and the strategies.
        wrappings: The units to be, of modules below and last of the given ones.
    """

    modules: list[nn.Module]
    options: Options
    resolver: Resolver
    specs: list[ParamSpec]
    children: dict[nn.Module, bool | None]
    followed: Followed
    wrappings: list[Wrapping]

    FACTS: ClassVar[tuple[str, ...]] = tuple(  # in the order in which they are named: causes first
        dict.fromkeys(
            [VERSIONS, "module", "ignored_params", "parameters", "plan", *(each.name for each in fields(Options))]
        )
    )

    @classmethod
    def resolved(cls, module: Any, options: Options) -> "_Call":
        """What a call asks for.

        Raises:
            DShardError: It cannot be. On every rank alike, where all were given the same.
        """
        modules = checked_modules(module)
        options.check()
        mesh = options.mesh if options.mesh is not None else default_mesh()
        if options.dp_mesh_dims is not None:
            mesh = data_parallel_mesh(mesh, options.dp_mesh_dims)
        check_mesh(mesh)
        reshard = reshard_choice("fully_shard", options.reshard_after_forward, mesh.size(mesh.ndim - 1))
        precision = PrecisionRules.of(options.mp_policy, options.offload_on(mesh))
        plan: Plan | None = None
        if options.plan is not None:
            from dshard.setup.planned import follow, read_plan

            plan = read_plan(options.plan)
        strategies = StrategyRules.of(options.strategy)
        follow_replaced(modules)
        found = own_parameters(modules, options.ignored)
        followed = Followed(strategies)
        if plan is not None:
            places = places_of(found, mesh, options.placement_fn)
            followed = follow(plan, modules, found, places, mesh, precision, offloads=options.offloads)
            precision = replace(precision, away=followed.away)
        averages = options.grad_reduce == "mean"
        resolver = Resolver(mesh, options.placement_fn, averages, precision, followed.strategies)
        names = [name for name, _ in found]
        followed.strategies.check_names("fully_shard", names)
        precision.check_names("fully_shard", names)
        children = chosen_modules(modules, options.auto_wrap_policy, options.ignored)
        specs = resolver.params(found)
        for spec in specs:
            if is_sliced(spec.param, spec.num_slices):
                offload = spec.precision.offload if spec.precision is not None else None
                check_sliced(modules, spec.name, spec.param, dim=spec.base.dim, offload=offload)
        groups: list[_Group] = [((child,), reshard if own is None else own, None) for child, own in children.items()]
        groups += [(unit.modules, None, set(map(id, unit.params))) for unit in followed.units]
        wrappings = _wrappings([*groups, (tuple(modules), reshard, None)], specs, resolver, options.ignored)
        return cls(modules, options, resolver, specs, children, followed, wrappings)

    def facts(self) -> dict[str, Fact]:
        """What all ranks of the mesh must ask for alike, by the names of the arguments."""
        options, own = self.options, [spec for spec in self.specs if spec.base.mesh == self.resolver.mesh]
        names = {module: name for root in self.modules for name, module in root.named_modules()}
        ignored = {id(param) for param in options.ignored}
        mesh = self.resolver.mesh
        facts: dict[str, Fact] = {each.name: repr(getattr(options, each.name)) for each in fields(Options)}
        facts |= {
            VERSIONS: versions(),
            "module": ", ".join(type(module).__name__ for module in self.modules),
            "mesh": f"{mesh.device_type}, dims {mesh.mesh_dim_names}, ranks {mesh.mesh.tolist()}",
            "ignored_params": [n for root in self.modules for n, p in root.named_parameters() if id(p) in ignored],
            "parameters": described(own),
            "shard_placement_fn": [f"{s.name}: {s.base.dim}" for s in own],
            "mp_policy": [repr(self.resolver.precision.rules), *(f"{s.name}: {_dtypes(s.precision)}" for s in own)],
            "offload_policy": type(options.offload_policy).__name__,
            "auto_wrap_policy": [f"{names[child]}: {reshard}" for child, reshard in self.children.items()],
            "strategy": [repr(self.resolver.strategies.rules), *(f"{s.name}: {s.strategy}" for s in own)],
            "plan": self.followed.choices if self.followed.plan is not None else "None",
        }
        return {name: facts[name] for name in self.FACTS}

    def apply(self, places: Sequence[Place]) -> Runtime:
        """Do it: convert the parameters, make the units, and remember how, for what is added later."""
        sharded, inherited = convert(self.modules, self.specs, places)
        move_buffers(self.modules, self.resolver.mesh)
        if self.followed.plan is not None:
            from dshard.setup.planned import checkpoint_as_planned

            checkpoint_as_planned(self.modules[0], self.followed.plan)
        runtime = wrap(self.wrappings, self.modules, sharded, may_split=self.followed.plan is None)
        set_slices(self.modules, {sharded[id(spec.param)]: spec.num_slices for spec in self.specs})
        for heir in inherited:
            inherit(*heir, mean=self.resolver.averages)
        stage_shards()
        runtime.late.note(self.modules, partial(take_in, self.resolver))
        for wrapping in self.wrappings:
            cast_at(wrapping.modules, self.resolver.precision, watch)
        return runtime


# Modules, when their units are freed after forward, and the identities of what they may take; None for all.
_Group = tuple[tuple[nn.Module, ...], bool | int | None, set[int] | None]


def _wrappings(
    groups: Sequence[_Group],
    specs: Sequence[ParamSpec],
    resolver: Resolver,
    ignored: set[nn.Parameter],
) -> list[Wrapping]:
    """The units of modules below one another, innermost first: each takes of its parameters what is left.

    Args:
        groups: Modules that are wrapped together.
        specs: What becomes of the parameters.
        resolver: Makes units of them.
        ignored: Parameters to leave alone.
    """
    left = {id(spec.param): spec for spec in specs}
    found = []
    for modules, reshard, wanted in groups:
        params = (id(param) for _, param in own_parameters(modules, ignored))
        own = [left.pop(key) for key in params if key in left and (wanted is None or key in wanted)]
        label = type(modules[0]).__name__
        units = resolver.units(own, modules_that_run(modules), label=label, reshard=reshard)
        found.append(Wrapping(modules, tuple(units)))
    return found


def _dtypes(precision: Precision | None) -> str:
    """The dtypes of a parameter on its way; devices have numbers of their own on each rank."""
    return str(replace(precision, offload=None) if precision is not None else None)


def _group_to_ask(mesh: Any) -> ShardGroup | None:
    """The ranks that make the same call, as far as that can be told before it was looked at."""
    try:
        mesh = mesh if mesh is not None else default_mesh()
        return group_of(mesh) if isinstance(mesh, DeviceMesh) and mesh.ndim in (1, 2) else None
    except (RuntimeError, ValueError):
        return None


def _handle_buffers(modules: Sequence[nn.Module], mesh: DeviceMesh, context: ModelContext, choice: str) -> None:
    """Compare the buffers of the ranks, or take those of rank 0 now and before each training forward."""
    group = group_of(mesh)
    if choice == "check":
        check_buffers(modules, group)
    elif choice == "broadcast":
        broadcast_buffers(modules, group)
        context.change(buffers=(*context.settings.buffers, BufferSync(tuple(modules), mesh)))
