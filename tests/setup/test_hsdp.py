"""Shards that exist more than once: a two-dimensional mesh replicates over its first dim and shards over its second."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.tensor import DTensor, Replicate, Shard

import dshard
from dshard import checkpoint
from dshard.testing import WorldPool
from tests.collectives.test_native_backends import native

pytestmark = pytest.mark.slow
SHAPES = [(2, 2), (2, 1), (1, 2), (3, 1), (4, 1)]


class Net(nn.Module):
    """Even and uneven dims, a scalar, a tied weight, and a parameter that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scale, self.spare = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(3))

    def forward(self, ids: Tensor, with_spare: bool) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        x = self.head(self.norm(x)) * self.scale
        return x + self.spare.sum() if with_spare else x


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def build(mesh: DeviceMesh | None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net().double()
    if mesh is not None:
        for block in model.blocks:
            dshard.fully_shard(block, mesh=mesh, **options)
        dshard.fully_shard(model, mesh=mesh, **options)
    return model


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    ids = torch.randint(0, 10, (2, 5), generator=torch.Generator().manual_seed(100 * step + rank))
    return nn.functional.cross_entropy(model(ids[:, :-1], rank % 2 == step % 2).flatten(0, 1), ids[:, 1:].flatten())


def plain_weights(num_ranks: int, num_steps: int = 5) -> dict[str, Tensor]:
    """After AdamW steps of one process on the data of all ranks."""
    model = build(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(num_steps):
        for micro in range(2):
            (sum(loss_of(model, 2 * step + micro, r) for r in range(num_ranks)) / num_ranks).backward()
        dshard.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def train(shape: tuple[int, int], is_native: bool = False, options: Any = None) -> dict[str, Tensor]:
    """The same on a mesh, with two micro-batches, the first without sync in every other step."""
    model = build(mesh_of(shape), **(options or {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1 or step % 2 == 0)
            loss_of(model, 2 * step + micro, dist.get_rank()).backward()
        dshard.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor() for name, p in model.named_parameters()}


def train_natively(*args: Any) -> dict[str, Tensor]:
    with native():
        return train(*args)


@pytest.mark.parametrize("fn", [train, train_natively])
@pytest.mark.parametrize("shape", SHAPES)
def test_training_equals_one_process_and_replicas_stay_equal(worlds: WorldPool, shape, fn):
    num_ranks = shape[0] * shape[1]
    want, found = plain_weights(num_ranks), worlds.run(num_ranks, fn, shape)
    for got in found:
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-8, atol=1e-10)
            assert torch.equal(got[name], found[0][name]), name


@pytest.mark.parametrize("options", [{"reshard_after_forward": False}, {"reshard_after_forward": 2}])
def test_resharding_or_not_changes_nothing(worlds: WorldPool, options):
    for got in worlds.run(4, train, (2, 2), False, options):
        for name, value in plain_weights(4).items():
            torch.testing.assert_close(got[name], value, rtol=1e-8, atol=1e-10)


# --- what travels ----------------------------------------------------------------------------------------------------


def sent_bytes(shape: tuple[int, int]) -> dict[str, int]:
    torch.manual_seed(0)
    model = dshard.fully_shard(nn.Linear(32, 32, bias=False), mesh=mesh_of(shape))
    with dshard.CommTrace() as trace:
        model(torch.ones(2, 32, requires_grad=True)).sum().backward()
    return {
        kind: sum(r.payload_bytes for r in trace.select(kind))
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4), (2, 1)])
def test_bytes_within_and_between_replicas_are_those_of_the_formula(worlds: WorldPool, shape):
    replicas, ranks = shape
    full = 32 * 32 * 4
    for sent in worlds.run(replicas * ranks, sent_bytes, shape):
        assert sent["all_gather"] == full * (ranks - 1) // ranks  # the root keeps its copy for the backward
        assert sent["reduce_scatter"] == full * (ranks - 1) // ranks
        between = 2 * (replicas - 1) / replicas * (full // ranks)
        assert sent["all_reduce"] == between


# --- what it looks like ----------------------------------------------------------------------------------------------


def looks() -> list[Any]:
    model = build(mesh_of((2, 2)))
    weight = model.blocks[0][0].weight
    state = model.state_dict()["blocks.0.0.weight"]
    plain = build(None).blocks[0][0].weight
    whole = weight.redistribute(placements=[Replicate(), Replicate()])
    return [
        isinstance(weight, DTensor),
        weight.placements == state.placements == (Replicate(), Shard(0)),
        tuple(weight.to_local().shape) == ((4, 6) if dist.get_rank() % 2 == 0 else (3, 6)),
        torch.equal(weight.full_tensor(), plain),
        torch.equal(whole.to_local(), plain),
        torch.equal(torch.as_tensor(weight.sum().item()), torch.as_tensor(weight.full_tensor().sum().item()))
        or abs(weight.sum().item() - plain.sum().item()) < 1e-12,
    ]


def test_parameters_say_where_they_lie(worlds: WorldPool):
    assert worlds.run(4, looks) == [[True] * 6] * 4


def initialized(seed_per_rank: bool) -> Tensor:
    model = build(mesh_of((2, 2)))
    torch.manual_seed(7 + dist.get_rank() if seed_per_rank else 7)
    with torch.no_grad():
        model.blocks[0][0].weight.normal_()
    return model.blocks[0][0].weight.full_tensor()


@pytest.mark.parametrize("seed_per_rank", [False, True])
def test_random_fills_are_equal_on_all_replicas(worlds: WorldPool, seed_per_rank):
    found = worlds.run(4, initialized, seed_per_rank)
    torch.manual_seed(7)
    want = torch.empty(7, 6, dtype=torch.float64).normal_()
    assert all(torch.equal(f, want) for f in found)


# --- ranks that differ -----------------------------------------------------------------------------------------------


def shard_differing(rank: int, sync: Any) -> Any:
    """Shard a layer whose weights differ on one rank; gives the first weight, or the error."""
    torch.manual_seed(1 if dist.get_rank() == rank else 0)
    layer = nn.Linear(2, 2)
    try:
        dshard.fully_shard(layer, mesh=mesh_of((2, 2)), sync=sync)
    except dshard.DivergenceError as error:
        return str(error)
    return layer.weight.full_tensor()


@pytest.mark.parametrize("rank", [1, 2])
def test_initial_weights_that_differ_on_any_replica_are_named_or_replaced(worlds: WorldPool, rank):
    assert all("must start from the same weights" in e for e in worlds.run(4, shard_differing, rank, "check"))
    found = worlds.run(4, shard_differing, rank, "broadcast")
    torch.manual_seed(0)
    want = nn.Linear(2, 2).weight
    assert all(torch.equal(f, want) for f in found)


def write_on_one_replica() -> str:
    model = build(mesh_of((2, 2)))
    if dist.get_rank() >= 2:
        with torch.no_grad():
            model.head.weight.mul_(1.5)
    try:
        loss_of(model, 0, dist.get_rank()).backward()
        model.head.weight.grad.to_local()
    except dshard.DivergenceError as error:
        return str(error)
    return ""


def write_on_one_replica_natively() -> str:
    with native():
        return write_on_one_replica()


TOLD = {
    write_on_one_replica: "all replicas must hold the same values",
    write_on_one_replica_natively: "must write the same to a sharded tensor",
}


@pytest.mark.parametrize("fn", TOLD)
def test_a_write_on_one_replica_alone_is_told_in_the_backward(worlds: WorldPool, fn):
    for said in worlds.get_world(4).run(fn):
        assert TOLD[fn] in said


def write_on_one_replica_and_broadcast() -> float:
    """As torch's own test of HSDP does, and people who load on the first replica alone; then a step."""
    mesh = mesh_of((2, 2))
    model = build(mesh)
    with torch.no_grad():
        for param in model.parameters():
            if dist.get_rank() < 2:
                param.detach().mul_(1.5)
            dist.broadcast(param.to_local(), dist.get_rank() % 2, group=mesh.get_group(0))
    loss_of(model, 0, 0).backward()
    return float(sum(p.grad.full_tensor().sum() for p in model.parameters()))


def test_replicas_that_take_what_one_has_written_go_on(worlds: WorldPool):
    found = worlds.get_world(4).run(write_on_one_replica_and_broadcast)
    assert found == [found[0]] * 4
    assert found[0] != 0


def write_in_two_ways(strategy: str) -> float:
    """One replica through the parameters, the other through their memory, which counts no writes; then a step."""
    model = build(mesh_of((2, 2)), strategy=strategy)
    with torch.no_grad():
        for param in model.parameters():
            (param if dist.get_rank() < 2 else param.to_local()).mul_(1.5)
    loss_of(model, 0, 0).backward()
    return float(sum(p.grad.full_tensor().sum() for p in model.parameters()))


@pytest.mark.parametrize("strategy", ["full", "split(2)"])
def test_replicas_with_the_same_values_go_on_however_they_were_written(worlds: WorldPool, strategy):
    found = worlds.get_world(4).run(write_in_two_ways, strategy)
    assert found == [found[0]] * 4
    assert found[0] != 0


# --- checkpoints -----------------------------------------------------------------------------------------------------


def save_then_load(path: str, shape: tuple[int, ...] | None, is_saving: bool) -> Any:
    """Save after a step at 2 x 2 ranks; or load at other ranks, and give the weights and moments."""
    mesh = mesh_of(shape) if shape is not None and len(shape) == 2 else None  # type: ignore[arg-type]
    model = build(mesh if mesh is not None else init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if is_saving:
        loss_of(model, 0, dist.get_rank()).backward()
        optimizer.step()
        checkpoint.save(path, model, optimizer)
    else:
        checkpoint.load(path, model, optimizer)
    moments = [s["exp_avg"] for s in optimizer.state.values()]
    moments = [m.full_tensor() if isinstance(m, DTensor) else m for m in moments]  # that of a 0-d one is plain
    return [p.full_tensor() for p in model.parameters()], moments


@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (3,), (1,)])
def test_a_checkpoint_of_replicas_loads_at_any_other_mesh(worlds: WorldPool, tmp_path, shape):
    (weights, moments), *_ = worlds.run(4, save_then_load, str(tmp_path / "c"), (2, 2), True)
    num_ranks = shape[0] * shape[-1] if len(shape) == 2 else shape[0]
    for got_weights, got_moments in worlds.run(num_ranks, save_then_load, str(tmp_path / "c"), shape, False):
        assert all(torch.equal(a, b) for a, b in zip(got_weights, weights, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(got_moments, moments, strict=True))


def by_name(dims: dict[str, str]) -> tuple[Any, ...]:
    """How a weight lies when a part of a mesh of three dims is named."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "replicate", "shard"))
    layer = dshard.fully_shard(nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))
    return layer.weight.placements, tuple(layer.weight.to_local().shape), layer.weight.device_mesh.mesh_dim_names


def test_dims_of_a_larger_mesh_are_taken_by_name(worlds: WorldPool):
    both, alone = {"replicate": "replicate", "shard": "shard"}, {"shard": "replicate"}
    assert worlds.run(4, by_name, both) == [((Replicate(), Shard(0)), (2, 4), ("replicate", "shard"))] * 4
    assert worlds.run(4, by_name, alone) == [((Shard(0),), (2, 4), ("replicate",))] * 4


def unknown_name() -> str:
    with pytest.raises(dshard.StateError) as caught:
        by_name({"shard": "tp"})
    return str(caught.value)


def test_a_dim_that_the_mesh_does_not_have_is_named(worlds: WorldPool):
    assert "must name dims of the mesh, which has ('pp', 'replicate', 'shard')" in worlds.run(4, unknown_name)[0]
