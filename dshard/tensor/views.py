"""Strides, and chains of view operations: a view of a sharded tensor costs nothing and can be written through."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.utils._python_dispatch import _disable_current_modes

from dshard.errors import UnsupportedOpError


def restrided(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A copy of a plain tensor, with other strides."""
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def empty_as(tensor: Tensor) -> Tensor:
    """A plain tensor that lies as a full value does, of any content."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def dense_stride(full: Tensor) -> tuple[int, ...]:
    """Strides of `full` if it is dense in some dim order, else row-major ones."""
    return torch.empty_like(full, device="meta", memory_format=torch.preserve_format).stride()


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a plain tensor, shape (bytes,), uint8; its own memory where it is contiguous.

    One element may have any strides and be contiguous, but not be seen as bytes.
    """
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


_ALIAS, _AS_REAL = torch.ops.aten.alias.default, torch.ops.aten.view_as_real.default


@dataclass(slots=True)  # not frozen: made for every view, and a frozen one takes thrice the time
class ViewStep:
    """One view operation.

    Args:
        func: The operation; its first argument is what is viewed.
        args: Its other positional arguments.
        kwargs: Its keyword arguments.
        index: Which output, for operations with several (`split`, `unbind`); else None.
    """

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None = None


ViewMeta = TensorMeta  # shape, strides (in elements) and dtype of a view


@dataclass(slots=True)
class View:
    """A lazy view: a chain of view operations over a sharded base.

    Args:
        base: The ShardedTensor that is viewed.
        steps: The operations.
        key: Tells the chain apart from others over the same base.
        computes: Whether the base is meant in its compute dtype, under mixed precision.
    """

    base: Any
    steps: tuple[ViewStep, ...]
    key: tuple[Any, ...]
    computes: bool = False


@cache
def empty_of(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without elements, to take dtype and device from."""
    with torch.inference_mode(mode=False), _disable_current_modes():
        return torch.empty(0, dtype=dtype, device=device)


def apply_steps(full: Tensor, steps: tuple[ViewStep, ...]) -> Tensor:
    """Replay a chain on a plain tensor."""
    is_turned = False  # whether it is the real numbers of a conjugated tensor, the imaginary ones with the other sign
    for step in steps:
        if step.func is _ALIAS and type(full) is not Tensor:
            continue  # a tensor subclass may not take it
        if step.func is _AS_REAL and full.is_conj():
            full, is_turned = torch.view_as_real(full.conj()), True
            continue
        out = step.func(full, *step.args, **step.kwargs)
        if is_turned:
            out, is_turned = _part_of_turned(full, out, step), False
        full = out if step.index is None else out[step.index]
    if is_turned:
        raise _no_view_of_conjugated()
    return full


def _part_of_turned(full: Tensor, part: Tensor, step: ViewStep) -> Tensor:
    """The real or the imaginary part of a conjugated tensor, as `real` and `imag` take it."""
    if step.func is not torch.ops.aten.select.int or step.args[0] not in (-1, full.dim() - 1):
        raise _no_view_of_conjugated()
    return torch._neg_view(part) if step.args[1] in (-1, 1) else part


def _no_view_of_conjugated() -> UnsupportedOpError:
    return UnsupportedOpError(
        "view_as_real: the numbers of a conjugated tensor do not lie in memory as they are, so it has no such view. "
        "Call resolve_conj() first, or take .real and .imag."
    )


def view_metas(source: Tensor, dtype: torch.dtype, step: ViewStep) -> list[ViewMeta] | ViewMeta:
    """Metadata of what a step gives for a tensor of `dtype` that lies like `source`, without touching its data."""
    meta = torch.empty_strided(source.shape, source.stride(), dtype=dtype, device="meta")
    out = step.func(meta, *step.args, **step.kwargs)
    if isinstance(out, Tensor):
        return ViewMeta(out.shape, out.stride(), out.dtype)
    return [ViewMeta(o.shape, o.stride(), o.dtype) for o in out]
