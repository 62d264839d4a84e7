"""DTensors over all of a mesh, data parallelism's dims among them, as parameters: against FSDP2 and one process."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import dshard
from dshard import checkpoint
from dshard.testing import WorldPool, expect_error

pytestmark = pytest.mark.slow
WIDTH, HIDDEN = 6, 12
ALONG = {"1.weight": Shard(0), "1.bias": Shard(0), "3.weight": Shard(1)}  # over the dim of tensor parallelism
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]] = {
    "dp, tp": ((2, 2), ("dp", "tp"), {"shard": "dp"}),
    "tp, dp": ((2, 2), ("tp", "dp"), {"shard": "dp"}),
    "dp alone": ((2,), ("dp",), {"shard": "dp"}),
    "replicas, dp": ((2, 2), ("replicas", "dp"), {"shard": "dp", "replicate": "replicas"}),
    "replicas alone, tp": ((2, 2), ("dp", "tp"), {"replicate": "dp"}),
    "two as one": ((2, 2), ("a", "b"), {"shard": ("a", "b")}),
    "one of one, tp": ((1, 2), ("dp", "tp"), {"shard": "dp"}),
}


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


def distributed(mesh: DeviceMesh) -> nn.Sequential:
    """The model with parameters over all of a mesh, cut over the dim named tp."""
    model, names = plain(), mesh.mesh_dim_names or ()
    for name, param in list(model.named_parameters()):
        lies: list[Placement] = [ALONG.get(name, Replicate()) if n == "tp" else Replicate() for n in names]
        owner, _, own = name.partition(".")
        model.get_submodule(owner).register_parameter(own, nn.Parameter(distribute_tensor(param, mesh, lies)))
    return model


def batch(step: int, index: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + index))


def data_index(mesh: DeviceMesh, named: dict[str, Any]) -> tuple[int, int]:
    """This rank's number in data parallelism, and the number of all."""
    index, num = 0, 1
    for name in mesh.mesh_dim_names or ():
        if name != "tp":
            index, num = index * mesh[name].size() + mesh[name].get_local_rank(), num * mesh[name].size()
    return index, num


def train(model: nn.Module, mesh: DeviceMesh, named: dict[str, Any], num_steps: int = 5) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    index, _ = data_index(mesh, named)
    lies = [Replicate() if n == "tp" else Shard(0) for n in mesh.mesh_dim_names or ()]
    for step in range(num_steps):
        x = DTensor.from_local(batch(step, index), mesh, lies)
        model(x).redistribute(mesh, lies).to_local().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def sharded(mesh: DeviceMesh, named: dict[str, Any], how: Any = dshard.fully_shard) -> Any:
    model, dims = distributed(mesh), DataParallelMeshDims(**named)
    for layer in (model[1], model[3]):
        how(layer, mesh=mesh, dp_mesh_dims=dims)
    return how(model, mesh=mesh, dp_mesh_dims=dims)


def full(p: Any) -> Tensor:
    return p.full_tensor().detach()


def beside_others(kind: str) -> list[float]:
    """Largest differences of trained weights to FSDP2's, and to one process that takes all batches."""
    shape, names, named = MESHES[kind]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    ours = train(sharded(mesh, named), mesh, named)
    others = []
    if "shard" in named and not isinstance(named["shard"], tuple):
        others.append(train(sharded(mesh, named, torch_fully_shard), mesh, named))
    _, num = data_index(mesh, named)
    alone = plain()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        alone(torch.cat([batch(step, i) for i in range(num)])).square().mean().backward()
        optimizer.step()
    found = [
        max((full(p) - full(q)).abs().max().item() for p, q in zip(ours.parameters(), other.parameters(), strict=True))
        for other in others
    ]
    found.append(
        max((full(p) - q).abs().max().item() for p, q in zip(ours.parameters(), alone.parameters(), strict=True))
    )
    return found


@pytest.mark.parametrize("kind", MESHES)
def test_weights_are_those_of_fsdp2_and_of_one_process(worlds: WorldPool, kind):
    shape = MESHES[kind][0]
    for differences in worlds.run(int(torch.Size(shape).numel()), beside_others, kind):
        assert all(difference < 1e-6 for difference in differences)


def facts(path: str) -> dict[str, Any]:
    """What a parameter of such a model says, and what survives copies, pickles and files."""
    shape, names, named = MESHES["dp, tp"]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = train(sharded(mesh, named), mesh, named, 1)
    weight: Any = model[3].weight  # type: ignore[index]
    before = [full(p) for p in model.parameters()]
    checkpoint.save(path, model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    checkpoint.load(path, model)
    after = [full(p) for p in model.parameters()]
    copied = copy.deepcopy(model)
    norm = dshard.clip_grad_norm_(train_once(copied, mesh), 1e9)
    return {
        "mesh": weight.device_mesh == mesh,
        "placements": weight.placements,
        "local": tuple(weight.to_local().shape),
        "loaded": all(map(torch.equal, before, after)),
        "pickled": torch.equal(full(pickle.loads(pickle.dumps(weight))), full(weight)),
        "norm": float(norm) > 0,
    }


def train_once(model: Any, mesh: DeviceMesh) -> Any:
    index, _ = data_index(mesh, {})
    lies = [Shard(0), Replicate()]
    out = model(DTensor.from_local(batch(7, index), mesh, lies))
    out.redistribute(mesh, lies).to_local().square().mean().backward()
    return list(model.parameters())


def test_such_parameters_say_how_they_lie_and_can_be_copied_and_saved(worlds: WorldPool, tmp_path):
    expected = {
        "mesh": True,
        "placements": (Shard(0), Shard(1)),
        "local": (WIDTH // 2, HIDDEN // 2),
        "loaded": True,
        "pickled": True,
        "norm": True,
    }
    assert worlds.run(4, facts, str(tmp_path / "c")) == [expected] * 4


def step_of_plain_parameters_between(is_mean: bool) -> bool:
    """Whether a plain parameter among such DTensors gets the gradient that it gets as a DTensor."""
    shape, names, named = MESHES["dp, tp"]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    gradients = []
    for is_plain in (False, True):
        model: Any = distributed(mesh)
        if is_plain:
            model[0] = plain()[0]
        dims = DataParallelMeshDims(**named)
        dshard.fully_shard(model, mesh=mesh, dp_mesh_dims=dims, grad_reduce="mean" if is_mean else "sum")
        train_once(model, mesh)
        gradients.append([full(p.grad) for p in model.parameters()])
    return all(torch.allclose(a, b, atol=1e-7) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("is_mean", [True, False])
def test_plain_parameters_beside_them_get_the_same_gradients(worlds: WorldPool, is_mean):
    assert all(worlds.run(4, step_of_plain_parameters_between, is_mean))


def cut_over_data_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight, mesh, [Shard(0), Replicate()]))
    dshard.fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def test_a_parameter_that_is_cut_over_these_dims_already_is_refused_by_name(worlds: WorldPool):
    for kind, text in expect_error(worlds.get_world(4), cut_over_data_parallelism):
        assert kind == "PlacementError"
        assert text.startswith("weight: a DTensor parameter must be replicated over the dims of data parallelism")


def placed_where_nothing_is_cut() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dims = DataParallelMeshDims(replicate="dp")
    dshard.fully_shard(distributed(mesh), mesh=mesh, dp_mesh_dims=dims, shard_placement_fn=lambda param: Shard(0))


def test_a_placement_function_without_dims_to_shard_over_is_refused(worlds: WorldPool):
    for kind, text in expect_error(worlds.get_world(4), placed_where_nothing_is_cut):
        assert kind == "StateError"
        assert "dp_mesh_dims names no dims to shard over" in text
        assert text.endswith("Leave one of them out.")
