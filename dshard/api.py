"""`fully_shard` and its companions."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dshard import collectives
from dshard.collectives import ShardGroup
from dshard.errors import PlacementError, StateError, UnsupportedOpError
from dshard.runtime import (
    ParameterHooks,
    ReplacedParameter,
    Runtime,
    Unit,
    broadcast_weights,
    check_same_structure,
    check_same_weights,
    find_units,
    hook_forward,
    hooks_of,
    inherit,
    retire,
)
from dshard.runtime.module import FSDPModule, sharded_class, units_of
from dshard.tensor import ShardedTensor

__all__ = ["fully_shard", "gathered"]

Inherited = tuple[ShardedTensor, ParameterHooks, Tensor | None]
PlacementFn = Callable[[nn.Parameter], Placement | None]


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
) -> Any:
    """Shard the parameters of a module over the ranks of a mesh, in place.

    Every parameter becomes a `ShardedTensor`: each rank keeps one shard of it, and it means its full value wherever
    it is used. The parameters that one call takes form a *unit*, which is gathered at the first touch of any of
    them and freed after the module's forward, and again in backward; their gradients are reduce-scattered once per
    backward. Call it bottom-up on blocks and then on the root, as with FSDP2, or on the root alone: then units are
    formed at the first use.

    Args:
        module: A module, or several that are gathered together.
        mesh: One-dimensional device mesh; by default all ranks.
        reshard_after_forward: Whether the unit is freed between forward and backward, and gathered again. None
            means True, except for what stays with the root. 1 and the mesh's size are accepted for False and True.
        shard_placement_fn: Gives each parameter's placement: `Shard(dim)`, `Replicate()`, or None for `Shard(0)`.
            Uneven dims are padded on the wire alone.
        mp_policy: Only torch's or our default, which changes no dtype.
        offload_policy: Only the default, which offloads nothing.
        ignored_params: Parameters to leave alone: not sharded, not moved, their gradients not reduced.
        dp_mesh_dims: Not supported yet.
        sync: What to do about initial weights that differ between ranks: raise and name them, take those of rank 0, or
            trust.
        grad_reduce: Whether gradients are averaged over the ranks or added.

    Returns:
        `module` itself, whose class is now a subclass of `FSDPModule` too.

    Raises:
        PlacementError: A placement that a parameter cannot have. On every rank alike.
        DivergenceError: The ranks hold different models or weights. On every rank alike.
        StateError: No process group, or a module that cannot be sharded. On every rank alike.
        UnsupportedOpError: An option that is not supported yet.

    Communicates:
        With `sync="check"` an all-reduce of 16 bytes per parameter, with "broadcast" a broadcast of all weights;
        always an all-reduce of 16 bytes that compares names and shapes.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_options(modules, mp_policy, offload_policy, dp_mesh_dims, sync, grad_reduce)
    mesh = mesh if mesh is not None else _default_mesh()
    if mesh.ndim != 1:
        raise UnsupportedOpError(
            f"fully_shard: the mesh must have one dim, but it has {mesh.ndim} (shape {tuple(mesh.shape)}). Pass one of "
            "its dims, as in mesh['dp']."
        )
    reshard = _reshard_flag(reshard_after_forward, mesh)
    group = ShardGroup(mesh.get_group(), torch.device(mesh.device_type))
    _follow_replaced(modules)
    found = _own_parameters(modules, ignored_params or set())
    check_same_structure(found, group)
    if sync == "check":
        check_same_weights(found, group)
    elif sync == "broadcast":
        broadcast_weights([p for _, p in found], group)
    params, inherited = _replace_all(modules, found, mesh, shard_placement_fn)
    _move_buffers(modules, mesh)
    runtime = _joined_runtime(modules)
    _install(modules, params, runtime, reshard).averages = grad_reduce == "mean"
    for heir in inherited:
        inherit(*heir, mean=grad_reduce == "mean")
    runtime.note_plain_parameters(modules)
    return module


def _check_options(
    modules: Sequence[nn.Module], mp_policy: Any, offload_policy: Any, dp_mesh_dims: Any, sync: Any, grad_reduce: Any
) -> None:
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
    if mp_policy is not None and any(
        getattr(mp_policy, f, None) is not None for f in ("param_dtype", "reduce_dtype", "output_dtype")
    ):
        raise UnsupportedOpError(
            f"fully_shard: mixed precision is not supported yet, but mp_policy is {mp_policy}. Convert the model with "
            ".to(dtype), or use torch.autocast."
        )
    if offload_policy is not None and type(offload_policy).__name__ != "OffloadPolicy":
        raise UnsupportedOpError(
            f"fully_shard: offload is not supported yet, but offload_policy is {offload_policy}. Leave it out."
        )
    if dp_mesh_dims is not None:
        raise UnsupportedOpError("fully_shard: dp_mesh_dims is not supported yet. Pass a one-dimensional mesh.")
    for name, value, allowed in (
        ("sync", sync, ("check", "broadcast", None)),
        ("grad_reduce", grad_reduce, ("mean", "sum")),
    ):
        if value not in allowed:
            raise StateError(f"fully_shard: {name} must be one of {allowed}, but it is {value!r}.")


def _default_mesh() -> DeviceMesh:
    if not collectives.is_initialized() and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise StateError(
            "fully_shard: needs a process group, but torch.distributed is not initialized. Start with torchrun, or "
            "call torch.distributed.init_process_group first."
        )
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if collectives.is_initialized():
        if collectives.default_backend() == "gloo":
            device_type = "cpu"
        return init_device_mesh(device_type, (collectives.world_size(),))
    return init_device_mesh(device_type, (int(os.environ["WORLD_SIZE"]),))


def _reshard_flag(value: bool | int | None, mesh: DeviceMesh) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int) or value < 1:
        raise StateError(
            f"fully_shard: reshard_after_forward must be a bool, a number of ranks or None, but it is {value!r}. Pass "
            "True."
        )
    if value in (1, mesh.size()):
        return value != 1
    raise UnsupportedOpError(
        f"fully_shard: reshard_after_forward as a number of ranks other than 1 and the mesh's size ({mesh.size()}) is "
        f"not supported yet, but it is {value}. Pass True or False."
    )


def _follow_replaced(modules: Sequence[nn.Module]) -> None:
    """Where a tied parameter was replaced by an earlier call, take what it became."""
    for root in modules:
        for module in root.modules():
            for name, param in module._parameters.items():
                if isinstance(param, ReplacedParameter):
                    module._parameters[name] = param._replacement  # type: ignore[assignment]


def _own_parameters(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """Parameters that no call has taken yet, each once, with the name of its first place."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    ignored_ids = {id(p) for p in ignored}
    for i, root in enumerate(modules):
        for name, param in root.named_parameters():
            if isinstance(param, ShardedTensor) or id(param) in ignored_ids or id(param) in found:
                continue
            full_name = name if len(modules) == 1 else f"[{i}].{name}"
            if isinstance(param, DTensor):
                raise UnsupportedOpError(
                    f"{full_name}: fully_shard takes plain parameters for now, but this is a DTensor with placements "
                    f"{param.placements}. Shard it before parallelize_module, or leave it out with ignored_params."
                )
            found[id(param)] = (full_name, param)
    return list(found.values())


def _dim_of(name: str, param: nn.Parameter, shard_placement_fn: PlacementFn | None) -> int | None:
    placement = shard_placement_fn(param) if shard_placement_fn is not None else None
    if placement is None:
        placement = Shard(0)
    if isinstance(placement, Replicate) or param.dim() == 0:
        return None
    dim = placement.dim if type(placement) is Shard else None
    if dim is None or not -param.dim() <= dim < param.dim():
        raise PlacementError(
            f"{name}: shard_placement_fn must return Shard of one of its {param.dim()} dims, Replicate() or None, but "
            f"it returned {placement} (shape {tuple(param.shape)}). Return Shard(0)."
        )
    return dim % param.dim()


def _replace_all(
    modules: Sequence[nn.Module],
    found: Sequence[tuple[str, nn.Parameter]],
    mesh: DeviceMesh,
    shard_placement_fn: PlacementFn | None,
) -> tuple[list[ShardedTensor], list["Inherited"]]:
    """Put a ShardedTensor in every place of each parameter; the old memory goes one parameter at a time."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for root in modules:
        for module in root.modules():
            for name, param in module._parameters.items():
                if param is not None:
                    places.setdefault(id(param), []).append((module, name))
    dims = [_dim_of(name, param, shard_placement_fn) for name, param in found]
    device = _device_of(mesh)
    made: list[ShardedTensor] = []
    inherited: list[Inherited] = []
    for (name, old), dim in zip(found, dims, strict=True):
        with torch.no_grad():
            new = ShardedTensor.shard(old, mesh, dim, name=name, device=device)
            torch.Tensor.requires_grad_(new, old.requires_grad)
            new._is_param = True
        for key, value in old.__dict__.items():
            new.__dict__.setdefault(key, value)
        hooks, grad = hooks_of(old), old.grad
        for module, attribute in dict.fromkeys(places[id(old)]):
            module._parameters[attribute] = new  # type: ignore[assignment]
        retire(old, new)
        made.append(new)
        inherited.append((new, hooks, grad))
    return made, inherited


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _move_buffers(modules: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    device = _device_of(mesh)
    for root in modules:
        for module in root.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device.type != device.type:
                    module._buffers[name] = buffer.to(device)


def _joined_runtime(modules: Sequence[nn.Module]) -> Runtime:
    """One runtime for everything below: units that earlier calls made join it."""
    runtime = Runtime()
    for root in modules:
        for unit in units_of(root):
            if isinstance(unit.observer, Runtime):
                unit.observer.split = None
            runtime.adopt(unit)
    return runtime


def _install(
    modules: Sequence[nn.Module], params: Sequence[ShardedTensor], runtime: Runtime, reshard: bool | None
) -> Unit:
    """Make the unit, hook the modules, and leave it to the first use to split what is a whole model."""
    is_first = not runtime.units
    label = type(modules[0]).__name__
    unit = Unit(params, modules, label=label, reshard_after_forward=reshard, observer=runtime)
    runtime.adopt(unit)
    for module in modules:
        module.__class__ = sharded_class(type(module))  # type: ignore[arg-type]
        _attach(module, unit)
    unit.modules = [m for module in modules for m in _with_forward(module)]
    for module in unit.modules:
        if module not in modules:
            _attach(module, unit)
    if len(modules) == 1:
        runtime.root = modules[0]
        _rename(modules[0])
        if is_first:
            runtime.split = partial(_split, runtime, unit)
    return unit


def _with_forward(module: nn.Module) -> list[nn.Module]:
    """`module` itself, or for a container without a forward the modules in it that are called."""
    if type(module).forward is not nn.Module.forward:
        return [module]
    return [m for child in module.children() for m in _with_forward(child)]


def _attach(module: nn.Module, unit: Unit) -> None:
    """Tie a unit to a module's forward."""
    units = module.__dict__.get("_dshard_units")
    if units is None:
        module.__dict__["_dshard_units"] = [unit]
        hook_forward(module)
    else:
        units.append(unit)


def _rename(root: nn.Module) -> None:
    """Name parameters and units as the outermost module knows them."""
    for name, param in root.named_parameters():
        if isinstance(param, ShardedTensor):
            param._name = name
    names = {id(m): name for name, m in root.named_modules()}
    for unit in units_of(root):
        known = [names[id(m)] for m in unit.modules if id(m) in names]
        if known and root not in unit.modules:
            unit.label = known[0] if len(known) == 1 else f"{known[0]}..{known[-1]}"


def _split(runtime: Runtime, unit: Unit) -> None:
    """Cut the one unit of a model whose root alone was sharded into good ones."""
    root = runtime.root
    assert root is not None
    plans = find_units(root, unit.params, unit.label)
    if len(plans) < 2:
        return
    unit.free()
    runtime.units.remove(unit)
    root.__dict__["_dshard_units"].remove(unit)
    for plan in plans:
        part = Unit(
            plan.params,
            plan.modules,
            label=plan.label,
            reshard_after_forward=unit.reshard_after_forward,
            observer=runtime,
        )
        part.requires_sync, part.averages = unit.requires_sync, unit.averages
        runtime.adopt(part)
        for module in plan.modules:
            _attach(module, part)
    if not root.__dict__["_dshard_units"]:
        # Nothing stays with the root itself, but its forward's end is where everything is freed.
        _attach(root, Unit([], [root], label=unit.label, reshard_after_forward=True, observer=runtime))


@contextmanager
def gathered(target: nn.Module | ShardedTensor | Sequence[ShardedTensor]) -> Iterator[dict[str, Tensor]]:
    """Hold the full values of parameters for the length of a scope.

    Inside, no use of them gathers again, and `data_ptr()` of a parameter is the address of its full value.

        with dshard.gathered(model) as full:
            torch.save(full, "weights.pt")

    Args:
        target: A sharded module (all parameters of it), a parameter, or several.

    Yields:
        Name to full value, plain tensors that must not be written to; write to the parameters themselves.

    Raises:
        StateError: `target` holds nothing that is sharded; or, at the end, a full value was written to.

    Communicates:
        One all-gather per bucket of each unit that is not gathered yet, at the start.
    """
    params = _sharded_params(target)
    if not params:
        raise StateError("gathered: needs sharded parameters, but got none. Call fully_shard first.")
    for param in params:
        if isinstance(param._source, Unit):
            param._source.observer.before_use()
    units = list(dict.fromkeys(p._source for p in params if isinstance(p._source, Unit)))
    try:
        for unit in units:
            unit.num_pins += 1
            unit.gather()
        with torch.no_grad():
            fulls = {p.name: p.materialize() for p in params}
        alone = {p.name for p in params if p._group.num_ranks == 1}  # there, the full value is the shard itself
        versions = {name: full._version for name, full in fulls.items() if name not in alone}
        yield fulls
        written = [name for name, version in versions.items() if fulls[name]._version != version]
        if written:
            raise StateError(
                f"{written[0]}: what gathered() yields must not be written to, but it was; that write is lost. Write "
                "to the parameter itself, as in module.weight.zero_()."
            )
    finally:
        for unit in units:
            unit.num_pins -= 1
            unit.free()


def _sharded_params(target: Any) -> list[ShardedTensor]:
    if isinstance(target, nn.Module):
        return [p for p in target.parameters() if isinstance(p, ShardedTensor)]
    items = [target] if isinstance(target, Tensor) else list(target)
    found = [p for p in items if isinstance(p, ShardedTensor)]
    wrong = [type(p).__name__ for p in items if not isinstance(p, ShardedTensor)]
    if wrong:
        raise StateError(f"gathered: needs sharded parameters, but got {', '.join(wrong)}. Call fully_shard first.")
    return found
