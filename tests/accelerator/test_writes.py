"""Parameters that programs write to while a unit is gathered ahead: the write comes behind what is sent of them."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import dshard
from dshard.testing import WorldPool
from tests.accelerator import ranks
from tests.accelerator.device import MODES

WIDTH, NUM_STEPS = 16, 4


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(5)]
    return nn.Sequential(*layers).double()


def write(param: Any, how: str, factor: float) -> None:
    """Change a parameter, in one of the ways in which programs do."""
    with torch.no_grad():
        if how == "foreach":
            torch._foreach_mul_([param], factor)
        elif how == "view":
            param.view(-1)[3:].mul_(factor)
        elif how == "data":
            param.data.mul_(factor)
        elif how == "local" and isinstance(param, dshard.ShardedTensor):
            param.to_local().mul_(factor)
        else:
            param.mul_(factor)


def watch(model: nn.Sequential, how: str) -> None:
    """Have weights of each block change while it is gathered ahead: in forward, and a bias in backward."""
    for before, block in pairwise(model):

        def in_forward(module: nn.Module, args: Any, out: Any, block: Any = block) -> None:
            write(block[0].weight, how, 0.99)

        def in_backward(module: nn.Module, grads: Any, block: Any = before) -> None:
            write(block[2].bias, how, 1.01)

        before[2].register_forward_hook(in_forward)
        block[1].register_full_backward_pre_hook(in_backward)


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def train(model: nn.Sequential, device: str, data: list[int], how: str) -> list[list[float]]:
    """Losses of each step and part of the data."""
    watch(model, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses = []
    for step in range(NUM_STEPS):
        out = model(torch.cat([batch(step, rank) for rank in data]).to(device))  # one forward, for it writes
        each = [part.square().mean() for part in out.chunk(len(data))]
        (sum(each[1:], each[0]) / len(each)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.detach() for loss in each])
    return [[float(loss) for loss in each] for each in losses]


def run(how: str, options: dict[str, Any], *, is_root_alone: bool) -> list[tuple[list[Any], list[Tensor]]]:
    found = []
    for seed, mode in enumerate(MODES):
        ranks.begin(seed, mode, with_cpu=True)
        mesh = init_device_mesh("sim", (dist.get_world_size(),))
        model = build().to("cpu" if "offload_policy" in options else "sim")
        for block in () if is_root_alone else model:
            dshard.fully_shard(block, mesh=mesh, **options)
        dshard.fully_shard(model, mesh=mesh, **options)
        losses = train(model, "sim", [dist.get_rank()], how)
        found.append((losses, [p.full_tensor().detach().cpu() for p in model.parameters()]))
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "kept": {"reshard_after_forward": False},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("how", ["in place", "foreach", "view", "data", "local"])
def test_a_write_to_what_is_gathered_ahead_is_no_race_and_is_used(accelerators_and_cpus: WorldPool, how, options):
    plain = build()
    losses = train(plain, "cpu", [0, 1], how)
    calls = accelerators_and_cpus.run(2, run, how, OPTIONS[options], is_root_alone=how == "view")
    for rank, found in enumerate(calls):
        for mode, (own, weights) in zip(MODES, found, strict=True):
            assert [each[0] for each in own] == pytest.approx([each[rank] for each in losses], rel=1e-9), mode
            for weight, right in zip(weights, plain.parameters(), strict=True):
                torch.testing.assert_close(weight, right.detach(), rtol=1e-9, atol=1e-12)


def train_where_it_is_moved() -> list[tuple[str, str]]:
    ranks.begin(0, "random", with_cpu=True)
    model = dshard.fully_shard(build().to("sim"), mesh=init_device_mesh("sim", (dist.get_world_size(),)))
    found = []
    for where in ("sim", "cpu", "sim"):
        model.to(where)
        model(batch(0, dist.get_rank()).to(where)).square().mean().backward()
        grad: Any = model[0][0].weight.grad
        found.append((grad.device.type, grad.to_local().device.type))
        model.zero_grad()
    return found


def test_gradients_are_where_a_model_was_moved_to(accelerators_and_cpus: WorldPool):
    for found in accelerators_and_cpus.run(2, train_where_it_is_moved):
        assert found == [("sim", "sim"), ("cpu", "cpu"), ("sim", "sim")]
