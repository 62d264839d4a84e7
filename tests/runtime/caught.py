"""Models whose forwards and backwards raise where they are told to, as of a bad batch."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["STRATEGIES", "WIDTH", "BatchError", "Net", "batch"]

WIDTH = 8
STRATEGIES = ["full", "keep", "zero1", "zero2", "ddp", "split(2)"]


class BatchError(Exception):
    """A bad batch."""


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise BatchError("bad gradient")


class Net(nn.Module):
    """Layers, one of which raises, or is skipped, where `fault` says so: ("forward", "backward" or "skip", its number).

    Args:
        depth: Number of layers.
        recomputes: Whether layers are checkpointed.
    """

    def __init__(self, depth: int, recomputes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(depth)])
        self.recomputes = recomputes
        self.fault: tuple[str, int] | None = None

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if self.fault == ("forward", i):
                raise BatchError("bad batch")
            if self.fault == ("skip", i):
                continue
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
            x = torch.tanh(_Raises.apply(x) if self.fault == ("backward", i) else x)
        return x


def batch(step: int, micro: int, rank: int) -> Tensor:
    """Shape (3, `WIDTH`); the same for the same numbers."""
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))
