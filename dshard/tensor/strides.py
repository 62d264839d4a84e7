"""Strides of full tensors, in elements."""

import torch
from torch import Tensor

__all__ = ["dense_stride", "restrided"]


def restrided(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A copy of a plain tensor, with other strides."""
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def dense_stride(full: Tensor) -> tuple[int, ...]:
    """Strides of `full` if it is dense in some dim order, else row-major ones."""
    return torch.empty_like(full, device="meta", memory_format=torch.preserve_format).stride()
