"""Models that compute in several streams, as torch's notes say: what a unit gathers in one is used in others."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

import dshard
from dshard.collectives import BufferPool
from dshard.testing import WorldPool
from tests.accelerator import device, ranks
from tests.accelerator.device import MODES
from tests.accelerator.rooms import simulated
from tests.unit.test_buffer_pool import Halves

WIDTH, NUM_STEPS = 16, 3


class Branches(nn.Module):
    """Two branches, one of them in a stream of its own where there are streams."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.whole = whole  # all of it
        self.side: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return self.left(x).relu() + self.right(x).tanh()
        current = torch.accelerator.current_stream()
        self.side = self.side or torch.Stream(device=x.device)
        self.side.wait_stream(current)
        with self.side:
            x.record_stream(self.side)
            right = self.right(x).tanh()
            if self.whole:
                right = self.left(x).relu() + right
        left = 0.0 if self.whole else self.left(x).relu()
        current.wait_stream(self.side)
        right.record_stream(current)
        return left + right


class Towers(nn.Module):
    """Two chains of layers that part once and meet once, in two streams; between them a layer that both use."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(4))
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.side: Any = None

    def forward(self, x: Tensor) -> Tensor:
        a = b = x
        if x.device.type == "cpu":
            for left, right in self.pairs:
                a, b = self.shared(left(a).tanh()), self.shared(right(b).tanh()).sin()
            return a + b
        current = torch.accelerator.current_stream()
        self.side = self.side or torch.Stream(device=x.device)
        self.side.wait_stream(current)
        x.record_stream(self.side)
        for left, right in self.pairs:
            with self.side:
                b = right(b).tanh()
            a = self.shared(left(a).tanh())
            with self.side:
                b = self.shared(b).sin()
        current.wait_stream(self.side)
        b.record_stream(current)
        return a + b


def build(how: str) -> Any:
    torch.manual_seed(0)
    if how == "towers":
        return Towers().double()
    return nn.Sequential(*(Branches(whole=i == 1) for i in range(3)), nn.Linear(WIDTH, WIDTH)).double()


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(model: Any, x: Tensor, how: str) -> Tensor:
    if how == "checkpoint":
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()
    early = sum(p.square().sum() for p in model.parameters()) if how == "used before" else 0.0
    return model(x).square().mean() + 1e-3 * early


def train(model: Any, device: str, how: str, data: list[int]) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(NUM_STEPS):
        for micro in range(2 if how == "micro" else 1):
            if isinstance(model, dshard.FSDPModule):
                model.set_requires_gradient_sync(how != "micro" or micro == 1)
            each = [loss_of(model, batch(step, micro, rank).to(device), how) for rank in data]
            (sum(each[1:], each[0]) / len(each)).backward()
            losses.append([loss.item() for loss in each] if how == "read" else [loss.detach() for loss in each])
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [[float(loss) for loss in each] for each in losses]


def run(how: str, units: str, options: dict[str, Any]) -> list[tuple[list[Any], list[Tensor]]]:
    found = []
    for seed, mode in enumerate(MODES):
        ranks.begin(seed, mode, with_cpu=True)
        size = dist.get_world_size()
        mesh = init_device_mesh("sim", (2, 2) if size == 4 else (size,))
        model = build(how).to("cpu" if "offload_policy" in options else "sim")
        for pair in model.pairs if units == "pairs" else ():
            dshard.fully_shard(list(pair), mesh=mesh, **options)
        for block in model if units in ("blocks", "branches") else ():
            for part in (block.left, block.right) if units == "branches" and isinstance(block, Branches) else ():
                dshard.fully_shard(part, mesh=mesh, **options)
            dshard.fully_shard(block, mesh=mesh, **options)
        dshard.fully_shard(model, mesh=mesh, **options)
        for module in model.modules() if how == "used before" else ():
            if isinstance(module, dshard.FSDPModule):  # then the device has something to do when a reduction ends
                module.set_gradient_divide_factor(float(size))
        for module in model.modules() if how == "allocated" else ():
            if isinstance(module, dshard.FSDPModule):
                module.set_allocate_memory_from_process_group_for_comm(True)
        before = num_allocated()
        losses = train(model, "sim", how, [dist.get_rank()])
        assert (num_allocated() > before) is (how == "allocated")
        found.append((losses, [p.full_tensor().detach().cpu() for p in model.parameters()]))
    return found


def num_allocated() -> int:
    """Tensors that the allocator of the process group's backend has made."""
    return int(device.start().stats()["num_comm_allocations"])


CASES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "blocks": ("plain", "blocks", 2, {}),
    "branches": ("plain", "branches", 2, {}),
    "root": ("plain", "root", 2, {}),
    "kept": ("plain", "blocks", 2, {"reshard_after_forward": False}),
    "ddp": ("plain", "blocks", 2, {"strategy": "ddp"}),
    "zero1": ("plain", "branches", 2, {"strategy": "zero1"}),
    "slices": ("plain", "blocks", 2, {"strategy": "split(2)"}),
    "budget": ("plain", "blocks", 2, {"memory_budget": 8000}),
    "neighbours": ("plain", "blocks", 4, {"reshard_after_forward": 2}),
    "replicas": ("plain", "blocks", 4, {}),
    "offload": ("plain", "blocks", 2, {"offload_policy": CPUOffloadPolicy()}),
    "micro": ("micro", "branches", 2, {}),
    "checkpoint": ("checkpoint", "blocks", 2, {}),
    "used before": ("used before", "branches", 2, {}),
    "read": ("read", "branches", 2, {}),
    "allocated": ("allocated", "branches", 2, {}),
    "allocated, offload": ("allocated", "blocks", 2, {"offload_policy": CPUOffloadPolicy()}),
    "towers": ("towers", "pairs", 2, {}),
    "towers, kept": ("towers", "pairs", 2, {"reshard_after_forward": False}),
    "towers, root": ("towers", "root", 2, {}),
    "towers, replicas": ("towers", "pairs", 4, {}),
    "towers, zero2": ("towers", "pairs", 2, {"strategy": "zero2"}),
    "towers, slices": ("towers", "pairs", 2, {"strategy": "split(2)"}),
    "towers, offload": ("towers", "pairs", 2, {"offload_policy": CPUOffloadPolicy()}),
}


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("name", CASES)
def test_models_of_several_streams_train_as_in_one(accelerators_and_cpus: WorldPool, name):
    how, units, num_ranks, options = CASES[name]
    plain = build(how)
    losses = train(plain, "cpu", how, list(range(num_ranks)))
    for rank, found in enumerate(accelerators_and_cpus.run(num_ranks, run, how, units, options)):
        for mode, (own, weights) in zip(MODES, found, strict=True):
            assert [each[0] for each in own] == pytest.approx([each[rank] for each in losses], rel=1e-9), mode
            for weight, right in zip(weights, plain.parameters(), strict=True):
                torch.testing.assert_close(weight, right.detach(), rtol=1e-9, atol=1e-12)


# Buffers of a pool on a device.


def buffers_of_a_device(*, is_seen: bool) -> list[bool]:
    """A buffer is given back while somebody sees a part of it, or nobody does."""
    with simulated():
        pool, where = BufferPool(), torch.device("sim", 0)
        buffer = pool.take(4096, where)
        halves = buffer.cut(Halves).tensors
        halves[1].fill_(7)
        seen = halves[1][:8] if is_seen else None
        pool.give(buffer)
        num_bytes = buffer.memory.untyped_storage().nbytes()
        again = pool.take(4096, where)
        again.memory.fill_(1)
        is_kept = seen is None or seen.tolist() == [7] * 8
        return [num_bytes == 0, again is buffer, again.cut(Halves).tensors is halves, is_kept]


@pytest.mark.parametrize("is_seen", [False, True])
def test_the_memory_of_a_buffer_that_nobody_sees_goes_to_the_device_and_its_tensors_stay(simulators, is_seen):
    [found] = simulators.run(1, partial(buffers_of_a_device, is_seen=is_seen))
    assert found == [not is_seen] * 3 + [True]
