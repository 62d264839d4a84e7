"""Clipping: FSDP2's bits under every strategy; over several process groups ranks whose norms differ say so."""

import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dshard
from dshard.testing import WorldPool


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


KINDS = ["full", "ddp", "zero1", "zero2", "keep", "hybrid(2)", {"*.weight": "ddp", "*": "full"}]


def trained(shard: Any, order: float, foreach: bool | None) -> tuple[list[float], list[float], list[bool]]:
    """Norms, as FSDP2's users write it, losses, and whether norms are tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    for layer in (model[0], model[2]):
        shard(layer)
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    norms, losses = [], []
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = model(x).square().mean()
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=order, foreach=foreach)
        norms.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return norms, losses, [isinstance(norm, torch.Tensor), type(norm.full_tensor()) is torch.Tensor]


def every_strategy(order: float, foreach: bool | None) -> list[Any]:
    expected = trained(dshard.fully_shard if dist.get_world_size() > 2 else fully_shard, order, foreach)
    found = {str(kind): trained(partial(dshard.fully_shard, strategy=kind), order, foreach) for kind in KINDS}
    return [(kind, each, expected) for kind, each in found.items() if each != expected]


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf"), 3.0])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_torchs_clipping_gives_the_same_bits_under_every_strategy_and_of_two_ranks_fsdp2s(
    worlds: WorldPool, num_ranks, order, foreach
):
    assert worlds.run(num_ranks, every_strategy, order, foreach) == [[]] * num_ranks


def over_a_mesh(order: float) -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return trained(partial(dshard.fully_shard, mesh=mesh), order, None) == trained(
        partial(fully_shard, mesh=mesh), order, None
    )


@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_torchs_clipping_gives_fsdp2s_bits_over_replicas(worlds: WorldPool, order):
    assert worlds.run(4, over_a_mesh, order) == [True] * 4


def norms_beside_other_values() -> list[Any]:
    weight: Any = dshard.fully_shard(nn.Linear(4, 4)).weight.detach()
    norm: Any = weight.norm()
    own = torch.ones(())
    agreed = [norm, 2 * norm, torch.stack([norm, norm]), dshard_norm(), weight.norm(1)]
    return [
        [type(value.full_tensor()) is torch.Tensor for value in agreed],
        [type(value) is torch.Tensor for value in (norm * own, torch.stack([norm, own]), own + norm)],
        torch.equal(pickle.loads(pickle.dumps(norm)), norm) and type(pickle.loads(pickle.dumps(norm))) is torch.Tensor,
        f"{norm:.3f}" == f"{norm.item():.3f}",
    ]


def dshard_norm() -> Any:
    layer = dshard.fully_shard(nn.Linear(4, 4))
    layer(torch.ones(2, 4)).sum().backward()
    return dshard.clip_grad_norm_(layer.parameters(), 1.0)


def test_a_norm_is_a_plain_tensor_that_also_gives_its_full_value(worlds: WorldPool):
    assert worlds.run(2, norms_beside_other_values) == [[[True] * 5, [True] * 3, True, True]] * 2
