"""Optimizers of torchao: states of few bits, made by `DTensor.from_local`, and a step that is compiled."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import dshard
from dshard.testing import WorldPool

pytest.importorskip("torchao")


def trained(kind: str, name: str, folder: Path) -> list[Tensor]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"{kind}{dist.get_rank()}")
    torch._dynamo.reset()
    warnings.simplefilter("ignore")
    from torchao import optim

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 256), nn.Tanh())  # each shape of a parameter is compiled for
    if kind == "FSDP2":
        torch_fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        dshard.fully_shard(model)
    optimizer = getattr(optim, name)(model.parameters(), 1e-2)
    for step in range(2):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor().detach() for param in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])  # AdamWFp8 takes the ways of these
def test_the_bits_are_those_of_fsdp2(worlds: WorldPool, name, tmp_path):
    expected = worlds.run(2, trained, "FSDP2", name, tmp_path, timeout_s=240.0)[0]
    for found in worlds.run(2, trained, "dshard", name, tmp_path, timeout_s=240.0):
        assert all(map(torch.equal, found, expected))
