"""Ranks of a world on CUDA devices: what each of them calls first."""

import os
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
TIMEOUT_S = 30.0  # of a collective: whatever a test does wrong, it ends within a minute


def call(device: str, fn: Callable[..., T], *args: Any) -> T:
    """Call a function on a rank that has a device, with the kind of device ahead of its arguments."""
    if device == "cuda":
        _join()
    return fn(device, *args)


@cache
def _join() -> None:
    """Leave gloo's process group for one of NCCL, and of gloo for what is on the CPU.

    NCCL refuses two ranks of one host on one device, so where there are more ranks than devices each says that it is a
    host of its own.
    """
    rank, size, num_devices = dist.get_rank(), dist.get_world_size(), torch.cuda.device_count()
    if num_devices < size:
        os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
        os.environ |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(rank % num_devices)
    store = dist.PrefixStore("nccl", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size, timeout=timeout)
