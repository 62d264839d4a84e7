"""Parameters take another dtype, device or memory format, shard by shard, and stay the objects that they are."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from dshard.errors import StateError
from dshard.gradients.hook import hook_gradient
from dshard.gradients.reducer import Reducer
from dshard.tensor import MixedShardedTensor, OffloadedShardedTensor, ShardedTensor
from dshard.tensor.subclass_shards import holds_packed_bits
from dshard.units.unit import Unit


def forget_flat_weights(module: nn.Module) -> list[nn.RNNBase]:
    """Empty the lists of parameters that recurrent modules keep: weak references in them prevent a swap."""
    recurrent = [child for child in module.modules() if isinstance(child, nn.RNNBase)]
    for rnn in recurrent:
        rnn.__dict__.update(_flat_weights=[], _flat_weight_refs=[])
    return recurrent


def allocate(module: nn.Module, devices: Mapping[str, torch.device]) -> None:
    """Give memory to those of some sharded parameters and buffers that are on the meta device.

    Args:
        module: A sharded module, or one that holds some.
        devices: By name, the device for a buffer; a parameter goes to the device of its mesh.
    """
    recurrent = forget_flat_weights(module)
    for name, param in module.named_parameters(remove_duplicate=False):
        if isinstance(param, ShardedTensor) and param.is_meta and name in devices:
            home = param.offload.home if param.offload is not None else param.shard_group.device_type
            convert(param, partial(torch.empty_like, device=home))
    buffers = list(module.named_buffers(remove_duplicate=False))
    made = {id(b): torch.empty_like(b, device=devices[name]) for name, b in buffers if b.is_meta and name in devices}
    for name, buffer in buffers:
        if id(buffer) in made:  # under all of its names
            owner, _, attribute = name.rpartition(".")
            module.get_submodule(owner)._buffers[attribute] = made[id(buffer)]
    for rnn in recurrent:
        rnn._init_flat_weights()


def convert(param: ShardedTensor, fn: Callable[[Tensor], Tensor]) -> None:
    """Apply a conversion to a sharded parameter and its gradient, keeping the parameter object."""
    with torch.no_grad():
        shard = fn(param.shard_storage.resolve())
        if shard is param.shard_storage.resolve():
            return
        if shard.dtype != param.storage_dtype and holds_packed_bits(param):
            shard = param.shard_storage.resolve().to(shard.device)  # a cast would take its bits for numbers
            if shard is param.shard_storage.resolve():
                return
        shard = _at_home(param, shard)
        grad, param.grad = param.grad, None
        grad_shard = grad.shard_storage.resolve() if isinstance(grad, ShardedTensor) else None
        stride = _stride_of_format(param, shard)
        new = param.like(shard.contiguous(), stride=stride)
        new.shard_storage.is_shared = True
        if new.device == param.device:
            param.data = new
        else:
            _swap(param, type(param).wrap(new.shard_storage, new._spec, new.shard_group, name=new.given_name))
        _follow_dtype(param)
        unit = param.gather_source
        if isinstance(unit, Unit):
            unit.model.get(Reducer).forget(unit)
        if isinstance(grad, ShardedTensor) and grad_shard is not None:
            param.grad = grad.like(fn(grad_shard).contiguous(), stride=stride)
            param.grad.shard_storage.is_shared = True


def _follow_dtype(param: ShardedTensor) -> None:
    """What a policy asks for is another dtype than the parameter's own now, or no longer is."""
    precision = param.wire_precision
    if precision is None or not param.storage_dtype.is_floating_point:
        return
    changed = precision.for_dtype(param.storage_dtype)
    if changed == precision:
        return
    param.wire_precision, param.known_views = changed, None
    if type(param) is not OffloadedShardedTensor:
        param.__class__ = ShardedTensor if changed.compute is None else MixedShardedTensor
    if isinstance(param.gather_source, Unit):
        param.gather_source.restart()
        param.gather_source.model.forwards.on_dtypes()


def _at_home(param: ShardedTensor, shard: Tensor) -> Tensor:
    """The converted shard of an offloaded parameter, which stays where it is kept; memory it gets there alone.

    Raises:
        StateError: It was to be moved to another device. On every rank alike.
    """
    offload = param.offload
    if offload is None or shard.device.type in (offload.home.type, "meta"):
        return shard
    if param.is_meta:
        return torch.empty_like(shard, device=offload.home)
    raise StateError(
        f"{param.name}: an offloaded parameter stays on {offload.home} and is copied to {offload.compute} for its use, "
        f"but it was moved to {shard.device}. Leave the move out, for fully_shard has moved the buffers; to keep "
        f"parameters on {shard.device}, leave out offload_policy."
    )


def _stride_of_format(param: ShardedTensor, shard: Tensor) -> tuple[int, ...] | None:
    """Strides of the full tensor if its shard was converted to another memory format, else None."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if shard.dim() not in formats or shard.is_contiguous():
        return None
    return torch.empty(param.shape, device="meta").to(memory_format=formats[shard.dim()]).stride()


def _swap(param: ShardedTensor, new: ShardedTensor) -> None:
    """Give a parameter object the metadata of a tensor on another device."""
    if param.grad_hook_handle is not None:
        param.grad_hook_handle.remove()
        param.grad_hook_handle = None
    attributes = {**param.__dict__, "shard_storage": new.shard_storage, "known_views": None}
    requires_grad = param.requires_grad
    try:
        torch.utils.swap_tensors(param, new)
    except RuntimeError as error:
        reason = str(error).rstrip(".")
        raise StateError(
            f"{param.name}: a parameter can move to another device only while nothing else refers to it, but torch "
            f"says: {reason}. Move the module while no views of its parameters and no weak references to them are kept."
        ) from error
    param.__dict__.clear()
    param.__dict__.update(attributes)
    torch.Tensor.requires_grad_(param, requires_grad)
    hook_gradient(param)
