"""Shards of tensor subclasses that say how they are gathered, and full values for autograd and traced graphs."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from dshard.errors import StateError, UnsupportedOpError
from dshard.layout import ShardLayout
from dshard.tensor.meshes import tp_layout_of


def subclass_gathers(tensor: object) -> bool:
    """Whether a tensor says itself how it is gathered."""
    return type(tensor) is not Tensor and hasattr(tensor, "fsdp_post_all_gather")


def holds_packed_bits(param: Tensor) -> bool:
    """Whether the bits of a parameter are no numbers of its dtype: packed weights in a dtype that is storage alone.

    bitsandbytes keeps what unpacks them as `quant_state`. A view of memory of another dtype is seen as long as torch
    remembers what it is a view of.
    """
    if getattr(param, "quant_state", None) is not None:
        return True
    return param._is_view() and param._base is not None and param._base.dtype != param.dtype


def exact_values(shard: Tensor, name: str) -> Tensor:
    """The values of a shard as a plain tensor of its dtype; itself, if it is none of a subclass.

    Raises:
        UnsupportedOpError: The subclass cannot be copied into a plain tensor.

    Communicates:
        Nothing.
    """
    if not subclass_gathers(shard):
        return shard
    plain = torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        try:
            plain.copy_(shard)
        except Exception as error:
            raise UnsupportedOpError(
                f"{name}: the exact value of a {type(shard).__name__} is what copy_ gives a plain tensor, but that "
                f"raised {type(error).__name__}: {error}. Let its __torch_dispatch__ take aten.copy_ to a plain tensor."
            ) from error
    return plain


def cut_subclass(name: str, full: Tensor, layout: ShardLayout, rank: int, device: torch.device) -> Tensor:
    """This rank's shard, of the same class, by the operations that FSDP2 asks of a subclass.

    These are `split` along dim 0, `new_zeros`, `copy_`, where the dim is uneven `slice`, and `_to_copy` to go to
    another device.

    Raises:
        UnsupportedOpError: One of them raises, or gives another class or shape.
    """
    kind, shape = type(full), layout.local_shape(rank)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        try:
            parts = full.detach().chunk(layout.num_ranks)
            part = parts[min(rank, len(parts) - 1)]
            if part.device != device and not part.is_meta:
                part = part.to(device)
            shard = part.new_zeros(layout.local_shape(0))
            if shard.shape != shape:
                shard = shard.narrow(0, 0, shape[0])
            if shape[0]:
                shard.copy_(part)
        except Exception as error:
            raise UnsupportedOpError(
                f"{name}: fully_shard cuts a {kind.__name__} by its own split, new_zeros, slice and copy_, but "
                f"{type(error).__name__}: {error}. Let its __torch_dispatch__ take aten.split.Tensor, "
                "aten.new_zeros, aten.slice.Tensor and aten.copy_."
            ) from error
    if not subclass_gathers(shard) or tuple(shard.shape) != shape:
        raise UnsupportedOpError(
            f"{name}: split, new_zeros and slice of a {kind.__name__} must give one of shape {shape}, but gave a "
            f"{type(shard).__name__} of shape {tuple(shard.shape)}. Let its __torch_dispatch__ wrap their results."
        )
    return shard


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
    if tensor.offload is not None and not getattr(tensor.gather_source, "is_running", False):
        return (
            "torch.compile takes offloaded parameters (offload_policy) in forwards of sharded models alone, but none "
            "runs. Compile the model or its blocks in place, by compile(), or leave offload_policy out."
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
        return whole.redistribute(placements=ctx.tp.placements)
