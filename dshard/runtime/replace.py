"""What becomes of the parameters that `fully_shard` replaces, and of optimizers that hold them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from dshard.collectives import ReduceBucket
from dshard.errors import StateError
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

_GRAD: Any = torch.Tensor.grad  # the descriptor
_METADATA = frozenset(
    [
        getattr(torch.Tensor, n).__get__
        for n in ("dtype", "device", "shape", "requires_grad", "is_leaf", "layout", "is_meta")
    ]
    + [getattr(torch.Tensor, n) for n in ("is_floating_point", "is_complex", "numel", "dim", "size", "element_size")]
)  # what torch's optimizers ask of a parameter while they load a state


class ReplacedParameter(nn.Parameter):
    """A parameter that `fully_shard` replaced; any use raises and says where it went.

    `grad` is that of the replacement, so that an optimizer made before can zero it.
    """

    _replacement: ShardedTensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self = _first_replaced((args, kwargs or {}))
        name = self._replacement.name if self is not None else "a parameter"
        if func == _GRAD.__get__ and self is not None:
            return self._replacement.grad
        if func == _GRAD.__set__ and self is not None:
            self._replacement.grad = args[1]
            return None
        if func in _METADATA and self is not None:
            return func(self._replacement, *args[1:], **(kwargs or {}))
        raise StateError(
            f"{name}: fully_shard replaced this nn.Parameter object by a ShardedTensor, but the old object was used "
            f"({getattr(func, '__name__', func)}). Read the parameter from its module again; an optimizer that was "
            "made before fully_shard is re-pointed at its first step."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ReplacedParameter(now {self._replacement!r})"

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise StateError(f"{self._replacement.name}: the old parameter object was copied. Copy the module's own.")


def retire(old: nn.Parameter, new: ShardedTensor) -> None:
    """Free the memory of `old` and turn it into a `ReplacedParameter` that stands for `new`."""
    old.grad = None
    old.requires_grad = False
    old.data = torch.empty(0, dtype=old.dtype, device=old.device)
    old.__class__ = ReplacedParameter
    old.__dict__["_replacement"] = new


def _first_replaced(value: Any) -> ReplacedParameter | None:
    """The first replaced parameter in some arguments."""
    if isinstance(value, ReplacedParameter):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((found for item in items if (found := _first_replaced(item)) is not None), None)


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
