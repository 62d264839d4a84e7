"""Parameters of a module become sharded ones, in every place where they stand."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.parameter import is_lazy

from dshard.errors import PlacementError, StateError, UnsupportedOpError
from dshard.runtime.replace import ParameterHooks, ReplacedParameter, hooks_of, retire
from dshard.tensor import ShardedTensor

__all__ = ["Inherited", "PlacementFn", "follow_replaced", "move_buffers", "own_parameters", "replace_all"]

Inherited = tuple[ShardedTensor, ParameterHooks, Tensor | None]
PlacementFn = Callable[[nn.Parameter], Placement | None]


def follow_replaced(modules: Sequence[nn.Module]) -> None:
    """Where a tied parameter was replaced by an earlier call, take what it became."""
    for root in modules:
        for module in root.modules():
            for name, param in module._parameters.items():
                if isinstance(param, ReplacedParameter):
                    module._parameters[name] = param._replacement  # type: ignore[assignment]


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
            if isinstance(param, DTensor):
                raise UnsupportedOpError(
                    f"{full_name}: fully_shard takes plain parameters for now, but this is a DTensor with placements "
                    f"{param.placements}. Shard it before parallelize_module, or leave it out with ignored_params."
                )
            found[id(param)] = (full_name, param)
    return list(found.values())


def _check_kind(name: str, param: nn.Parameter) -> None:
    """Refuse parameters that are more than plain storage, or less."""
    if is_lazy(param):
        raise StateError(
            f"{name}: fully_shard needs parameters with a shape, but this one is not initialized yet. Run a forward of "
            "the lazy module first, or give it its sizes."
        )
    kind = type(param.data)
    if kind is not Tensor and not issubclass(kind, DTensor):
        raise UnsupportedOpError(
            f"{name}: fully_shard takes plain tensors, but this parameter's data is a {kind.__name__}, whose own parts "
            "would be lost. Shard before the conversion, or leave it out with ignored_params."
        )


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


def replace_all(
    modules: Sequence[nn.Module],
    found: Sequence[tuple[str, nn.Parameter]],
    mesh: DeviceMesh,
    shard_placement_fn: PlacementFn | None,
) -> tuple[list[ShardedTensor], list[Inherited]]:
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
        for module, _ in places[id(old)]:
            if isinstance(module, nn.RNNBase):
                module._init_flat_weights()  # a list of its own, which a copy or pickle would take along
        retire(old, new)
        made.append(new)
        inherited.append((new, hooks, grad))
    return made, inherited


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def move_buffers(modules: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Move buffers to the device of the mesh, except those on the meta device."""
    device = _device_of(mesh)
    for root in modules:
        for module in root.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device.type != device.type:
                    module._buffers[name] = buffer.to(device)
