"""What sharding means, in NumPy alone: an oracle that shares no code, and so no bug, with dshard and torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def chunk_extents(size: int, num_chunks: int) -> list[tuple[int, int]]:
    """Cut `[0, size)` by `torch.chunk`'s rule, padded with empty extents up to `num_chunks`.

    Every chunk holds `ceil(size / num_chunks)` indices, the last non-empty one what is left, those after it nothing.

    Args:
        size: Length of the dim, at least 0.
        num_chunks: Number of chunks, at least 1.

    Returns:
        `num_chunks` pairs `(start, stop)`, in order; an empty one has `start == stop == size`.
    """
    chunk = -(-size // num_chunks)
    return [(min(i * chunk, size), min((i + 1) * chunk, size)) for i in range(num_chunks)]


def shard(array: Array, dim: int | None, rank: int, num_ranks: int) -> Array:
    """The part of `array` that `rank` of `num_ranks` holds when it is cut along `dim`; all of it for `dim=None`.

    Returns:
        A copy. 0-d arrays have no dim to cut: pass `dim=None`.
    """
    if dim is None:
        return array.copy()
    start, stop = chunk_extents(array.shape[dim], num_ranks)[rank]
    return np.take(array, np.arange(start, stop), axis=dim)


def unshard(shards: Sequence[Array], dim: int | None, shape: tuple[int, ...]) -> Array:
    """Put the shards of all ranks, in rank order, together again.

    Args:
        shards: One array per rank.
        dim: The dim along which they were cut, or None if every rank holds the whole array.
        shape: The full shape that must come out.

    Raises:
        ValueError: The shards do not make up `shape`.
    """
    full = shards[0].copy() if dim is None else np.concatenate(list(shards), axis=dim)
    if full.shape != tuple(shape):
        raise ValueError(f"unshard: the shards must make up shape {shape}, but they make up {full.shape}.")
    return full


def _slot_numel(shape: tuple[int, ...], dim: int, num_ranks: int) -> int:
    """Elements of the largest shard: what every rank sends for its shard, padded."""
    return math.prod((*shape[:dim], -(-shape[dim] // num_ranks), *shape[dim + 1 :]))


def wire_bytes_all_gather(
    shapes: Sequence[tuple[int, ...]], dims: Sequence[int | None], num_ranks: int, itemsize: int
) -> int:
    """Bytes that each rank sends when the shards of several tensors are gathered: `(N - 1) / N` of the padded total.

    Args:
        shapes: Full shapes.
        dims: The dim along which each is cut; None for a tensor that every rank holds whole, which costs nothing.
        num_ranks: N.
        itemsize: Bytes per element.
    """
    slots = [_slot_numel(shape, dim, num_ranks) for shape, dim in zip(shapes, dims, strict=True) if dim is not None]
    return (num_ranks - 1) * sum(slots) * itemsize


def wire_bytes_reduce_scatter(
    shapes: Sequence[tuple[int, ...]], dims: Sequence[int | None], num_ranks: int, itemsize: int
) -> int:
    """Bytes that each rank sends when full gradients are reduced into shards: the same as for the gather."""
    return wire_bytes_all_gather(shapes, dims, num_ranks, itemsize)


def wire_bytes_all_reduce(numel: int, num_ranks: int, itemsize: int) -> int:
    """Bytes that each rank sends to sum `numel` elements, padded to a multiple of N: `2 (N - 1) / N` of them."""
    return 2 * (num_ranks - 1) * -(-numel // num_ranks) * itemsize


def sum_in_pairs(values: Sequence[Any]) -> Any:
    """`((values[0] + values[1]) + (values[2] + values[3])) + ...`: in pairs, then pairs of pairs."""
    level = list(values)
    while len(level) > 1:  # one without a partner goes up as it is
        level = [
            left[0] + left[1] if len(left) > 1 else left[0]
            for left in (level[i : i + 2] for i in range(0, len(level), 2))
        ]
    return level[0]


def mean_in_pairs(arrays: Sequence[Array]) -> Array:
    """`sum_in_pairs(arrays) / N`, in the arrays' own dtype."""
    total = sum_in_pairs(arrays)
    return np.asarray(total / total.dtype.type(len(arrays)))


@dataclass(frozen=True, slots=True)
class AdamWState:
    """Optimizer state of one parameter.

    Args:
        num_steps: Steps taken so far.
        exp_avg: Running mean of the gradient; the parameter's shape.
        exp_avg_sq: Running mean of its square; the parameter's shape.
    """

    num_steps: int
    exp_avg: Array
    exp_avg_sq: Array

    @classmethod
    def zeros_like(cls, param: Array) -> "AdamWState":
        """The state before the first step."""
        return cls(0, np.zeros_like(param), np.zeros_like(param))


@dataclass(frozen=True, slots=True)
class AdamWStep:
    """A parameter after one step, and its new state."""

    param: Array
    state: AdamWState


def adamw_step(
    param: Array,
    grad: Array,
    state: AdamWState,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> AdamWStep:
    """One step of AdamW with torch's defaults, out of place, in the parameter's dtype.

    Source:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), in the order of `torch.optim.AdamW`.
    """
    beta1, beta2 = betas
    num_steps = state.num_steps + 1
    exp_avg = state.exp_avg + (1 - beta1) * (grad - state.exp_avg)
    exp_avg_sq = beta2 * state.exp_avg_sq + (1 - beta2) * grad * grad
    denom = np.sqrt(exp_avg_sq) / math.sqrt(1 - beta2**num_steps) + eps
    decayed = param * (1 - lr * weight_decay)
    updated = decayed - (lr / (1 - beta1**num_steps)) * exp_avg / denom
    return AdamWStep(updated.astype(param.dtype), AdamWState(num_steps, exp_avg, exp_avg_sq))
