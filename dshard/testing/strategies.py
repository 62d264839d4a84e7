"""Hypothesis strategies for sharded tensors: drawn in the parent process, so that all ranks get the same example.

Importing this module needs hypothesis (`pip install dshard[test]`); nothing else in `dshard.testing` does.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOAT_DTYPES, torch.int64, torch.bool, torch.complex64)

# 0, 1, fewer than the ranks, a multiple of them, and not a multiple.
_DIM_SIZES = (0, 1, 2, 3, 4, 5, 7, 8)


@dataclass(frozen=True, slots=True)
class TensorCase:
    """A tensor and how it is to be sharded; small and picklable, so it can be sent to the ranks instead of the tensor.

    Args:
        shape: Full shape.
        dtype: Element type.
        dim: Dim to cut, non-negative; None for a 0-d tensor.
        num_ranks: Ranks of the world.
        seed: Seed of the values.
        contiguous: Whether `full()` is contiguous; if not, it is a transposed view (only for 2 dims and more).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None
    num_ranks: int
    seed: int = 0
    contiguous: bool = True

    def full(self, salt: int = 0) -> torch.Tensor:
        """The full tensor, equal on every rank; `salt` gives further tensors of the same case."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + salt)
        transposed = not self.contiguous and len(self.shape) > 1
        shape = self.shape[::-1] if transposed else self.shape
        if self.dtype == torch.bool:
            values = torch.randint(0, 2, shape, generator=generator).bool()
        elif self.dtype == torch.int64:
            values = torch.randint(-(2**40), 2**40, shape, generator=generator)
        else:
            values = torch.randn(
                shape, generator=generator, dtype=torch.complex64 if self.dtype.is_complex else torch.float64
            ).to(self.dtype)
        return values.permute(*reversed(range(len(shape)))) if transposed else values


def shapes(*, min_dims: int = 0, max_dims: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    """Full shapes: 0-d, empty, one element, prime sizes. Shrinks towards fewer and smaller dims."""
    return st.lists(st.sampled_from(_DIM_SIZES), min_size=min_dims, max_size=max_dims).map(tuple)


def dtypes(*, floating: bool = False) -> st.SearchStrategy[torch.dtype]:
    """fp32, fp64, bf16, fp16, and unless `floating` also int64, bool and complex64. Shrinks towards fp32."""
    return st.sampled_from(FLOAT_DTYPES if floating else DTYPES)


def world_sizes(*, min_size: int = 1, max_size: int = 4) -> st.SearchStrategy[int]:
    """Numbers of ranks. Shrinks towards the smallest world."""
    return st.integers(min_size, max_size)


def dims(shape: tuple[int, ...]) -> st.SearchStrategy[int | None]:
    """A dim of `shape`, non-negative; None if it has none."""
    return st.integers(0, len(shape) - 1) if shape else st.none()


@st.composite
def tensor_cases(
    draw: st.DrawFn,
    *,
    min_dims: int = 0,
    max_dims: int = 3,
    floating: bool = False,
    min_ranks: int = 1,
    max_ranks: int = 4,
) -> TensorCase:
    """Whole cases: shape, dtype, dim, world, seed and contiguity."""
    shape = draw(shapes(min_dims=min_dims, max_dims=max_dims))
    return TensorCase(
        shape=shape,
        dtype=draw(dtypes(floating=floating)),
        dim=draw(dims(shape)),
        num_ranks=draw(world_sizes(min_size=min_ranks, max_size=max_ranks)),
        seed=draw(st.integers(0, 2**16)),
        contiguous=draw(st.booleans()) or len(shape) < 2,
    )
