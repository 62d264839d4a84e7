"""Stages of torch's pipelines, sharded: several backwards per step, and one reduction that the schedule asks for."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn import functional as F

import dshard
from dshard.runtime.runtime import units_of
from dshard.testing import WorldPool

pytestmark = pytest.mark.slow
NUM_LAYERS, WIDTH, NUM_STEPS = 4, 6, 3
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
}


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)]).double()


def batch(step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(8, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]


def plain_weights(num_ranks: int) -> dict[str, Tensor]:
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        for rank in range(num_ranks):
            x, y = batch(step, rank)
            (F.mse_loss(model(x), y) / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def stages_of(mesh: DeviceMesh, per_rank: int, *, root: bool) -> dict[int, nn.Sequential]:
    """This rank's stages, by number; each layer is a unit."""
    num_stages = 2 * per_rank
    size = NUM_LAYERS // num_stages
    found = {}
    for number in range(mesh.get_local_rank("pp"), num_stages, 2):
        stage = plain()[number * size : (number + 1) * size]
        for layer in stage if root else ():
            dshard.fully_shard(layer, mesh=mesh["dp"])
        found[number] = dshard.fully_shard(stage, mesh=mesh["dp"])
    return found


def loss(out: Tensor, y: Tensor) -> Tensor:
    """A quarter of that of a micro-batch, for what four of them give is added up."""
    return F.mse_loss(out, y) / 4


def train(name: str, root: bool) -> tuple[dict[str, Tensor], int]:
    """Weights of this rank's stages by their names in the whole model; and reductions of the last step."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    per_rank = 1 if name in ("gpipe", "1f1b") else 2
    modules = stages_of(mesh, per_rank, root=root)
    group, device = mesh.get_group("pp"), torch.device("cpu")
    stages = [PipelineStage(m, i, 2 * per_rank, device, group=group) for i, m in modules.items()]
    schedule = SCHEDULES[name](
        stages[0] if per_rank == 1 else stages, n_microbatches=4, loss_fn=loss, scale_grads=False
    )
    optimizer = torch.optim.AdamW([p for m in modules.values() for p in m.parameters()], lr=1e-2)
    for step in range(NUM_STEPS):
        x, y = batch(step, mesh.get_local_rank("dp"))
        with dshard.CommTrace() as trace:
            schedule.step(*[x] if 0 in modules else [], target=y if 2 * per_rank - 1 in modules else None)
        assert not any(unit.is_gathered for m in modules.values() for unit in units_of(m))
        optimizer.step()
        optimizer.zero_grad()
    weights = {k: p.full_tensor().detach() for m in modules.values() for k, p in m.named_parameters()}
    return weights, trace.calls("reduce_scatter")


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_train_as_one_process(worlds: WorldPool, name, num_ranks, root):
    want = plain_weights(num_ranks // 2)
    seen = set()
    for weights, num_reductions in worlds.run(num_ranks, train, name, root):
        for key, value in weights.items():
            torch.testing.assert_close(value, want[key], rtol=1e-9, atol=1e-11, msg=lambda m, key=key: key + m)
            seen.add(key)
        if num_ranks == 4 and name != "zero bubble":
            assert num_reductions == 2  # of two layers, each once, whatever the number of micro-batches
    assert seen == want.keys()


def states() -> list[bool]:
    module = dshard.fully_shard(plain())
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    others = [copy.deepcopy(module), torch.load(buffer, weights_only=False)]
    return [len(fully_shard.state(m)._state_ctx.all_states) == 1 for m in (module, *others)]


def test_copies_have_the_state_that_a_stage_asks_for_too(worlds: WorldPool):
    assert worlds.run(2, states) == [[True] * 3] * 2


def torch_on_top() -> str:
    module = dshard.fully_shard(nn.Linear(2, 2))
    with pytest.raises(AssertionError) as caught:
        fully_shard(module)
    return str(caught.value)


def test_torchs_fully_shard_refuses_a_module_that_is_sharded(worlds: WorldPool):
    assert "can only be applied to a module once" in worlds.run(2, torch_on_top)[0]
