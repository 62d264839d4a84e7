"""Strides of full tensors, in elements."""

import torch
from torch import Tensor


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
