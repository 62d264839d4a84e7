"""`fully_shard` and its companions."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dshard import collectives
from dshard.collectives import ShardGroup
from dshard.errors import StateError, UnsupportedOpError
from dshard.runtime.buffers import broadcast_buffers, check_buffers
from dshard.runtime.convert import PlacementFn, follow_replaced, move_buffers, own_parameters, replace_all
from dshard.runtime.install import Conversion, install, joined_runtime, take_in
from dshard.runtime.module import FSDPModule
from dshard.runtime.replace import inherit
from dshard.runtime.sync import broadcast_weights, check_same_structure, check_same_weights

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
    memory_budget: int | Literal["auto"] | None = None,
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
        buffers: "leave" leaves them to each rank, as FSDP2 does; "check" raises if they differ now; "broadcast" takes
            those of rank 0 now and at the start of every training forward, as DDP does.
        memory_budget: Bytes of gathered copies that may stay between forward and backward, for the whole model; in
            the place of `reshard_after_forward=None`. Those that the backward uses last go first. 0 gathers every
            unit twice a step, the model's size once. "auto" takes four fifths of what is free on the rank that has
            the least, when the first step is over.

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
    _check_options(modules, mp_policy, offload_policy, dp_mesh_dims)
    _check_choice("sync", sync, ("check", "broadcast", None))
    _check_choice("grad_reduce", grad_reduce, ("mean", "sum"))
    _check_choice("buffers", buffers, ("leave", "broadcast", "check"))
    _check_budget(memory_budget)
    mesh = mesh if mesh is not None else _default_mesh()
    _check_mesh(mesh)
    reshard = _reshard_flag(reshard_after_forward, mesh)
    group = ShardGroup(mesh.get_group(), torch.device(mesh.device_type))
    follow_replaced(modules)
    found = own_parameters(modules, ignored_params or set())
    check_same_structure(found, group)
    if sync == "check":
        check_same_weights(found, group)
    elif sync == "broadcast":
        broadcast_weights([p for _, p in found], group)
    conversion = Conversion(mesh, group, shard_placement_fn, averages=grad_reduce == "mean")
    params, inherited = replace_all(modules, found, mesh, shard_placement_fn)
    move_buffers(modules, mesh)
    runtime = joined_runtime(modules)
    if memory_budget is not None:
        runtime.memory_budget = memory_budget
    install(modules, params, runtime, reshard).averages = conversion.averages
    for heir in inherited:
        inherit(*heir, mean=conversion.averages)
    runtime.late.note(modules, partial(take_in, runtime, conversion))
    if buffers == "check":
        check_buffers(modules, group)
    elif buffers == "broadcast":
        broadcast_buffers(modules, group)
        runtime.sync_buffers.append(partial(broadcast_buffers, modules, group))
    return module


def _check_options(modules: Sequence[nn.Module], mp_policy: Any, offload_policy: Any, dp_mesh_dims: Any) -> None:
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


def _check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise StateError(f"fully_shard: {name} must be one of {allowed}, but it is {value!r}. Pass one of them.")


def _check_budget(value: Any) -> None:
    if value is not None and value != "auto" and (type(value) is not int or value < 0):
        raise StateError(
            f"fully_shard: memory_budget must be a number of bytes, 'auto' or None, but it is {value!r}. Pass 0 to "
            "keep nothing."
        )


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise UnsupportedOpError(
            f"fully_shard: the mesh must have one dim, but it has {mesh.ndim} (shape {tuple(mesh.shape)}). Pass one of "
            "its dims, as in mesh['dp']."
        )


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
