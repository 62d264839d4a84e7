"""A rank that lost its shards gets them back from its peers, bit for bit, and training goes on as if nothing was."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dshard
from dshard.checkpoint import PeerSnapshots
from dshard.testing import WorldPool


def model_of(strategy: Any, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Dropout(0.2), nn.Linear(33, 5))
    dshard.fully_shard(model, strategy=strategy, sync="broadcast")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(4, 7, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [t for state in optimizer.state.values() for t in state.values()]
    tensors = [*model.state_dict().values(), *states]
    return [t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for t in tensors]


def lose(model: nn.Module, optimizer: torch.optim.Optimizer, snapshots: PeerSnapshots) -> None:
    """Start again on this rank, from other weights and no snapshot."""
    snapshots.forget()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.to_local().fill_(float("nan"))
    optimizer.state.clear()
    torch.manual_seed(99)


def lost_and_found(strategy: Any, lost: int) -> list[str]:
    """One rank loses everything, and later its successor; what differs afterwards."""
    model, optimizer = model_of(strategy)
    snapshots = PeerSnapshots(model, optimizer, every=2)
    for step in range(5):
        train(model, optimizer, range(step, step + 1))
        taken = snapshots.step(step=step + 1, extra={"at": step + 1, "rank": dist.get_rank()})
        assert taken == (step % 2 == 1)
    train(model, optimizer, range(5, 8))
    expected = values_of(model, optimizer)
    if dist.get_rank() == lost:
        lose(model, optimizer, snapshots)
    extra = snapshots.restore()
    problems = [] if extra == {"at": 4, "rank": dist.get_rank()} else [f"extra is {extra}"]
    train(model, optimizer, range(4, 8))
    found = values_of(model, optimizer)
    problems += [f"tensor {i}" for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not torch.equal(a, b)]
    if dist.get_rank() == (lost + 1) % dist.get_world_size():
        lose(model, optimizer, snapshots)
    extra = snapshots.restore()  # for which the row of the rank that was lost first is there again
    train(model, optimizer, range(4, 8))
    again = values_of(model, optimizer)
    return problems + [
        f"{i} again" for i, (a, b) in enumerate(zip(expected, again, strict=True)) if not torch.equal(a, b)
    ]


@pytest.mark.parametrize("strategy", ["full", "zero2", "ddp"])
@pytest.mark.parametrize(("ranks", "lost"), [(2, 0), (3, 2), (4, 1)])
def test_a_lost_rank_is_made_of_the_others_bit_for_bit(worlds: WorldPool, strategy, ranks, lost):
    assert worlds.run(ranks, lost_and_found, strategy, lost) == [[]] * ranks


class Scaled(nn.Linear):
    """A layer with a buffer of 8-bit exponents, a dtype that `safetensors.torch` does not know."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("scales", torch.tensor([1, 2], dtype=torch.uint8).view(torch.float8_e8m0fnu))


def exponents_restored() -> bool:
    torch.manual_seed(0)
    model = dshard.fully_shard(Scaled())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots = PeerSnapshots(model, optimizer)
    snapshots.step()
    model.scales.view(torch.uint8).zero_()
    snapshots.restore()
    return model.scales.view(torch.uint8).tolist() == [1, 2]


def test_every_dtype_that_a_file_can_hold_is_restored(worlds: WorldPool):
    assert worlds.run(2, exponents_restored) == [True, True]


def other_dtensors_restored() -> list[float]:
    """Of a parameter that is a DTensor and that `fully_shard` leaves alone."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = nn.Linear(2, 4, bias=False)
    model.other = nn.Parameter(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
    dshard.fully_shard(model, mesh=mesh, ignored_params={model.other})
    snapshots = PeerSnapshots(model)
    snapshots.step()
    with torch.no_grad():
        model.other.to_local().zero_()
    snapshots.restore()
    return model.other.full_tensor().tolist()


def test_dtensors_of_others_are_restored(worlds: WorldPool):
    assert worlds.run(2, other_dtensors_restored) == [[0.0, 1.0, 2.0, 3.0]] * 2


def two_lost() -> str:
    model, optimizer = model_of("full")
    snapshots = PeerSnapshots(model, optimizer)
    train(model, optimizer, range(1))
    snapshots.step()
    before = values_of(model, optimizer)
    if dist.get_rank() < 2:
        snapshots.forget()
    with pytest.raises(dshard.CheckpointError) as caught:
        snapshots.restore()
    assert all(torch.equal(a, b) for a, b in zip(before, values_of(model, optimizer), strict=True))
    return str(caught.value)


def test_of_two_lost_ranks_all_are_told(worlds: WorldPool):
    for text in worlds.run(3, two_lost):
        assert "ranks [0, 1] of 3 have none" in text


def row_bytes() -> tuple[int, int]:
    torch.manual_seed(0)
    model = dshard.fully_shard(nn.Linear(512, 512))
    snapshots = PeerSnapshots(model)
    snapshots.step()
    return snapshots.num_bytes, sum(p.to_local().nbytes for p in model.parameters())


def test_a_row_has_one_part_in_n_minus_1_of_the_shards(worlds: WorldPool):
    for ranks in (2, 4):
        for held, shards in worlds.run(ranks, row_bytes):
            assert held == pytest.approx(shards * (1 + 1 / (ranks - 1)), rel=0.15)
