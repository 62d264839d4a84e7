"""Clipping over several process groups: ranks that would scale one gradient differently say so, and none waits."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dshard
from dshard.testing import WorldPool

pytestmark = pytest.mark.slow


def clip_over_two_meshes(extra: list[float]) -> str:
    """What clipping says on this rank, whose plain parameter has the gradient `extra[rank]`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    params: list[torch.Tensor] = []
    for axis in ("rows", "columns"):
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        dshard.fully_shard(layer, mesh=mesh[axis])
        layer(torch.ones(2, 4)).sum().backward()
        params += layer.parameters()
    plain = nn.Parameter(torch.zeros(1))
    plain.grad = torch.tensor([float(extra[torch.distributed.get_rank()])])
    try:
        return f"{float(dshard.clip_grad_norm_([*params, plain], 0.5)):.4f}"
    except dshard.DivergenceError as error:
        return str(error)


@pytest.mark.parametrize("extra", [[1, 1, 1, 9], [1, 1, 9, 9], [1, 9, 1, 9]])
def test_ranks_whose_norms_differ_say_so_in_every_group_that_they_share(worlds: WorldPool, extra):
    found = worlds.run(4, clip_over_two_meshes, extra)
    groups = {"rows": [(0, 2), (1, 3)], "columns": [(0, 1), (2, 3)]}
    for rank, said in enumerate(found):
        differs = any(rank in g and extra[g[0]] != extra[g[1]] for parts in groups.values() for g in parts)
        assert ("must scale it alike" in said) == differs, (rank, said)


def test_ranks_whose_norms_are_equal_clip(worlds: WorldPool):
    assert len(set(worlds.run(4, clip_over_two_meshes, [2.0] * 4))) == 1
