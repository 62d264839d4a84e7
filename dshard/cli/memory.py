"""How many bytes of training state a rank holds, counted from the tensors themselves."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of training state on one rank, and the most this process ever held of anything.

    Attributes:
        parameters, gradients, optimizer: what this rank holds between steps.
        peak: on CUDA the allocator's peak, else the peak of the process's resident memory (with Python and torch).
    """

    parameters: int
    gradients: int
    optimizer: int
    peak: int

    @property
    def total(self) -> int:
        """Parameters, gradients and optimizer state together."""
        return self.parameters + self.gradients + self.optimizer


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that this rank holds of some tensors: of a DTensor, its shard.

    Communicates: nothing.
    """
    num_bytes = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        num_bytes += local.numel() * local.element_size()
    return num_bytes


def peak_bytes(device: torch.device) -> int:
    """The most memory this process has held so far, on its device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def count_state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> StateBytes:
    """Counts what this rank holds now.

    Communicates: nothing.
    """
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return StateBytes(
        parameters=local_bytes(parameters),
        gradients=local_bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
        optimizer=local_bytes(states),
        peak=peak_bytes(device),
    )


def gather_state_bytes(mine: StateBytes) -> list[StateBytes]:
    """Every rank's count, in rank order.

    Communicates: one all-gather of four numbers.
    """
    gathered: list[StateBytes] = [mine] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered
