"""From parameters to units: what becomes of each, its conversion, initial weights, and the units that take them."""

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parameter import is_lazy

from dshard.agreement import broadcast_weights, check_same, check_same_structure, check_same_weights
from dshard.collectives import ShardGroup
from dshard.errors import StateError, UnsupportedOpError
from dshard.optimizer.replace import ParameterHooks, Replaced, hooks_of, inherit, replacement_of, retire
from dshard.policies import Precision, PrecisionRules, Strategy, StrategyRules
from dshard.runtime.module import answer_as_fsdp2, say_managed, sharded_class
from dshard.runtime.module_hooks import attach, watch
from dshard.runtime.runtime import Runtime, units_of
from dshard.setup.auto_units import ENOUGH_BYTES, UnitSpec, find_units
from dshard.tensor import MixedShardedTensor, OffloadedShardedTensor, ShardedTensor
from dshard.tensor.meshes import TPLayout, group_of, tp_layout_of
from dshard.tensor.storage import rejoin_source
from dshard.tensor.subclass_shards import holds_packed_bits, subclass_gathers
from dshard.tensor.tp_params import local_of, shard_over
from dshard.units.context import ModelContext, UnitSettings
from dshard.units.placing import Place, PlacementFn, placed_by, places_of
from dshard.units.unit import Unit

_PLAIN_PARAMETERS = (nn.Parameter, Tensor)  # whose values are numbers


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What becomes of one parameter.

    Args:
        name: That `named_parameters()` of the module gives.
        param: As it was before.
        base: Where it goes without a strategy.
        strategy: That a rule names for it, if one does.
        precision: The dtypes on its way; None where it is an ordinary one.
    """

    name: str
    param: nn.Parameter
    base: Place
    strategy: Strategy | None
    precision: Precision | None

    @property
    def num_slices(self) -> int:
        """Number of slices in which it is gathered."""
        return self.strategy.num_slices if self.strategy is not None else 1

    def __repr__(self) -> str:
        cut = "whole" if self.base.dim is None else f"Shard({self.base.dim})"
        parts = [f"{tuple(self.param.shape)}", cut, f"over {self.base.num_ranks}"]
        parts += [str(each) for each in (self.strategy, self.precision) if each is not None]
        return f"{self.name}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class Resolver:
    """How a `fully_shard` call resolves its parameters, and those that are added to the model later.

    Args:
        mesh: Of one dim, or of two of which the first replicates.
        shard_placement_fn: As of `fully_shard`.
        averages: Whether gradients are averaged over the ranks.
        precision: In which dtypes parameters and gradients travel.
        strategies: Which strategy holds for which parameters.
    """

    mesh: DeviceMesh
    shard_placement_fn: PlacementFn | None
    averages: bool
    precision: PrecisionRules
    strategies: StrategyRules

    @property
    def group(self) -> ShardGroup:
        """The ranks of the mesh."""
        return group_of(self.mesh)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Resolver":
        return self  # a mesh is a resource, all else are choices

    def __reduce__(self) -> Any:
        fn = self.shard_placement_fn
        fn = fn if fn is None or _is_importable(fn) else _LostPlacement(repr(fn))
        return Resolver, (self.mesh, fn, self.averages, self.precision, self.strategies)

    def params(self, found: Sequence[tuple[str, nn.Parameter]]) -> list[ParamSpec]:
        """What becomes of some parameters. Communicates nothing.

        Raises:
            PlacementError, UnsupportedOpError: As `places_of`, or of what is both a subclass and offloaded. On every
                rank alike, where all were given the same.
        """
        specs = []
        for (name, param), base in zip(found, places_of(found, self.mesh, self.shard_placement_fn), strict=True):
            precision = _precision_of(self.precision, name, param)
            if subclass_gathers(param) and precision is not None and precision.offload is not None:
                raise UnsupportedOpError(
                    f"{name}: a tensor subclass with fsdp_pre_all_gather is gathered from where its shards are kept, "
                    "but offload_policy keeps them elsewhere. Leave out offload_policy for the module that holds it."
                )
            specs.append(ParamSpec(name, param, base, self.strategies.strategy_of(name), precision))
        return specs

    def units(
        self,
        specs: Iterable[ParamSpec],
        modules: Sequence[nn.Module],
        *,
        label: str,
        reshard: bool | int | None = None,
    ) -> list[UnitSpec]:
        """The units of some parameters that are used by the same modules: one for each lifetime that strategies name.

        Args:
            specs: What becomes of the parameters; where there are none, the unit is an empty one.
            modules: In whose forward they are used.
            label: Of the units.
            reshard: When they are freed after forward, where no strategy says that.
        """
        parts: dict[UnitSettings, list[nn.Parameter]] = {}
        for spec in specs:
            settings = UnitSettings(averages=self.averages, reshard_after_forward=reshard)
            if spec.strategy is not None:
                settings = settings.under(spec.strategy.on(spec.base.num_ranks).base)
            parts.setdefault(settings, []).append(spec.param)
        parts = parts or {UnitSettings(averages=self.averages, reshard_after_forward=reshard): []}
        return [UnitSpec(label, tuple(modules), tuple(own), settings) for settings, own in parts.items()]


def _precision_of(rules: PrecisionRules, name: str, param: nn.Parameter) -> Precision | None:
    """The dtypes of a parameter on its way: never a cast of bits that are no numbers.

    Raises:
        UnsupportedOpError: A policy would cast a parameter of a class of its own, and does not name it. On every rank
            alike, where all were given the same.
    """
    if subclass_gathers(param):
        return rules.precision_of_subclass(name, param.dtype)
    found = rules.precision_of(name, param.dtype)
    if found is None or found.compute is None:
        return found
    if holds_packed_bits(param):
        return Precision(offload=found.offload) if found.offload is not None else None
    kind = type(param)
    if kind not in _PLAIN_PARAMETERS and not isinstance(param, DTensor) and not rules.names(name):
        raise UnsupportedOpError(
            f"{name}: mp_policy casts values, but this parameter is a {kind.__name__}, whose bits may be no numbers "
            f"(dtype {param.dtype}, to {found.compute}). Name it in mp_policy, as in "
            f'{{"{name}": None, "*": ...}} to leave it as it is, or with a dtype to cast it all the same.'
        )
    return found


def _is_importable(function: Any) -> bool:
    """Whether pickle, which writes down a function's name, would find it again."""
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class _LostPlacement:
    """Stands for a `shard_placement_fn` that pickle could not take along."""

    was: str

    def __call__(self, param: nn.Parameter) -> Any:
        raise StateError(
            f"a parameter of shape {tuple(param.shape)}: what is added to a sharded model is placed by its "
            f"shard_placement_fn, but this model was unpickled, and {self.was} is no function that can be imported. "
            "Define it in a module, not in a function, or add the parameter ahead of pickling."
        )


def settle(specs: Sequence[ParamSpec]) -> list[Place]:
    """The place that each parameter goes to, as its strategy says.

    Raises:
        PlacementError, UnsupportedOpError: As `placed_by`. On every rank alike.

    Communicates:
        For `hybrid(k)`, the making of process groups, the first time.
    """
    return [placed_by(spec.name, spec.param, spec.base, spec.strategy) for spec in specs]


def described(specs: Sequence[ParamSpec]) -> list[str]:
    """What all ranks must have alike of the parameters themselves."""
    return [
        f"{s.name}, shape {tuple(s.param.shape)}, {s.param.dtype}{'' if s.param.requires_grad else ', frozen'}"
        for s in specs
    ]


_EXTENSION = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
Inherited = tuple[ShardedTensor, ParameterHooks, Tensor | None]


def follow_replaced(modules: Sequence[nn.Module]) -> None:
    """Take what a tied parameter became that an earlier call has replaced."""
    for root in modules:
        for module in root.modules():
            for name, param in module._parameters.items():
                if isinstance(param, Replaced):
                    module._parameters[name] = replacement_of(param)


def own_parameters(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """Parameters that no call has taken yet, each once, with the name of its first place."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    ignored_ids = {id(p) for p in ignored}
    for i, root in enumerate(modules):
        for name, param in root.named_parameters():
            if isinstance(param, ShardedTensor) or id(param) in ignored_ids or id(param) in found:
                continue
            full_name = name if len(modules) == 1 else f"[{i}].{name}"
            _check_kind(full_name, param)
            found[id(param)] = (full_name, param)
    return list(found.values())


def _check_kind(name: str, param: nn.Parameter) -> None:
    """Refuse parameters that are more than plain storage, or less."""
    if is_lazy(param):
        raise StateError(
            f"{name}: fully_shard needs parameters with a shape, but this one is not initialized yet. Run a forward of "
            "the lazy module first, or give it its sizes."
        )
    value = param.data
    local = value._local_tensor if isinstance(value, DTensor) else value
    kind = type(local)
    if kind is Tensor or (kind is AsyncCollectiveTensor):
        return
    missing = [method for method in _EXTENSION if not hasattr(local, method)]
    if missing:
        raise UnsupportedOpError(
            f"{name}: fully_shard takes plain tensors, and tensor subclasses that have {' and '.join(_EXTENSION)}, but "
            f"this parameter's data is a {kind.__name__} without {' and '.join(missing)}, whose own parts would be "
            "lost. Give the class both, shard before the conversion, or leave it out with ignored_params."
        )
    if local is not value:
        raise UnsupportedOpError(
            f"{name}: a DTensor parameter must have plain local tensors, but this one's is a {kind.__name__}. Leave it "
            "out of parallelize_module, or convert it to a plain tensor first."
        )
    if any(vars(base).get("__slots__") for base in kind.__mro__[: kind.__mro__.index(Tensor)]):
        raise UnsupportedOpError(
            f"{name}: the object of a replaced parameter stays usable, for which its class may have no __slots__, but "
            f"{kind.__name__} has. Leave them out of the class."
        )


def convert(
    modules: Sequence[nn.Module], specs: Sequence[ParamSpec], places: Sequence[Place]
) -> tuple[dict[int, ShardedTensor], list[Inherited]]:
    """Put a ShardedTensor in every place of each parameter; the old memory goes one parameter at a time.

    Returns:
        By the identity of each parameter what it has become, and what that has yet to be given of the old one.
    """
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    for root in modules:
        for module in root.modules():
            for name, param in module._parameters.items():
                if param is not None:
                    homes.setdefault(id(param), []).append((module, name))
    made: dict[int, ShardedTensor] = {}
    inherited: list[Inherited] = []
    for spec, place in zip(specs, places, strict=True):
        old: Any = spec.param
        with torch.no_grad():
            has_fields = subclass_gathers(old)
            dtypes = spec.precision
            offload = dtypes.offload if dtypes is not None else None
            device = device_of(place.mesh) if offload is None else offload.home
            kind = MixedShardedTensor if dtypes is not None and dtypes.compute is not None else ShardedTensor
            kind = kind if offload is None else OffloadedShardedTensor
            new = shard_over(old, place.mesh, place.dim, name=spec.name, device=device, kind=kind)
            new.wire_precision, new.plain_class = dtypes, type(old)
            torch.Tensor.requires_grad_(new, old.requires_grad)
            new._is_param = True
        if spec.strategy is not None:
            new.base_place = spec.base.mesh, spec.base.dim
        if not has_fields:
            for key, value in old.__dict__.items():
                new.__dict__.setdefault(key, value)
        hooks, grad = hooks_of(old), old.grad
        for module, attribute in dict.fromkeys(homes[id(old)]):
            module._parameters[attribute] = new  # type: ignore[assignment]
        for module, _ in homes[id(old)]:
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters = keep_apart  # type: ignore[method-assign]
                module._init_flat_weights()  # a list of its own, which a copy or pickle would take along
        retire(old, new)
        made[id(old)] = new
        inherited.append((new, hooks, grad))
    return made, inherited


def keep_apart() -> None:
    """Takes the place of `flatten_parameters` of recurrent modules: cuDNN cannot join the memory of sharded weights."""


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device of this rank in a mesh: the current one of its kind."""
    if mesh.device_type in ("cpu", "meta"):
        return torch.device(mesh.device_type)
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def move_buffers(modules: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Move buffers to the device of the mesh, except those on the meta device."""
    device = device_of(mesh)
    for root in modules:
        for module in root.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device.type != device.type:
                    module._buffers[name] = buffer.to(device)


def compare_parameters(
    modules: Sequence[nn.Module],
    specs: Sequence[ParamSpec],
    places: Sequence[Place],
    group: ShardGroup,
    sync: Literal["check", "broadcast"] | None,
) -> None:
    """Compare what ranks hold before it is cut, or give them what the first of them holds.

    The ranks of a parameter's mesh must hold the same, of a DTensor the same local tensor. What is replicated over the
    mesh of DTensors in the same model must be equal over that, too: their replicated ones, and plain parameters.

    Args:
        modules: What is sharded.
        specs: The parameters that are taken, which all ranks of `group` have alike.
        places: Where each goes.
        group: The ranks of the mesh that the call was given.
        sync: As of `fully_shard`.

    Raises:
        DivergenceError: They differ. On every rank alike.

    Communicates:
        For each other mesh and each dim of a DTensor's an all-reduce of 16 bytes; for each mesh one of 16 bytes per
        parameter, or a broadcast of the weights.
    """
    parts: dict[str, tuple[ShardGroup, list[tuple[str, Tensor]]]] = {group.full_name: (group, [])}
    for spec, place in zip(specs, places, strict=True):
        own = group_of(place.mesh)
        parts.setdefault(own.full_name, (own, []))[1].append((spec.name, _compared(spec.param)))
    for inner, axis, own in _inner_axes(modules, specs, places):
        alike = [(spec.name, _compared(spec.param)) for spec in specs if _is_replicated(spec.param, inner, axis)]
        parts[f"replicated over {own.full_name}"] = own, alike
    for own, tensors in parts.values():
        if own is not group:
            check_same_structure(tensors, own)
        if sync == "check":
            check_same_weights(tensors, own)
        elif sync == "broadcast":
            broadcast_weights(tensors, own)


def groups_cut_over(
    modules: Sequence[nn.Module], specs: Sequence[ParamSpec], places: Sequence[Place]
) -> list[ShardGroup]:
    """The ranks over which layers of some modules are cut, along each dim of their meshes."""
    return list({own.full_name: own for _, _, own in _inner_axes(modules, specs, places)}.values())


def _compared(param: Tensor) -> Tensor:
    """What is compared of a parameter: its local tensor, and whether it takes a gradient."""
    return local_of(param).requires_grad_(param.requires_grad)


def _inner_axes(
    modules: Sequence[nn.Module], specs: Sequence[ParamSpec], places: Sequence[Place]
) -> Iterator[tuple[TPLayout, int, ShardGroup]]:
    """Each dim, besides data parallelism's, of the meshes over which DTensors of some modules lie, and its ranks.

    The DTensors are sharded by now or not; of those that lie over one mesh the first stands for all.
    """
    inners: dict[object, TPLayout] = {}
    meshes = {id(spec.param): place.mesh for spec, place in zip(specs, places, strict=True)}
    for param in [p for module in modules for p in module.parameters()]:
        inner = None
        if isinstance(param, ShardedTensor):
            inner = tp_layout_of(param.shard_layout)
        elif isinstance(param, DTensor) and id(param) in meshes:
            inner = TPLayout(param.device_mesh, tuple(param.placements), tuple(param.shape), meshes[id(param)])
        if inner is not None:
            inners.setdefault(inner.mesh, inner)
    for inner in inners.values():
        axes = [dim for dim in range(inner.mesh.ndim) if dim not in inner.data_dims]
        for axis, (_, own) in zip(axes, inner.axes, strict=True):
            yield inner, axis, own


def _is_replicated(param: Tensor, inner: TPLayout, axis: int) -> bool:
    """Whether ranks along a dim of a DTensors' mesh hold the same of a parameter."""
    if not isinstance(param, DTensor):
        return True
    return param.device_mesh == inner.mesh and isinstance(param.placements[axis], Replicate)


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
    resolver = replace(resolver, strategies=context.settings.strategies.over(resolver.strategies))  # set since
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
    unit.reshard()
    context.units.remove(unit)
    root.__dict__["_dshard_units"].remove(unit)
    specs = [replace(plan, settings=unit.settings) for plan in plans]
    root.__dict__.setdefault("_dshard_formed", []).extend(install(specs, context.get(Runtime), {}))
