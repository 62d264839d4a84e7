"""Ranks of a world on the simulated accelerator: what each of them calls first."""

from functools import cache

import torch.distributed as dist

from tests.accelerator import device


@cache
def join(backend: str) -> None:
    """Have the default process group be of that backend: of the accelerator alone, or of the CPU, too."""
    device.start()
    store = dist.PrefixStore("accelerator", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def configure(seed: int, mode: str) -> None:
    """Draw the order in which streams run from a seed."""
    device.start().configure(seed, mode, True, False)


def rank() -> int:
    """This process's."""
    return int(dist.get_rank())
