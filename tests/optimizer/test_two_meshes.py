"""One optimizer over parameters of several meshes."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dshard
from dshard.testing import WorldPool
from tests.twins import close, data, mlp, same_weights, twins


def two_meshes(kind: str) -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    _, model = twins(mlp, lambda m: None)
    dshard.fully_shard(model[0], mesh=mesh["a"])
    dshard.fully_shard(model[2], mesh=mesh["b"])
    dshard.fully_shard(model[4], mesh=mesh["b"])
    params = list(model.parameters())
    model(data(3, 6, rank=0)).square().sum().backward()  # the same batch on every rank
    norm = (nn.utils.clip_grad_norm_ if kind == "torch" else dshard.clip_grad_norm_)(params, 0.25)
    optimizer = torch.optim.AdamW(params, lr=0.1)
    optimizer.step()
    plain, _ = twins(mlp, lambda m: None)
    plain(data(3, 6, rank=0)).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.25)
    torch.optim.AdamW(plain.parameters(), lr=0.1).step()
    close(norm.float(), expected, "norm")
    same_weights(plain, model)
    return norm.item()


@pytest.mark.parametrize("kind", ["torch", "dshard"])
def test_parameters_over_two_meshes_are_clipped_and_stepped_together(worlds: WorldPool, kind):
    norms = worlds.run(4, two_meshes, kind)
    assert len(set(norms)) == 1
