"""Random programs: what trains a sharded model and an unsharded one alike, step by step, and compares all bits."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dshard

Dims = Sequence[tuple[int | str, ...] | None]
Make = Callable[[str, list[nn.Parameter]], torch.optim.Optimizer]


class Model(nn.Module):
    """Its gradient is what it is given: small multiples of 1/64, whose means over ranks are exact."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.own = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, grads: dict[int, Tensor]) -> Tensor:
        parts = [(self.own[i] * grad).sum() for i, grad in grads.items()]
        return torch.stack(parts).sum()


class Parallel(Model):
    """The same, of which parameters lie on a mesh of tensor parallelism.

    Args:
        shapes: Of the parameters.
        mesh: That mesh.
        dims: Along which each of them is cut over each dim of that, or "replicated"; None for one that is not on it.
    """

    def __init__(self, shapes: list[tuple[int, ...]], mesh: DeviceMesh, dims: Dims) -> None:
        super().__init__(shapes)
        self.mesh, self.dims = mesh, dims
        for i, each in enumerate(dims):
            if each is not None:
                placements = [Shard(dim) if isinstance(dim, int) else Replicate() for dim in each]
                self.own[i] = nn.Parameter(distribute_tensor(self.own[i].detach(), mesh, placements))

    def forward(self, grads: dict[int, Tensor]) -> Tensor:
        parts = []
        for i, grad in grads.items():
            if self.dims[i] is not None:
                grad = DTensor.from_local(grad, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
            part = (self.own[i] * grad).sum()
            parts.append(part.full_tensor() if isinstance(part, DTensor) else part)
        return torch.stack(parts).sum()


def gradients(shapes: list[tuple[int, ...]], missing: set[int], step: int) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.randint(-64, 64, shape, generator=generator) / 64 for shape in shapes]
    return {i: grad for i, grad in enumerate(drawn) if i not in missing}


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, dshard.ShardedTensor) else value


def check_states(found: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    theirs, own = expected.state_dict(), found.state_dict()
    assert own["param_groups"] == theirs["param_groups"], (own["param_groups"], theirs["param_groups"])
    assert own["state"].keys() == theirs["state"].keys()
    for number, states in theirs["state"].items():
        assert list(own["state"][number]) == list(states)
        for name, value in states.items():
            got = full(own["state"][number][name])
            assert type(got) is type(value) or isinstance(got, Tensor)
            assert torch.equal(torch.as_tensor(got), torch.as_tensor(value)), f"{number}: {name}"


def act(action: str, model: Any, optimizer: Any, plain: Any, other: Any) -> None:
    """What a program does between two steps, to the sharded one and to the plain one."""
    if action == "look":
        check_states(optimizer, other)
    elif action == "load":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        other.load_state_dict(copy.deepcopy(other.state_dict()))
    elif action == "switch":
        dshard.set_strategy(model, "ddp" if model.own[0].shard_layout.dim is not None else "full")
    elif action == "settings":
        for each in (optimizer, other):
            each.param_groups[0]["lr"] *= 0.5
    elif action == "clip":
        for each in (model, plain):
            torch.nn.utils.clip_grad_value_(each.parameters(), 0.25)


def run(
    make: Make,
    kind: str,
    shapes: list[tuple[int, ...]],
    strategy: Any,
    program: list[tuple[str, set[int]]],
    dims: Dims | None = None,
    num_replicas: int = 1,
    **options: Any,
) -> None:
    """Run a program.

    Args:
        make: Makes the optimizer.
        kind: Of which kind.
        shapes: Of the parameters.
        strategy: Of the sharded model.
        program: What is done ahead of each step, and which parameters have no gradient in it.
        dims: How parameters lie on a mesh of tensor parallelism over pairs of ranks, or pairs of pairs; None for none.
        num_replicas: Of what data parallelism beside it shards.
        options: For `fully_shard`.
    """
    plain, sharded = Model(shapes), Model(shapes)
    if dims is not None:
        num_axes = max(len(each) for each in dims if each is not None)
        shape = (num_replicas, dist.get_world_size() // num_replicas // 2**num_axes, *[2] * num_axes)
        names = ("replicate", "dp", "tp", "inner")[: len(shape)]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        data = mesh["replicate", "dp"] if num_replicas > 1 else mesh["dp"]
        sharded, options = Parallel(shapes, mesh[names[2:]], dims), options | {"mesh": data}
    dshard.fully_shard(sharded, strategy=strategy, **options)
    other, optimizer = make(kind, list(plain.parameters())), make(kind, list(sharded.parameters()))
    for step, (action, missing) in enumerate(program):
        grads = gradients(shapes, missing, step)

        def closure(model: Any, own: Any, grads: dict[int, Tensor] = grads) -> Tensor:
            own.zero_grad()
            loss = model(grads)
            loss.backward()
            return loss

        if action == "closure":
            optimizer.step(lambda: closure(sharded, optimizer))
            other.step(lambda: closure(plain, other))
        else:
            closure(sharded, optimizer)
            closure(plain, other)
            act(action, sharded, optimizer, plain, other)
            optimizer.step()
            other.step()
        for number, (p, q) in enumerate(zip(sharded.parameters(), plain.parameters(), strict=True)):
            assert torch.equal(p.full_tensor(), q), f"parameter {number} after step {step} ({action})"
    check_states(optimizer, other)


ACTIONS = ("none", "look", "load", "switch", "settings", "clip", "closure")
