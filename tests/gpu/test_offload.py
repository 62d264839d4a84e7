"""Offload on a real GPU, by an NCCL group of one rank. Skipped where there is no GPU; no result is committed yet."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import dshard
from tests.gpu.test_one_gpu import build, losses, nccl

__all__ = ["nccl"]
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nccl")]


def sharded(*, pins: bool | None, **options: Any) -> Any:
    """The model by units of one layer each; `pins` None for no offload."""
    policy = None if pins is None else CPUOffloadPolicy(pin_memory=pins)
    mesh = init_device_mesh("cuda", (1,))
    model = build()
    for layer in (model[1], model[3]):
        dshard.fully_shard(layer, mesh=mesh, offload_policy=policy, **options)
    return dshard.fully_shard(model, mesh=mesh, offload_policy=policy, **options)


@pytest.mark.parametrize("pins", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_is_offloaded_trains_as_what_is_not(pins, dtype):
    options = {} if dtype is None else {"mp_policy": MixedPrecisionPolicy(dtype, torch.float32)}
    assert losses(sharded(pins=pins, **options)) == pytest.approx(losses(sharded(pins=None, **options)), rel=1e-4)


def test_shards_gradients_and_states_are_in_pinned_memory_of_the_cpu():
    model = sharded(pins=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 16, (4, 9)).cuda()
    for _ in range(3):
        model(ids).square().mean().backward()
        assert torch.isfinite(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        for param in model.parameters():
            assert param.to_local().device.type == param.grad.to_local().device.type == "cpu"
            assert param.to_local().is_pinned()
            assert param.grad.to_local().is_pinned()
        optimizer.step()
        optimizer.zero_grad()
    assert all(
        value.to_local().device.type == "cpu"
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, dshard.ShardedTensor)
    )


def test_values_are_those_that_the_host_wrote_last_also_while_copies_are_under_way():
    model = sharded(pins=True)
    ids = torch.randint(0, 16, (4, 9)).cuda()
    with torch.no_grad():
        for value in range(1, 20):
            model(ids)  # copies of the next unit may be under way when it ends
            for param in model.parameters():
                param.fill_(value)
            assert model[3](torch.ones(1, 64).cuda()).unique().tolist() == [65.0 * value]


def test_a_backward_leaves_less_than_the_model_on_the_device():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])
    mesh = init_device_mesh("cuda", (1,))
    for layer in model:
        dshard.fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy())
    dshard.fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    torch.ones(1, 1024, device="cuda") @ torch.ones(1024, 1024, device="cuda")  # cuBLAS takes a workspace once
    before = torch.cuda.memory_allocated()
    model(torch.ones(1, 1024, device="cuda")).sum().backward()
    [p.grad.to_local() for p in model.parameters()]
    assert torch.cuda.memory_allocated() - before < 4 * 1024 * 1025 * 2
