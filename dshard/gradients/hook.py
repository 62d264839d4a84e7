"""The hook through which the gradients of sharded parameters go from autograd to their reduction."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dshard import collectives
from dshard.autograd import keep_own_dtype, outside_autograd
from dshard.collectives import ReduceOp
from dshard.errors import DivergenceError, UnsupportedOpError
from dshard.gradients.backward import Backward
from dshard.interpreter import is_alone_in_hook
from dshard.tensor import ShardedTensor
from dshard.tensor.meshes import TPShardLayout
from dshard.tensor.sharded_tensor import REQUIRES_GRAD
from dshard.tensor.tp_params import local_gradient
from dshard.units.unit import Unit


class _ReduceGrad(torch.autograd.Function):
    """A reduction that autograd records, for `create_graph`."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, unit: Unit, slot: int, backward: Backward) -> ShardedTensor:
        ctx.unit = unit
        ctx.group = unit.params[slot].shard_group
        settings = unit.settings
        ctx.divisor = settings.divisor or (ctx.group.world_size if settings.averages else 1)
        return backward.receive(unit, slot, _plain(grad))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Every rank's loss may depend on the reduced gradient; each contribution was averaged in with weight 1/N."""
        total = collectives.all_reduce(
            [_plain(grad)],
            ctx.group,
            ReduceOp.SUM,
            label=f"double backward of '{ctx.unit.label}'",
            everywhere=True,
        ).wait()[0]
        return total / ctx.divisor, None, None, None


def _plain(grad: Tensor) -> Tensor:
    """A gradient as a plain tensor."""
    return grad.materialize() if isinstance(grad, ShardedTensor) else grad


def route_gradient(param: ShardedTensor, grad: Tensor | None) -> Tensor | None:
    """The hook of every sharded parameter: full gradient of this rank in, reduced gradient out."""
    if grad is None:
        return None
    if isinstance(grad, ShardedTensor) and grad.shard_storage.is_shared:
        grad.shard_storage.is_reduced = False  # it has arrived
        return grad  # a nested autograd.grad has reduced it already, or uses in slices have
    assert isinstance(param.gather_source, Unit), "a gradient hook outlived its unit"
    unit = param.gather_source
    if not REQUIRES_GRAD.__get__(param):
        return grad  # frozen since the forward: autograd drops it
    if grad.layout != torch.strided:
        raise UnsupportedOpError(
            f"{param.name}: gradients of sharded parameters must be dense, but this one has layout {grad.layout}. "
            "Build the embedding with sparse=False."
        )
    if unit.settings.num_slices > 1:
        _check_one_way(param, unit)
    is_alone = is_alone_in_hook(grad)
    backward: Backward = unit.model.services[Backward]
    backward.notice()
    meta: Any = param._spec.tensor_meta  # reading a subclass's own attributes takes several times as long
    if grad.shape != meta.shape:
        raise DivergenceError(
            f"{param.name}: a gradient must have the parameter's shape {tuple(param.shape)}, but it is "
            f"{tuple(grad.shape)}. Look at the backward of custom autograd functions."
        )
    if type(grad) is DTensor or type(param.shard_storage.layout) is TPShardLayout:
        if torch.is_grad_enabled() and grad.requires_grad:
            raise UnsupportedOpError(
                f"{param.name}: create_graph=True needs plain gradients, but this parameter or its gradient is a "
                "DTensor. Take the second derivative of a model without tensor parallelism."
            )
        with outside_autograd():
            return backward.receive(unit, param.gather_slot, local_gradient(param, grad))
    if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():  # as in every ordinary backward
        return backward.receive(unit, param.gather_slot, _plain(grad), may_wait=is_alone)
    if torch.is_grad_enabled() and grad.requires_grad:
        out: Tensor = _ReduceGrad.apply(grad, unit, param.gather_slot, backward)
        return out
    with outside_autograd():
        return backward.receive(unit, param.gather_slot, _plain(grad), may_wait=is_alone)


def _check_one_way(param: ShardedTensor, unit: Unit) -> None:
    """Raise where a gradient holds this rank's part and, from a use in slices, what is reduced already.

    Their sum is right for a mean alone: the mean of what is equal on all ranks is itself. A hook would see what it has
    seen in slices once more.
    """
    settings = unit.settings
    is_mean = settings.averages and settings.divisor is None and settings.reduce_hook is None
    if unit.sliced_in == torch._C._current_graph_task_id() and not is_mean:
        way = "Leave gradients averaged" if settings.reduce_hook is None else "Remove the hook of set_all_reduce_hook"
        raise UnsupportedOpError(
            f"{param.name}: where gradients are not averaged over the ranks, or a hook changes them, one backward must "
            "use a weight either in slices or whole, but this one used it both ways: by its layer, and by another "
            f"operation. {way}, or give the weight the strategy 'full'."
        )


def users_hooks(param: ShardedTensor) -> tuple[list[Any], list[Any]]:
    """The program's own hooks on gradients of a parameter, and those after their accumulation."""
    known, known_after = param._backward_hooks or {}, param._post_accumulate_grad_hooks or {}
    others = [hook for hook in known.values() if getattr(hook, "func", None) is not route_gradient]
    return others, [hook for hook in known_after.values() if hook is not keep_own_dtype]


def hook_gradient(param: ShardedTensor) -> None:
    """Have the gradients of a parameter reduced, from the first time that it takes any."""
    if param.requires_grad and param.is_leaf and param.grad_hook_handle is None:
        # `swap_tensors` leaves dicts of hooks behind that autograd no longer knows; start from new ones.
        others, others_after = users_hooks(param)
        param._backward_hooks = param._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        param.grad_hook_handle = param.register_hook(partial(route_gradient, param))
        if param.wire_precision is not None:
            param.grad_dtype = None  # gradients arrive as they were computed, and are converted as they are packed
            param.register_post_accumulate_grad_hook(keep_own_dtype)
        for hook in others:
            param.register_hook(hook)
        for hook in others_after:
            param.register_post_accumulate_grad_hook(hook)
