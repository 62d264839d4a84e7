"""Ranks that do different things on a backend with collectives of its own, where NCCL would pair whatever comes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dshard
from dshard.testing import World, WorldPool, expect_error
from tests.accelerator import ranks
from tests.accelerator.device import start
from tests.accelerator.rooms import settle
from tests.gpu import trainings

NUM_BLOCKS = 3


class Net(nn.Module):
    """Blocks of one size: what one rank gathers fits in the place of what another does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(NUM_BLOCKS))
        self.order = list(range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.blocks[number](x).tanh()
        return x


def made(**options: Any) -> Any:
    torch.manual_seed(0)
    model = Net().to("sim")
    mesh = init_device_mesh("sim", (dist.get_world_size(),))
    for block in model.blocks:
        dshard.fully_shard(block, mesh=mesh, **options)
    return dshard.fully_shard(model, mesh=mesh, **options)


def train(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, 8, device="sim")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def parted(is_apart: bool, mixes: Callable[[Any, Any], object]) -> None:
    """Train, in each order of the blocks once; then do what differs. No step of that may have been applied."""
    ranks.begin(0, "random", with_cpu=True)
    device = start()
    model: Any = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for order in ([0, 1, 2], [2, 1, 0], [0, 1, 2]):
        model.order = order
        train(model, optimizer)
    steps: list[None] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(None))
    device.synchronize()
    device.configure(0, "lazy", True, False)
    device.set_times(1000.0, 1.0)  # it does nothing until it is asked: what hangs on NCCL is no error before
    try:
        mixes(model, optimizer) if is_apart else train(model, optimizer)
    except dshard.DivergenceError:
        assert not steps, "a step was applied"
        raise
    finally:
        device.set_times(0.003, 1.0)
        settle(device)


def forward_of_a_block(model: Any, optimizer: Any) -> None:
    """Rank 0 runs the whole model, as before, and is told of it in the next forward; the others the last block."""
    with torch.no_grad():
        for _ in range(2):
            (model if dist.get_rank() == 0 else model.blocks[2])(torch.ones(2, 8, device="sim"))


def other_order(model: Any, optimizer: Any) -> None:
    """The last rank runs the blocks in another order, in which all ran them before."""
    if dist.get_rank() == dist.get_world_size() - 1:
        model.order = [2, 1, 0]
    train(model, optimizer)


def backward_of_one(model: Any, optimizer: Any) -> None:
    """Rank 0 runs backward where the others run another forward: gathers against gathers, and reductions."""
    y = model(torch.ones(2, 8, device="sim"))
    if dist.get_rank() == 0:
        y.square().mean().backward()
        optimizer.step()
    else:
        model.order = [2, 1, 0]
        train(model, optimizer)


def another_model(model: Any, optimizer: Any) -> None:
    """Rank 0 trains a model of other names, whose layers are as large."""
    mesh = init_device_mesh("sim", (dist.get_world_size(),))
    other: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to("sim")
    for layer in other[0], other[2]:
        dshard.fully_shard(layer, mesh=mesh)
    dshard.fully_shard(other, mesh=mesh)
    if dist.get_rank() == 0:
        own = torch.optim.SGD(other.parameters(), lr=0.1)
        own.register_step_post_hook(_refuse_step)
        train(other, own)
    else:
        train(model, optimizer)


def one_step_less(model: Any, optimizer: Any) -> None:
    """Rank 0 has had its last batch and evaluates, where the others train on: both gather the same at first."""
    if dist.get_rank() == 0:
        with torch.no_grad():
            for _ in range(2):
                model(torch.ones(2, 8, device="sim"))
    else:
        train(model, optimizer)


def _refuse_step(*_: Any) -> None:
    raise AssertionError("a step was applied")


MIXES = [
    (2, another_model, ("'blocks.0'", "'0'")),
    (3, one_step_less, ("blocks.", "the end of the step")),
    (2, forward_of_a_block, ("'blocks.0'", "'blocks.2'")),
    (4, other_order, ("'blocks.0'", "'blocks.2'")),
    (2, backward_of_one, ("blocks.2", "the end of the step")),
]


@pytest.mark.parametrize(("num_ranks", "mixes", "names"), MIXES, ids=[mixes.__name__ for _, mixes, _ in MIXES])
def test_all_ranks_raise_ahead_of_the_optimizers_step_and_name_both(
    accelerators_and_cpus: WorldPool, num_ranks, mixes, names
):
    accelerators_and_cpus.run(num_ranks, parted, False, mixes)  # alike, they train
    with World(num_ranks, grace_s=30.0) as world:  # whose device is at odds afterwards
        told = expect_error(world, parted, True, mixes)
    for kind, text in told:
        assert kind == "DivergenceError", text
        assert any(name in text for name in names), text
        assert "rank " in text


def sleeping() -> list[str]:
    ranks.begin(0, "random", with_cpu=True)
    start().set_times(0.003, 60.0)  # a collective waits for longer than the other rank sleeps
    return trainings.sleeps_in_the_middle("sim")


def test_who_waits_for_a_rank_that_sleeps_names_it_and_where_it_is(accelerators_and_cpus: WorldPool):
    heard, none = accelerators_and_cpus.run(2, sleeping)
    assert not none
    assert any("rank 0 has waited for" in text and "for rank 1." in text for text in heard), heard
    assert any("trainings.py:" in text for text in heard)
