"""Floating-point operations and bytes of one operation of torch, from the shapes that it was given."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from dshard.planner.steps import tensors

aten = torch.ops.aten
_FUNCTIONAL = "_c10d_functional"
_COLLECTIVES: Mapping[str, str] = MappingProxyType(
    {
        **{f"{_FUNCTIONAL}.{kind}": kind for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")},
        "_dtensor.shard_dim_alltoall": "all_to_all",
    }
)


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel.

    Args:
        name: Of the operation.
        flops: Of matrix products, convolutions and attention; two for a multiplication with addition, 0 for others.
        num_bytes: Read and written, each tensor once. Of a collective: of the full tensor that it gathers or reduces.
        dtype: Of what it computes.
    """

    name: str
    flops: int
    num_bytes: int
    dtype: torch.dtype

    @property
    def collective(self) -> str | None:
        """The collective that it is, among the ranks over which layers are cut; None for what computes."""
        return next((kind for name, kind in _COLLECTIVES.items() if self.name.startswith(name)), None)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(tuple(query.shape), tuple(key.shape), tuple(value.shape))


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    shapes = (tuple(each.shape) for each in (grad, query, key, value))
    return sdpa_backward_flop_count(*shapes)


def _grouped(one: Tensor, other: Tensor, *_: Any, **__: Any) -> int:
    """Of products of groups: a matrix is cut along the dim that the other's stack, or the result's, has one more of."""
    rows, inner, columns = one.shape[-2], one.shape[-1], other.shape[-1]
    return 2 * rows * inner * columns * (one.shape[0] if one.ndim == other.ndim == 3 else 1)


def _grouped_backward(rows: Tensor, stack: Tensor, *_: Any, **__: Any) -> int:
    return 2 * _grouped(rows, stack)


def _recurrent(sequence: Tensor, of_inputs: Tensor, of_states: Tensor, *_: Any, **__: Any) -> int:
    """Of a layer of an LSTM: each element of its two matrices is used once for each step of each sample."""
    return 2 * sequence.shape[0] * sequence.shape[1] * (of_inputs.numel() + of_states.numel())


def _recurrent_backward(*args: Any, **kwargs: Any) -> int:
    return 2 * _recurrent(*args, **kwargs)


def _trilinear(one: Tensor, two: Tensor, three: Tensor, *dims: Any, **__: Any) -> int:
    """Of the sum over products of three tensors, each repeated along some dims: that of `nn.Bilinear`."""
    shapes = []
    for tensor, own in zip((one, two, three), dims[:3], strict=True):
        shape = list(tensor.shape)
        for dim in own:
            shape.insert(dim, 1)
        shapes.append(shape)
    return 2 * prod(torch.broadcast_shapes(*shapes))


def grouped_like(
    one: Tensor,
    other: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """A tensor like what `torch.ops.aten._grouped_mm` gives, of which torch knows the shape in bfloat16 alone."""
    shape = [one.shape[-2], other.shape[-1]]
    if one.ndim == other.ndim == 3:
        shape.insert(0, one.shape[0])
    elif one.ndim == other.ndim == 2:
        shape.insert(0, 1 if offs is None else len(offs))
    return one.new_empty(shape, dtype=one.dtype if out_dtype is None else out_dtype)


# Operations that torch's own table of formulas lacks, by name: some are of other libraries.
_FLOPS: Mapping[str, Callable[..., int]] = MappingProxyType(
    {
        "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
        "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
        "aten._grouped_mm": _grouped,
        "aten._scaled_grouped_mm": _grouped,
        "aten._trilinear": _trilinear,
        "aten.mkldnn_rnn_layer": _recurrent,
        "aten.mkldnn_rnn_layer_backward": _recurrent_backward,
        "transformers.grouped_mm_fallback": _grouped,
        "transformers.grouped_mm_fallback_backward": _grouped_backward,
    }
)
# These make memory, and touch none of it.
_FREE = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten._unsafe_view)
# These read no more of their first operand than they write.
_READS_ROWS = (aten.embedding, aten.index, aten.index_select, aten.gather)


def cost_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Op | None:
    """What a kernel costs; None for what runs none: views, and memory that is only taken."""
    packet = func.overloadpacket
    if packet in _FREE or _is_view(func) or str(packet) == f"{_FUNCTIONAL}.wait_tensor":
        return None
    read, written = list(tensors((args, dict(kwargs)))), list(tensors(out))
    if not written:
        return None
    formula = flop_registry.get(packet)
    if str(packet) in _FLOPS:
        flops = int(_FLOPS[str(packet)](*args, **kwargs))
    else:
        flops = int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
    if packet in _READS_ROWS:
        read = [*read[1:], *written]
    num_bytes = sum(map(_num_bytes, read)) + sum(map(_num_bytes, written))
    dtypes = [each.dtype for each in (*written, *read) if each.dtype.is_floating_point]
    found = Op(str(packet), flops, num_bytes, dtypes[0] if dtypes else torch.int64)
    if found.collective is None:
        return found
    return replace(found, num_bytes=max(sum(map(_num_bytes, read)), sum(map(_num_bytes, written))))


def _is_view(func: Any) -> bool:
    infos = [each.alias_info for each in func._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


def _num_bytes(tensor: Tensor) -> int:
    """Bytes of the elements of a tensor, or of its storage where that is smaller: an expanded one."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
