"""The short way for an optimizer's step: elementwise operations whose operands all lie alike.

What the general rules ask of each operand (is it shared? does it differ between ranks?) has one answer for all
operands of a step, so here only their layouts are looked at. Whatever is unusual goes the general way.
"""

from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import increment_version

from dshard.tensor.operands import prepare_writes
from dshard.tensor.sharded_tensor import SHARDED, ShardedTensor
from dshard.tensor.table import Args, Kwargs


def _shard_like(value: ShardedTensor, target: ShardedTensor) -> Tensor | None:
    """The shard of `value` if it lies as `target` does and is at hand, else None."""
    storage, own = value.shard_storage, target.shard_storage
    if value._view is not None or storage.is_pending:
        return None
    if storage.layout is not own.layout and storage.layout != own.layout:
        return None
    if (
        value.shard_group is not target.shard_group
        and value.shard_group.process_group is not target.shard_group.process_group
    ):
        return None
    return storage.tensor


def _local_arguments(args: Args, target: ShardedTensor) -> list[Any] | None:
    """`args` with shards in the place of sharded tensors; None if one lies otherwise."""
    local = []
    for value in args:
        if type(value) in SHARDED:
            value = _shard_like(value, target)
            if value is None:
                return None
        elif isinstance(value, Tensor) and value.dim() > 0:
            return None
        local.append(value)
    return local


def step_pointwise_inplace(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """`add_`, `lerp_`, `addcdiv_` and their kind; NotImplemented for the general way."""
    target = args[0]
    if type(target) not in SHARDED:
        return NotImplemented
    local = _local_arguments(args, target)
    if local is None:
        return NotImplemented
    for value in kwargs.values():
        if isinstance(value, Tensor):
            return NotImplemented
    local[0] = target.shard_storage.writable()
    func(*local, **kwargs)
    increment_version(local[0])
    return target


def step_pointwise(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """`sqrt`, `div` and their kind; NotImplemented for the general way."""
    target = next((a for a in args if type(a) in SHARDED), None)
    if target is None or any(isinstance(v, Tensor) for v in kwargs.values()):
        return NotImplemented
    local = _local_arguments(args, target)
    if local is None:
        return NotImplemented
    result = func(*local, **kwargs)
    return target.like(result) if isinstance(result, Tensor) else NotImplemented


def step_foreach_inplace(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """`_foreach_mul_`, `_fused_adamw_` and their kind; NotImplemented for the general way."""
    targets = args[0]
    new_args: list[Any] = []
    for arg in args:
        if not isinstance(arg, (list, tuple)) or not arg or not isinstance(arg[0], Tensor):
            if isinstance(arg, ShardedTensor):
                return NotImplemented
            new_args.append(arg)
            continue
        local = []
        for value, target in zip(arg, targets, strict=True):
            if type(value) in SHARDED:
                shard = _shard_like(value, target) if type(target) in SHARDED else None
                if shard is None:
                    return NotImplemented
                local.append(shard)
            elif type(target) in SHARDED and value.dim() > 0:
                return NotImplemented
            else:
                local.append(value)
        new_args.append(local)
    for value in kwargs.values():
        if isinstance(value, (list, tuple, ShardedTensor)):
            return NotImplemented
    prepare_writes(func, args, kwargs)
    func(*new_args, **kwargs)
    _note_writes(func, args, new_args)
    return None


def _note_writes(func: OpOverload, args: Args, new_args: list[Any]) -> None:
    """Count the writes to every list that `func` changes."""
    for k, argument in enumerate(func._schema.arguments[: len(args)]):
        if argument.alias_info is None or not argument.alias_info.is_write or not args[k]:
            continue
        written = [t for t in args[k] if type(t) in SHARDED]
        increment_version(new_args[k])
        if written:
            increment_version(written)
