"""Ranks of a world on the simulated accelerator: what each of them calls first."""

from functools import cache

import torch.distributed as dist

from tests.accelerator import device


def begin(seed: int, mode: str, *, with_cpu: bool) -> None:
    """Have streams run as a seed draws, and the default process group know the accelerator, and the CPU if asked."""
    device.start().configure(seed, mode, True, False)
    _join("cpu:gloo,sim:simccl" if with_cpu else "simccl")


@cache
def _join(backend: str) -> None:
    store = dist.PrefixStore("accelerator", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
