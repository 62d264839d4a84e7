"""Local tensors of DTensor parameters, as expert parallelism asks for them within a forward."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dshard.errors import UnsupportedOpError
from dshard.tensor.tp_layout import gathered_stride, tp_layout_of
from dshard.tensor.views import View, ViewMeta, ViewStep


def _take_local(operand: Tensor) -> Tensor:
    """The first step of such a view: from a DTensor, to its local tensor."""
    if type(operand) is not DTensor:
        raise UnsupportedOpError(
            "to_local: what it gives within a forward can be read and takes gradients, but it was written to. Write to "
            "the parameter itself."
        )
    local: Tensor = operand._local_tensor
    return local


_STEP: Any = ViewStep(_take_local, (), {})  # type: ignore[arg-type]


def is_local(view: View | None) -> bool:
    """Whether a chain of views starts from the local tensor, and so gives plain tensors."""
    return view is not None and view.steps[0] is _STEP


def is_in_forward(tensor: Any) -> bool:
    """Whether a forward runs of a module whose unit holds this DTensor parameter."""
    source = tensor.gather_source
    return tp_layout_of(tensor.shard_storage.layout) is not None and source is not None and source.num_active > 0


class LocalTensor(torch.autograd.Function):
    """`to_local` for autograd: what data parallelism gathers of a DTensor parameter, lazily; a view, so to say."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, grad_placements: Any) -> Tensor:
        """Remember it; nothing is gathered before its use."""
        layout = tensor.shard_storage.layout
        tp = tp_layout_of(layout)
        assert tp is not None
        meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        placements = tuple(grad_placements) if grad_placements is not None else tp.placements
        ctx.spec = DTensorSpec(tp.mesh, placements, tensor_meta=meta)
        local = ViewMeta(torch.Size(layout.shape), gathered_stride(layout, tensor.stride()), tensor.dtype)
        computes = tensor.computes()
        key = computes, "to_local"
        view: Tensor = tensor.lazy_view((_STEP,), tensor.view_spec(local), key, computes=computes)
        return view

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """The gradient of the local tensor is the local tensor of the gradient."""
        local = grad.materialize() if hasattr(grad, "materialize") else grad
        return DTensor(local, ctx.spec, requires_grad=False), None
