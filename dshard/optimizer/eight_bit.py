"""Quantization to 8 bits, in blocks that share a scale, and AdamW's arithmetic over what was quantized.

A block is some neighbouring numbers. Each is kept as a code, the place of its quotient by the scale in a table of 256
numbers, which is dense near zero; the scale is the largest absolute value in the block. Table and rounding are those of
"8-bit Optimizers via Block-wise Quantization" (Dettmers et al., 2021), and all bits those of torchao's AdamW8bit: of
what `torch.compile` makes of it for a CPU, for torchao's step is compiled.

No number depends on its place in a tensor, nor on how many there are beside it: shards have the bits of the whole.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_LEAST_SCALE = 1e-12


@dataclass(frozen=True, slots=True)
class _Table:
    """What codes mean, and how a number is found its code: by the upper half of its bits, then by one comparison.

    Args:
        values: Of all codes, ascending, shape (256,).
        first: Code of the least number whose bits begin so, shape (65536,).
        next: From which number on it is the code after that, shape (65536,).
    """

    values: Tensor
    first: Tensor
    next: Tensor

    @classmethod
    def of(cls, values: np.ndarray) -> "_Table":
        """Make the table for some values."""
        limits = _limits(values)
        bits = np.arange(1 << 16, dtype=np.uint32) << 16
        one, other = bits.view(np.float32), (bits | 0xFFFF).view(np.float32)
        low, high = np.fmin(one, other), np.fmax(one, other)
        low[np.isnan(low)] = high[np.isnan(high)] = -np.inf  # what is no number gets code 0, as of torchao
        first, last = np.searchsorted(limits, low, side="right"), np.searchsorted(limits, high, side="right")
        assert (last - first <= 1).all()
        after = np.append(limits, np.float32(np.inf))[np.minimum(first, 255)]
        after = np.where(last > first, after, np.float32(np.nan)).astype(np.float32)  # which nothing is at least as
        return cls(torch.from_numpy(values), torch.from_numpy(first.astype(np.uint8)), torch.from_numpy(after))

    def to(self, device: torch.device) -> "_Table":
        """The same on a device."""
        return _Table(self.values.to(device), self.first.to(device), self.next.to(device))


def _limits(values: np.ndarray) -> np.ndarray:
    """From which number on each code but the first is the nearest one, by fp32's own subtraction."""
    below, above = values[:-1], values[1:]
    half = (above - below) * np.float32(0.5)
    no, yes = _ordinal(below), _ordinal(above)  # the difference to `below` is less than half, or is not
    while (yes - no > 1).any():
        middle = (no + yes) // 2
        is_above = _number(middle) - below >= half
        no, yes = np.where(is_above, no, middle), np.where(is_above, middle, yes)
    return _number(yes)


def _ordinal(values: np.ndarray) -> np.ndarray:
    """The place of fp32 numbers in the order of all."""
    bits = values.view(np.int32).astype(np.int64)
    return np.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


def _number(places: np.ndarray) -> np.ndarray:
    """The way back of `_ordinal`."""
    bits = np.where(places >= 0, places, -places | (1 << 31))
    return bits.astype(np.uint32).view(np.float32)


@functools.cache
def _table(device: torch.device, *, is_signed: bool) -> _Table:
    """The dynamic tree of the paper: each power of ten has twice as many numbers as the one below it."""
    if device.type != "cpu":
        return _table(torch.device("cpu"), is_signed=is_signed).to(device)
    found = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (power + (not is_signed)) + 1, dtype=torch.float32, device="cpu")
        middles = (edges[:-1] + edges[1:]) / 2
        found += (10 ** (power - 6) * middles).tolist()
        if is_signed:
            found += (-(10 ** (power - 6)) * middles).tolist()
    return _Table.of(np.sort(np.array(found, dtype=np.float32)))


def quantize(quotients: Tensor, *, is_signed: bool) -> Tensor:
    """The codes of numbers, divided by the scales of their blocks ahead of this.

    Args:
        quotients: fp32, contiguous, of any shape.
        is_signed: Whether some may be negative.

    Returns:
        uint8, of the same shape.
    """
    table, flat = _table(quotients.device, is_signed=is_signed), quotients.view(-1)
    begin = (flat.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
    codes = table.first.index_select(0, begin)
    return codes.add_(flat >= table.next.index_select(0, begin)).view(quotients.shape)


def dequantize(codes: Tensor, *, is_signed: bool) -> Tensor:
    """What codes mean, to be multiplied by the scales of their blocks: fp32, of their shape."""
    table = _table(codes.device, is_signed=is_signed)
    return table.values.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def scales_of(largest: Tensor) -> Tensor:
    """The scales of blocks, by the largest absolute values in them."""
    return largest.clip(_LEAST_SCALE)


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Hyperparameters of a step, and its bias corrections.

    Args:
        lr: Learning rate.
        decay: The part of a parameter that is taken from it.
        betas: How much is kept of the running means of gradients, and of their squares.
        eps: Added to the root of the latter.
        corrections: What the first moment is divided by, and the root of the second.
    """

    lr: float
    decay: float
    betas: tuple[float, float]
    eps: float
    corrections: tuple[float, float]

    @classmethod
    def of(
        cls, lr: float | Tensor, weight_decay: float, betas: tuple[float, float], eps: float, num_steps: float
    ) -> "Hyperparameters":
        """Find them for a step, by the number of those with it; all is fp32, as in torchao's graph."""
        rate, count = (torch.tensor(float(each), dtype=torch.float32, device="cpu") for each in (lr, num_steps))
        first, second = (1 - beta**count for beta in betas)
        root = second.double().sqrt().float()
        return cls(rate.item(), (rate * weight_decay).item(), betas, eps, (first.item(), root.item()))


def adamw(param: Tensor, grad: Tensor, moments: list[Tensor], hyperparameters: Hyperparameters) -> None:
    """AdamW over some elements of a parameter.

    Args:
        param: fp32; written.
        grad: fp32.
        moments: fp32, of gradients and of their squares; written.
        hyperparameters: What it is taken with.
    """
    first, second = moments
    param.sub_(param * hyperparameters.decay)
    _move(first, grad, 1 - hyperparameters.betas[0])
    _move(second, grad * grad, 1 - hyperparameters.betas[1])
    below = _root(second).div_(hyperparameters.corrections[1]).add_(hyperparameters.eps)
    param.sub_((first / hyperparameters.corrections[0]).mul_(hyperparameters.lr).div_(below))


def _move(moment: Tensor, to: Tensor, part: float) -> None:
    """As `moment.lerp_(to, part)` without a fused multiply-add: rounded after the product, as in torchao's graph."""
    way = to - moment
    if part < 0.5:
        moment.add_(way.mul_(part))
    else:
        torch.add(to, way.mul_(part - 1), out=moment)


def _root(values: Tensor) -> Tensor:
    """The square root, rounded to the nearest: torch's own on a CPU is not always."""
    return values.double().sqrt_().float() if values.device.type == "cpu" else values.sqrt()
