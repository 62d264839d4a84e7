"""One GPU, a real NCCL group of one rank. Skipped where there is no GPU; no result of these is committed yet."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import dshard

pytestmark = pytest.mark.gpu


@pytest.fixture
def nccl(tmp_path) -> Iterator[None]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(16, 32), torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16)
    ).cuda()


def losses(model: torch.nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(5):
        ids = torch.randint(0, 16, (4, 9), generator=generator).cuda()
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.usefixtures("nccl")
def test_a_world_of_one_gpu_trains_as_the_plain_model():
    assert losses(dshard.fully_shard(build())) == pytest.approx(losses(build()), rel=1e-5)


@pytest.mark.usefixtures("nccl")
def test_parameters_on_cpu_move_to_the_gpu_of_the_mesh():
    layer = dshard.fully_shard(torch.nn.Linear(4, 4))
    assert layer.weight.device.type == "cuda"
    assert layer(torch.ones(1, 4, device="cuda")).device.type == "cuda"
