"""Experts over another mesh than the rest: DTensors over an expert-parallel mesh, or a smaller data-parallel one."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint as recompute

import dshard
from dshard import checkpoint
from dshard.testing import WorldPool, expect_error

pytestmark = pytest.mark.slow
WIDTH, NUM_EXPERTS, NUM_STEPS = 6, 4, 4


class Experts(nn.Module):
    """All experts see all tokens, weighted by the router; `to_local()` gives those of this rank, as in torchtitan."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 5) * 0.3)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 5, WIDTH) * 0.3)
        self.ep: DeviceMesh | None = None

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        if self.ep is None:
            return self.mixed(x, gates, self.up, self.down)
        x, gates = (gathered(t, self.ep) for t in (x, gates))
        first = NUM_EXPERTS // self.ep.size() * self.ep.get_local_rank()
        mine = gates[:, first : first + NUM_EXPERTS // self.ep.size()]
        out = self.mixed(x, mine, self.up.to_local(), self.down.to_local())
        return DTensor.from_local(out, self.ep, [Partial()]).redistribute(placements=[Shard(0)]).to_local()

    @staticmethod
    def mixed(x: Tensor, gates: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = torch.tanh(torch.bmm(x.expand(up.shape[0], *x.shape), up))
        return (torch.bmm(hidden, down) * gates.t().unsqueeze(-1)).sum(0)


def gathered(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The rows of all ranks; its gradient goes back to them."""
    rows = DTensor.from_local(x, mesh, [Shard(0)]).redistribute(placements=[Replicate()])
    return rows.to_local(grad_placements=[Partial()])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_EXPERTS), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.experts(x, self.router(x).softmax(-1))


def plain() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block()).double()


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def plain_run() -> tuple[dict[str, Tensor], list[Tensor]]:
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(NUM_STEPS):
        for rank in range(4):
            (model(rows(step, rank)).pow(2).mean() / 4).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}, norms


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """Of the dense parameters, and of the experts."""
    return init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("edp", "ep")
    )


def with_expert_parallelism(model: Any, mesh: DeviceMesh) -> None:
    for block in model[1:]:
        block.experts.ep = mesh
        for name in ("up", "down"):
            value = getattr(block.experts, name).detach()
            setattr(block.experts, name, nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])))


def build(how: str) -> Any:
    dense, both = meshes()
    model = plain()
    if how in ("modules", "function"):
        with_expert_parallelism(model, both["ep"])
    for block in model[1:]:
        if how == "modules":
            experts = dshard.fully_shard(block.experts, mesh=both["edp"])
            experts.set_gradient_divide_factor(4.0)
            dshard.fully_shard(block, mesh=dense)
            continue
        experts = {id(p) for p in block.experts.parameters()}
        chosen = {
            "function": FSDPMeshInfo(both["edp"], shard_mesh_dim=0),
            "smaller mesh": HSDPMeshInfo(both, shard_mesh_dim=1, replicate_mesh_dim=0),
            "replicated": DDPMeshInfo(dense, replicate_mesh_dim=0),
        }[how]

        def place(p: nn.Parameter, experts: set[int] = experts, chosen: Any = chosen) -> Any:
            return ShardPlacementResult(Shard(1), chosen) if id(p) in experts else None

        dshard.fully_shard(block, mesh=dense, shard_placement_fn=place)
        block.set_gradient_divide_factor(4.0)
    return dshard.fully_shard(model, mesh=dense)


HOWS = ["modules", "function", "smaller mesh", "replicated"]


def train(how: str, recomputed: bool) -> tuple[dict[str, Tensor], list[Tensor], tuple[Any, ...]]:
    model = build(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(NUM_STEPS):
        x = model[0](rows(step, dist.get_rank())) if recomputed else rows(step, dist.get_rank())
        for block in model[1:] if recomputed else ():
            x = recompute(block, x, use_reentrant=False)
        (x if recomputed else model(x)).pow(2).mean().backward()
        clip = dshard.clip_grad_norm_ if step % 2 else nn.utils.clip_grad_norm_
        norms.append(clip(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
    lie = model[1].experts.up.placements, tuple(model[1].experts.up.to_local().shape)
    return {n: p.full_tensor().detach() for n, p in model.named_parameters()}, norms, lie


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_experts_over_a_mesh_of_their_own_train_as_in_one_process(worlds: WorldPool, how, recomputed):
    weights, norms = plain_run()
    for got_weights, got_norms, _ in worlds.run(4, train, how, recomputed):
        for name, value in weights.items():
            torch.testing.assert_close(
                got_weights[name], value, rtol=1e-8, atol=1e-10, msg=lambda m, name=name: name + m
            )
        for got, want in zip(got_norms, norms, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=0)


def test_a_placement_with_a_mesh_says_where_a_parameter_lies(worlds: WorldPool):
    want = {
        "modules": ("(_StridedShard(dim=0, sf=2), Shard(dim=0))", (1, WIDTH, 5)),
        "function": ("(Shard(dim=1), Shard(dim=0))", (2, WIDTH // 2, 5)),
        "smaller mesh": ("(Replicate(), Shard(dim=1))", (4, WIDTH // 2, 5)),
        "replicated": ("(Replicate(),)", (4, WIDTH, 5)),
    }
    for how, (placements, shape) in want.items():
        for _, _, lie in worlds.run(4, train, how, False):
            assert (str(lie[0]), lie[1]) == (placements, shape)


def alive_after_forward(how: str) -> int:
    """Elements of the experts' gathered weights that are alive between forward and backward."""
    model = build(how)
    out = model(rows(0, dist.get_rank())).sum()
    found = sum(u.full_bytes for u in {p.gather_source for p in model[1].experts.parameters()} if u.is_gathered)
    out.backward()
    return found


@pytest.mark.parametrize("how", HOWS[:3])
def test_experts_are_freed_between_forward_and_backward(worlds: WorldPool, how):
    assert worlds.run(4, alive_after_forward, how) == [0] * 4


def local_of_a_forward() -> list[bool]:
    """Outside of a forward, `to_local` is the shard."""
    model = build("modules")
    experts = model[1].experts
    seen: list[Any] = []
    experts.register_forward_pre_hook(lambda *_: seen.append(experts.up.to_local()))
    model(rows(0, dist.get_rank()))
    first = 2 * experts.ep.get_local_rank()
    return [
        tuple(experts.up.to_local().shape) == (1, WIDTH, 5),
        tuple(seen[0].shape) == (2, WIDTH, 5),
        torch.equal(seen[0].full_tensor(), plain()[1].experts.up[first : first + 2]),
        seen[0].requires_grad and not experts.up.to_local().requires_grad,
    ]


def test_within_a_forward_to_local_is_the_local_tensor_of_the_dtensor(worlds: WorldPool):
    assert worlds.run(4, local_of_a_forward) == [[True] * 4] * 4


def write_to_local() -> None:
    model = build("modules")
    experts = model[1].experts

    def hook(*_: Any) -> None:
        with torch.no_grad():
            experts.up.to_local().zero_()

    experts.register_forward_pre_hook(hook)
    model(rows(0, dist.get_rank()))


def test_a_write_to_it_raises(worlds: WorldPool):
    for kind, text in expect_error(worlds.get_world(4), write_to_local):
        assert kind == "UnsupportedOpError"
        assert "Write to the parameter itself" in text


def wrong_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    info = FSDPMeshInfo(mesh, shard_mesh_dim=1)
    dshard.fully_shard(plain(), shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), info))


def test_a_mesh_that_cannot_be_kept_is_refused_by_name(worlds: WorldPool):
    for kind, text in expect_error(worlds.get_world(4), wrong_mesh):
        assert kind == "UnsupportedOpError"
        assert text.startswith("0.weight: shard_placement_fn may return a mesh of one dim")


def saved(path: str, how: str) -> list[Tensor]:
    model = build(how)
    checkpoint.save(path, model)
    return [p.full_tensor() for p in model.parameters()]


def loaded(path: str, how: str) -> list[Tensor]:
    model = build(how)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    checkpoint.load(path, model)
    return [p.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize(
    ("before", "after"), [("modules", "function"), ("function", "smaller mesh"), ("replicated", "modules")]
)
def test_a_checkpoint_of_one_way_loads_in_another(worlds: WorldPool, tmp_path, before, after):
    want = worlds.run(4, saved, str(tmp_path / "c"), before)
    for got in worlds.run(4, loaded, str(tmp_path / "c"), after):
        assert all(torch.equal(a, b) for a, b in zip(got, want[0], strict=True))
