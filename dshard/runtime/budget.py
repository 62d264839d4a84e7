"""How much memory there is for gathered copies, as all ranks agree."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from dshard import collectives
from dshard.collectives import ReduceOp
from dshard.units.unit import Unit

_SHARE = 0.8  # of the free memory: the rest is for what a later step needs more


def agreed_free_bytes(units: Sequence[Unit]) -> int:
    """Bytes for gathered copies on the rank that has the least: four fifths of what is free.

    Communicates:
        An all-reduce of 8 bytes.
    """
    param = next(p for unit in units for p in unit.params)
    num_sharing = int(os.environ.get("LOCAL_WORLD_SIZE", param.shard_group.world_size))
    mine = torch.tensor(
        [_free_bytes(param.offload.compute if param.offload is not None else param.device, num_sharing)],
        device=param.shard_group.device_type,
    )
    least = collectives.all_reduce(
        [mine], param.shard_group, ReduceOp.MIN, label="memory_budget", everywhere=True
    ).wait()[0]
    return int(least.item() * _SHARE)


def _free_bytes(device: torch.device, num_sharing: int) -> int:
    """Free memory of a device, with what its allocator holds unused; on the CPU, an equal part of the machine's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return (found[0] if found else 0) // num_sharing
