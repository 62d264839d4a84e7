"""What a ShardedTensor gives to others: its full value to autograd, and itself to graphs that are traced."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from dshard.errors import StateError
from dshard.tensor.subclass_shards import subclass_gathers
from dshard.tensor.tp_layout import tp_layout_of


def check_traceable(tensor: Any) -> None:
    """Raise for a tensor that a graph cannot take in: StateError in a forward, which ran much slower without its graph.

    Elsewhere, as for steps of optimizers, clipping and averages of weights, the graph breaks and it runs as in eager.
    """
    refuse_compiled_autograd(tensor.name)
    why = _why_untraceable(tensor)
    if not why:
        return
    error = StateError(f"{tensor.name}: {why}")
    if getattr(tensor.gather_source, "is_running", False):
        raise error
    raise torch._dynamo.exc.Unsupported(f"StateError: {error}") from error


def _why_untraceable(tensor: Any) -> str:
    if subclass_gathers(tensor.shard_storage.tensor):
        return (
            "torch.compile does not take parameters of tensor subclasses yet, but this one's shard is a "
            f"{type(tensor.shard_storage.tensor).__name__}. Call the model without torch.compile."
        )
    if tensor.offload is not None:
        return (
            "torch.compile does not take offloaded parameters (offload_policy) yet. Call the model without "
            "torch.compile, or leave offload_policy out."
        )
    if tensor.is_view and not getattr(tensor._view.base.gather_source, "is_traced", False):
        return (
            "a compiled graph takes in and gives out sharded tensors, not views of them, but this is a view (shape "
            f"{tuple(tensor.shape)}). Make the view within the compiled function, or use full_tensor()."
        )
    if tp_layout_of(tensor.shard_storage.layout) is not None:
        return (
            "torch.compile does not take parameters that are cut over another mesh too (tensor parallelism) yet, but "
            f"this one lies as {tensor.placements}. Call the model without torch.compile."
        )
    return ""


def refuse_compiled_autograd(who: str) -> None:
    """Raise StateError where torch's compiled autograd is on: it makes a graph of hooks that gather and reduce."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if module is not None and (module.compiled_autograd_enabled or module.in_compiled_autograd_region):
        raise StateError(
            f"{who}: a backward of a sharded model gathers and reduces as it runs, but compiled autograd "
            "(torch._dynamo.config.compiled_autograd, torch._dynamo.compiled_autograd._enable) makes one graph of it. "
            "Leave it off, and compile the model: model.compile(), or its blocks."
        )


class FullTensor(torch.autograd.Function):
    """`full_tensor` for autograd: the gradient of the full value is that of the sharded one."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        """Gather the full value."""
        ctx.device, ctx.tp = tensor._spec.mesh.device_type, tp_layout_of(tensor.shard_storage.layout)
        return tensor.materialize().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The parameter's own hook reduces, on the device of the mesh.

        Over another mesh too it becomes a DTensor, as the gradients of other uses are: equal on the ranks of that mesh.
        """
        grad = grad if grad.device.type == ctx.device else grad.to(ctx.device)
        if ctx.tp is None:
            return grad
        whole: Any = DTensor.from_local(grad, ctx.tp.mesh, [Replicate()] * ctx.tp.mesh.ndim, run_check=False)
        shard: Tensor = whole.redistribute(placements=ctx.tp.placements)
        return shard
