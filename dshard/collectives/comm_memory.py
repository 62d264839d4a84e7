"""Memory that a backend moves faster than any other: that of its own allocator, or memory that all ranks map."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dshard.collectives._c10d import ProcessGroup, kept_for


class CommMemory(Protocol):
    """Where the buffers of a group's collectives lie; equal ones are the same."""

    def why_missing(self, group: ProcessGroup, device: torch.device) -> str:
        """Why a process group has no such memory on a device, in words; nothing where it has."""
        ...

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> Tensor:
        """A flat tensor with any content. All ranks must call this alike."""
        ...

    def register(self, tensor: Tensor, group: ProcessGroup) -> None:
        """Ahead of each collective on a tensor that `allocate` has given; all ranks must call this alike."""
        ...


@dataclass(frozen=True)
class BackendMemory:
    """That of the backend's own allocator. NCCL's lets switches reduce without a copy (SHARP)."""

    def why_missing(self, group: ProcessGroup, device: torch.device) -> str:
        """As `CommMemory.why_missing`."""
        backend = group._get_backend(device)
        return "" if backend.supports_tensor_alloc(device) else f"backend '{backend.name()}' has no allocator"

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> Tensor:
        """As `CommMemory.allocate`."""
        return group._get_backend(device).allocate_tensor(numel, dtype=dtype, device=device)

    def register(self, tensor: Tensor, group: ProcessGroup) -> None:
        """Nothing: the allocator has."""


@dataclass(frozen=True)
class SymmetricMemory:
    """Memory of CUDA devices that lies alike on all ranks, and is mapped by all: NCCL has faster collectives for it.

    Where a process group was made with `cta_policy = NCCL_CTA_POLICY_ZERO`, these are copies that take no kernel.

    Args:
        backend: Of torch's symmetric memory; one for all of a process.
    """

    backend: str = "NCCL"

    def why_missing(self, group: ProcessGroup, device: torch.device) -> str:
        """As `CommMemory.why_missing`; the first time for a group, all of its ranks try it together."""
        if device.type != "cuda":
            return f"it is memory of CUDA devices, and this is {device}"
        if "nccl" not in dist.get_backend(group):
            return f"it is of NCCL, and the process group's backend is {dist.get_backend(group)}"
        if not hasattr(_torchs(), "get_mem_pool"):
            return f"torch {torch.__version__} has no pool of it"
        return kept_for(group, ("symmetric memory", self.backend), lambda: self._try(group, device))

    def _try(self, group: ProcessGroup, device: torch.device) -> str:
        """What stands against it on any rank."""
        dist.barrier(group)  # torch makes a communicator at the first collective
        why = ""
        try:
            _torchs().set_backend(self.backend)
            self.register(self.allocate(1, torch.float32, device, group), group)
        except RuntimeError as error:
            why = f"torch says: {error}"
        failed = torch.tensor([float(bool(why))], device=device)
        dist.all_reduce(failed, group=group)
        return why or ("it failed on another rank" if failed.item() else "")

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> Tensor:
        """As `CommMemory.allocate`."""
        with torch.cuda.use_mem_pool(_torchs().get_mem_pool(device)):
            return torch.empty(numel, dtype=dtype, device=device)

    def register(self, tensor: Tensor, group: ProcessGroup) -> None:
        """As `CommMemory.register`."""
        _torchs().rendezvous(tensor, group=group.group_name)


def _torchs() -> Any:
    """Torch's module, which brings Triton along where that is installed."""
    import torch.distributed._symmetric_memory as symmetric_memory

    return symmetric_memory
