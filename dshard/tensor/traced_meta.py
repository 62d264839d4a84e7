"""What torch.compile is told of parameters: the dtype that they have in the graph, and no gradients."""

from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dshard.errors import StateError

_EXACT, _FORWARD = "_dshard_exact_use", "_dshard_forward"  # of a context of tracing: a parameter's name; whether


def _grad(tensor: Any) -> Tensor | None:
    if TracingContext.try_get() is not None:
        source = tensor.gather_source
        if source is not None and source.is_running and not getattr(source, "is_traced", False):
            return None
    grad: Tensor | None = _GRAD.__get__(tensor)
    return grad


_GRAD: Any = Tensor.grad  # descriptor
# To a graph that is traced in a forward, parameters have no gradients: it needs none, to look at them is to wait for
# their reduction, and dynamo takes none of another dtype than the parameter has there.
GRAD: Any = property(_grad, _GRAD.__set__, _GRAD.__delete__)


class _Meta(TensorMeta):
    """A TensorMeta, equal to that of the parameter, with the dtype that it has in the graph."""

    compute: torch.dtype


def telling(flattened: tuple[list[str], tuple[Any, ...]], compute: torch.dtype) -> tuple[list[str], tuple[Any, ...]]:
    """What `DTensor.__tensor_flatten__` gives, with the compute dtype in it."""
    attributes, (first, *rest) = flattened
    if isinstance(first, DTensorSpec):  # older releases of torch
        spec = DTensorSpec(first.mesh, first.placements, tensor_meta=_meta(first.tensor_meta, compute))
        return attributes, (spec, *rest)
    meta, *rest = rest
    return attributes, (first, _meta(meta, compute), *rest)


def _meta(meta: TensorMeta | None, compute: torch.dtype) -> TensorMeta:
    assert meta is not None
    told = _Meta(*meta)
    told.compute = compute
    return told


def dtype_in_graph(meta: TensorMeta) -> torch.dtype:
    """The dtype that a tensor has in the graph."""
    return meta.compute if isinstance(meta, _Meta) else meta.dtype


def note_exact_use(name: str) -> None:
    """The graph that is being traced takes a parameter under mixed precision as it is kept: outside of any forward."""
    context = TracingContext.get()
    setattr(context, _EXACT, name)
    _check(context)


def note_forward_in_graph() -> None:
    """The graph that is being traced runs a whole forward, of which the runtime is not told."""
    context = TracingContext.try_get()
    if context is not None:
        setattr(context, _FORWARD, True)
        _check(context)


def _check(context: TracingContext) -> None:
    name = getattr(context, _EXACT, None)
    if name is not None and getattr(context, _FORWARD, False):
        raise StateError(
            f"{name}: under mixed precision (mp_policy) a parameter has its compute dtype in a forward, but "
            "torch.compile of a function that calls the model starts ahead of that. Compile the model, by "
            "model.compile(), or its blocks, by block.compile()."
        )
