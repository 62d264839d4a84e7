"""Which process this is, which device it uses, and the process group of all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(minutes=5)
_VARIABLES = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # and their values without torchrun
# gloo's worker threads free the tensors of the last collective after its `wait` has returned, and need the GIL for it.
# An interpreter that closes meanwhile aborts the process ("terminate called without an active exception").
_GLOO_GRACE_S = 0.2


@dataclass(frozen=True, slots=True)
class World:
    """This process among all of them, as torchrun's environment says; one process where it says nothing."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def backend(self) -> str:
        """The process group's backend for this device."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes reports."""
        return self.rank == 0


def read_world(environ: Mapping[str, str]) -> World:
    """Rank, world size and device by torchrun's variables; without them this one process."""
    rank, size, local_rank = (int(environ.get(name, usual)) for name, usual in _VARIABLES.items())
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    return World(rank=rank, size=size, local_rank=local_rank, device=device)


@contextmanager
def process_group(world: World) -> Iterator[None]:
    """The default process group for the length of a ``with`` block.

    Communicates: joins all ranks (a world of one needs no network).
    """
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    device_id = world.device if world.device.type == "cuda" else None
    if world.size == 1:
        store = dist.HashStore()
        dist.init_process_group(world.backend, store=store, rank=0, world_size=1, device_id=device_id, timeout=_TIMEOUT)
    else:
        dist.init_process_group(
            world.backend, rank=world.rank, world_size=world.size, device_id=device_id, timeout=_TIMEOUT
        )
    try:
        yield
    finally:
        if world.backend == "gloo":
            time.sleep(_GLOO_GRACE_S)
        dist.destroy_process_group()
