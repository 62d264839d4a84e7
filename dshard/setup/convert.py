"""Parameters of a module become sharded ones, in every place where they stand."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from dshard.errors import StateError, UnsupportedOpError
from dshard.optimizer.replace import ParameterHooks, Replaced, hooks_of, replacement_of, retire
from dshard.setup.specs import ParamSpec
from dshard.tensor import MixedShardedTensor, OffloadedShardedTensor, ShardedTensor
from dshard.tensor.subclass_shards import subclass_gathers
from dshard.tensor.tp_params import shard_over
from dshard.units.placing import Place

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
