"""What becomes of the parameters that `fully_shard` replaces, and of optimizers that hold them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from dshard.collectives import ReduceBucket
from dshard.layout import BucketLayout
from dshard.tensor import ShardedTensor
from dshard.tensor.cell import ShardCell

__all__ = [
    "ParameterHooks",
    "ReplacedParameter",
    "hooks_of",
    "inherit",
    "repoint_optimizer",
    "retire",
]

_ACCESSORS = frozenset(["__get__", "__set__", "__delete__"])  # of properties such as `grad`


class ReplacedParameter(nn.Parameter):
    """A parameter that `fully_shard` replaced: every use is a use of the ShardedTensor that took its place.

    Modules, optimizers and users may have kept the object; only `is` tells it from its replacement.
    """

    _replacement: ShardedTensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _followed((args, kwargs or {}))
        if func.__name__ in _ACCESSORS:
            return _access(func, *args)
        method = getattr(ShardedTensor, func.__name__, None)
        if method is not func and getattr(torch.Tensor, func.__name__, None) is func:
            func = method  # one that ShardedTensor has of its own
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replacement, name)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ReplacedParameter(now {self._replacement!r})"

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._replacement, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (self._replacement,)


def _itself(param: ShardedTensor) -> ShardedTensor:
    """Unpickle: the replacement, the same object as elsewhere in the pickle."""
    return param


def _access(func: Any, target: Any, *rest: Any) -> Any:
    """Get, set or delete a property of a tensor, by the class's own where it has one."""
    name = func.__self__.__name__
    if func.__name__ == "__get__":
        return getattr(target, name)
    if func.__name__ == "__set__":
        return setattr(target, name, *rest)
    return delattr(target, name)


def _followed(value: Any) -> Any:
    """Arguments with what took the place of the replaced parameters in them."""
    if isinstance(value, ReplacedParameter):
        return value._replacement
    if isinstance(value, dict):
        return {key: _followed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_followed(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def retire(old: nn.Parameter, new: ShardedTensor) -> None:
    """Free the memory of `old` and turn it into a `ReplacedParameter`, for whoever kept it."""
    old.grad = None
    old.requires_grad = False
    old.data = torch.empty(0, dtype=old.dtype, device=old.device)
    old.__class__ = ReplacedParameter
    old.__dict__["_replacement"] = new


@dataclass(frozen=True, slots=True)
class ParameterHooks:
    """What a user registered on a parameter.

    Args:
        on_gradient: By `register_hook`.
        after_accumulation: By `register_post_accumulate_grad_hook`.
    """

    on_gradient: tuple[Callable[[Tensor], Any], ...]
    after_accumulation: tuple[Callable[[Tensor], Any], ...]


def hooks_of(old: nn.Parameter) -> ParameterHooks:
    """The hooks of a parameter that is about to be replaced."""
    before = getattr(old, "_backward_hooks", None) or {}
    after = getattr(old, "_post_accumulate_grad_hooks", None) or {}
    return ParameterHooks(tuple(before.values()), tuple(after.values()))


def inherit(new: ShardedTensor, hooks: ParameterHooks, grad: Tensor | None, *, mean: bool) -> None:
    """Give a sharded parameter the hooks and the gradient of the one that it replaces; the gradient is reduced.

    Communicates:
        A reduce-scatter where there is a gradient.
    """
    for hook in hooks.on_gradient:
        new.register_hook(hook)
    for hook in hooks.after_accumulation:
        new.register_post_accumulate_grad_hook(hook)
    if grad is None:
        return
    bucket = ReduceBucket(
        BucketLayout.of([new._layout]), new._group, dtype=grad.dtype, device=new.device, label=new.name
    )
    bucket.add(0, grad.to(new.device))
    shard = bucket.launch(mean=mean).wait().shards[0]
    new.grad = new.like(ShardCell(shard, new._layout, is_shared=True))


def repoint_optimizer(optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """Let an optimizer that was made before `fully_shard` hold the sharded parameters, with its state cut to them.

    Runs ahead of every step of every optimizer (`runtime.standins` registers it); does nothing where no replaced
    parameter is held.

    Communicates:
        Nothing.
    """
    state = optimizer.state
    seen = (id(state), len(state))
    if optimizer.__dict__.get("_dshard_seen") != seen:
        for param, values in state.items():
            if isinstance(param, ShardedTensor):  # the full state of an unsharded run may have been loaded
                state[param] = _shard_state(values, param)
        optimizer.__dict__["_dshard_seen"] = seen
    for group in optimizer.param_groups:
        params = group["params"]
        for i, old in enumerate(params):
            if type(old) is ReplacedParameter:
                new = old._replacement
                params[i] = new
                if old in optimizer.state:
                    optimizer.state[new] = _shard_state(optimizer.state.pop(old), new)


def _shard_state(state: Any, param: ShardedTensor) -> Any:
    """State tensors of the parameter's shape become sharded like it; all else stays."""
    if not isinstance(state, dict):
        return state
    mesh, dim = param.device_mesh, param._layout.dim

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, ShardedTensor) or value.shape != param.shape:
            return value
        full = value.full_tensor() if isinstance(value, DTensor) else value
        return ShardedTensor.shard(full, mesh, dim, name=param.name) if full.dim() else full

    return {key: cut(value) for key, value in state.items()}
