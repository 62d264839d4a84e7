"""Elementwise optimizers step on plain tensors: this rank's shards stand in for the parameters.

An operation on a ShardedTensor costs some microseconds of dispatch, an optimizer's step runs hundreds of them, and
for an elementwise optimizer all of them do the same: unwrap. So for the length of the step its groups and states hold
the shards themselves. Whoever else looks in meanwhile (a closure, a hook) would see shards; then nothing is swapped.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dshard.errors import StateError
from dshard.runtime.replace import repoint_optimizer
from dshard.tensor import ShardedTensor
from dshard.tensor.cell import ShardCell

__all__ = ["check_interrupted"]

_ELEMENTWISE = frozenset({ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop})


@dataclass(frozen=True, slots=True)
class _Swap:
    """An optimizer whose parameters are replaced by shards while its step runs.

    Args:
        optimizer: The optimizer.
        params: The parameters of each of its groups.
        state: Its state.
        of_standin: For each shard that stands in, the parameter.
        versions: Version counters of those shards at the start.
    """

    optimizer: Optimizer
    params: list[list[Tensor]]
    state: Any
    of_standin: dict[Tensor, ShardedTensor]
    versions: list[int]


class _Current:
    """The swap of the step that runs, or of one that raised; and one that raised and has not been told of."""

    swap: ClassVar[_Swap | None] = None
    untold: ClassVar[_Swap | None] = None
    num_hooks: ClassVar[tuple[int, int]] = (0, 0)


def _num_global_hooks() -> tuple[int, int]:
    return len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks)


def _may_swap(optimizer: Optimizer, args: Any, kwargs: Any) -> bool:
    """Whether nobody but the optimizer itself will look at its groups during the step."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure") if kwargs else None
    return (
        type(optimizer) in _ELEMENTWISE
        and closure is None
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and _num_global_hooks() == _Current.num_hooks
        and not optimizer.defaults.get("differentiable")
    )


def _standin(param: ShardedTensor) -> Tensor | None:
    """The shard of a parameter, with that of its gradient; None if the two do not lie alike."""
    grad = param.grad
    shard = param._cell.resolve().detach()  # an object of its own, for the key and the gradient
    if grad is None:
        shard.grad = None
        return shard
    if type(grad) is not ShardedTensor or grad._view is not None or param._view is not None:
        return None
    if grad._cell.layout is not param._cell.layout and grad._cell.layout != param._cell.layout:
        return None
    shard.grad = grad._cell.resolve()
    return shard


def _begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    check_interrupted(optimizer, ())
    repoint_optimizer(optimizer)
    if not _may_swap(optimizer, args, kwargs):
        return
    groups: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
    standins: dict[Tensor, Tensor] = {}
    for params in groups:
        for param in params:
            if type(param) is ShardedTensor:
                shard = _standin(param)
                if shard is None:
                    return
                standins[param] = shard
            elif type(param.grad) is ShardedTensor:
                return
    if not standins:
        return
    of_standin: dict[Tensor, Any] = {shard: param for param, shard in standins.items()}
    versions = [shard._version for shard in of_standin]
    _Current.swap = _Swap(optimizer, groups, optimizer.state, of_standin, versions)
    for group in optimizer.param_groups:
        group["params"] = [standins.get(p, p) for p in group["params"]]
    state: Any = defaultdict(dict)
    for param, values in optimizer.state.items():
        state[standins.get(param, param)] = {
            k: v._cell.resolve() if type(v) is ShardedTensor else v for k, v in values.items()
        }
    optimizer.state = state


def _end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    swap = _Current.swap
    if swap is None or swap.optimizer is not optimizer:
        return
    _restore(swap)


def _restore(swap: _Swap) -> None:
    """Give an optimizer its parameters back, and its state as sharded as they are."""
    _Current.swap = None
    for group, params in zip(swap.optimizer.param_groups, swap.params, strict=True):
        group["params"] = params
    for key, values in swap.optimizer.state.items():
        param = swap.of_standin.get(key)
        if param is None:
            swap.state[key] = values
            continue
        old = swap.state[param]
        for name, value in values.items():
            old[name] = _wrapped(old.get(name), value, param, key.shape)
    swap.optimizer.state = swap.state
    for shard, param in swap.of_standin.items():
        param._cell.num_writes += 1
        if shard.grad is None and param.grad is not None:
            param.grad = None  # by zero_grad(), after a step that raised
    torch.autograd.graph.increment_version(list(swap.of_standin.values()))


def _wrapped(old: Any, value: Any, param: ShardedTensor, shape: torch.Size) -> Any:
    """A state's value as it is kept between steps."""
    if type(old) is ShardedTensor:
        cell = old._cell
        if cell._tensor is not value:
            cell.deliver(value)
        cell.num_writes += 1
        return old
    if isinstance(value, Tensor) and value.dim() and value.shape == shape:
        return param.like(ShardCell(value, param._layout, is_shared=True), dtype=value.dtype)
    return value


def check_interrupted(optimizer: Optimizer | None, params: Sequence[Tensor]) -> None:
    """Repair an optimizer whose step raised; if parameters had moved by then, say so once.

    Args:
        optimizer: Whose step begins, or None.
        params: What is about to be used.

    Raises:
        StateError: A step of `optimizer`, or of one that holds some of `params`, was interrupted after it had begun to
            write. Only the ranks on which it was raise.
    """
    swap = _Current.swap
    if swap is not None:
        has_moved = any(s._version != v for s, v in zip(swap.of_standin, swap.versions, strict=True))
        _restore(swap)
        _Current.untold = swap if has_moved else None
    untold = _Current.untold
    if untold is None:
        return
    held = {id(p) for p in untold.of_standin.values()}
    if optimizer is not untold.optimizer and not any(id(p) in held for p in params):
        return
    _Current.untold = None
    raise StateError(
        f"{type(untold.optimizer).__name__}: a step must run to its end, but the last one was interrupted by an "
        "exception, and some parameters have moved while others have not. Load a checkpoint; or, to go on all the "
        "same, call zero_grad() again and continue."
    )


register_optimizer_step_pre_hook(_begin)
register_optimizer_step_post_hook(_end)
_Current.num_hooks = _num_global_hooks()
