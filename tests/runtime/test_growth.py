"""What many steps leave behind."""

import gc
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dshard
from dshard import ShardedTensor
from dshard.testing import World
from tests.twins import data


def alive() -> tuple[int, int]:
    """Number and bytes of all tensors that Python knows."""
    gc.collect()
    tensors = [obj for obj in gc.get_objects() if issubclass(type(obj), Tensor)]
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, ShardedTensor) and not tensor.is_view else tensor
        if type(local) in (Tensor, nn.Parameter) and local.device.type == "cpu":
            storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return len(tensors), sum(storages.values())


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def many_steps(num_steps: int) -> list[tuple[int, int, int, int]]:
    """Tensors, their bytes, Python's blocks and resident memory: after a tenth of the steps, and after all."""
    torch.manual_seed(0)
    model: Any = nn.Linear(32, 32)
    dshard.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = data(4, 32)
    seen = []
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        loss = model(x).sum() + model.weight[step % 32, : 1 + step % 31].sum()  # views of ever new places
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            with torch.no_grad():
                model.weight.norm().item()
                model(x)
        if step in (num_steps // 10, num_steps):
            seen.append((*alive(), sys.getallocatedblocks(), resident_bytes()))
    return seen


def test_two_thousand_steps_leave_the_memory_of_two_hundred():
    with World(2) as world:  # of its own: what other tests leave behind is not counted
        seen = world.run(many_steps, 2000, timeout_s=120.0)
    for early, late in seen:
        assert late[0] - early[0] < 90, (early, late)  # messages may be under way: less than one per twenty steps
        assert late[1] - early[1] < 900_000, (early, late)  # less than an eighth of a weight per step
        assert late[2] - early[2] < 900, (early, late)  # blocks of Python: less than one per two steps
        assert late[3] - early[3] < 6_000_000, (early, late)  # a weight of 4 KB per step would be 7 MB
