"""Sums of powers that are exact to the last bit of a double, and so the same whatever is added where."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dshard.collectives._c10d import ReduceOp
from dshard.collectives.group import ShardGroup

_BITS = 40  # of a number that one integer takes, beside as many elements of a chunk as there are bits left
_CHUNK = 1 << 20
_LIMB = 30
_SMALLEST = -1000  # exponent: powers of two up to its negative are finite
_Combine = Callable[[Tensor, ShardGroup, ReduceOp], Tensor]


def exact_norm(
    parts: Sequence[tuple[Sequence[ShardGroup], Sequence[Tensor]]], order: float, combine: _Combine
) -> float:
    """The norm of all parts together, in bits that do not depend on how they are cut.

    Numbers are scaled by a power of two so that the largest is below 1, and their powers added as integers of 80 bits:
    what is below 2^-80 of the largest is left out, of each element alike.

    Args:
        parts: Tensors of this rank, and the groups over whose ranks they are spread; alike in number on all ranks.
        order: 1, 2 or inf.
        combine: All-reduces a tensor over a group.

    Returns:
        The norm; inf or NaN where an element is.

    Communicates:
        For each group of a part, an all-reduce of 16 bytes and, but for `inf`, one of 32 bytes.
    """
    extremes = [_reduced(_extreme(tensors), groups, ReduceOp.MAX, combine) for groups, tensors in parts]
    largest = max((each[0].item() for each in extremes), default=0.0)
    if any(each[1].item() for each in extremes):
        return math.nan
    if not math.isfinite(largest) or not largest or order == math.inf:
        return float(largest)
    exponent = max(math.frexp(largest)[1], _SMALLEST)
    limbs = [_reduced(_limbs(tensors, order, exponent), groups, ReduceOp.SUM, combine) for groups, tensors in parts]
    total = 0
    for part in limbs:
        high, middle, low, lowest = part.tolist()
        total += ((high << _LIMB) + middle << _BITS) + (low << _LIMB) + lowest
    if order == 1:
        return math.ldexp(float(total), exponent - 2 * _BITS)
    return math.ldexp(math.sqrt(total), exponent - _BITS)


def _reduced(values: Tensor, groups: Sequence[ShardGroup], op: ReduceOp, combine: _Combine) -> Tensor:
    for group in groups:
        values = combine(values.to(group.device_type), group, op)
    return values


def _real(tensor: Tensor) -> Tensor:
    """Elements as real numbers, whose squares add up to the same."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _extreme(tensors: Sequence[Tensor]) -> Tensor:
    """The largest absolute value, NaN aside, and whether there is a NaN; fp64, shape (2,)."""
    found = torch.zeros(2, dtype=torch.float64, device="cpu")
    for tensor in tensors:
        if tensor.numel():
            absolute = tensor.detach().abs()
            is_nan = absolute.isnan()
            own = torch.stack([absolute.masked_fill(is_nan, 0).amax().double(), is_nan.any().double()])
            found = torch.maximum(found.to(own.device), own)
    return found


def _limbs(tensors: Sequence[Tensor], order: float, exponent: int) -> Tensor:
    """The sum of powers in limbs of 30 bits, of which the first and the third hold more; int64, shape (4,)."""
    total = torch.zeros(4, dtype=torch.int64, device="cpu")
    scale, one = math.ldexp(1.0, -exponent), float(1 << _BITS)
    for tensor in tensors:
        flat = tensor.detach().abs().reshape(-1) if order == 1 else _real(tensor.detach()).reshape(-1)
        for chunk in flat.split(_CHUNK):
            rest = chunk.double().mul_(scale)
            rest = (rest.abs_() if order == 1 else rest.square_()).mul_(one)
            high = rest.floor()
            low = rest.sub_(high).mul_(one).to(torch.int64).sum()
            whole = high.to(torch.int64).sum()
            mask = (1 << _LIMB) - 1
            total = total.to(chunk.device) + torch.stack([whole >> _LIMB, whole & mask, low >> _LIMB, low & mask])
    return total
