"""What may share a unit, and which units a call on the root alone makes."""

import pytest
import torch
from torch import Tensor, nn

from dshard import ShardedTensor
from dshard.testing import WorldPool
from dshard.units.unit import Unit
from tests.models import mlp
from tests.twins import average_grads, data, full, same_weights, shard_children, shard_root, train, twins


class Mixed(nn.Module):
    """What one unit of FSDP2 refuses: dtypes, frozen, integer, 0-d, empty, transposed, shared modules and adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).bfloat16().requires_grad_(False)
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, 6))
        self.wide_head = nn.Linear(6, 3).double()
        self.table = nn.Parameter(torch.arange(6), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.turned = nn.Parameter(torch.randn(3, 6).t())
        self.wide = nn.Parameter(torch.randn(1, 6))
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.twin = nn.Linear(6, 6)
        self.twin_again = self.twin

    def forward(self, x: Tensor) -> Tensor:
        x = self.base(x.bfloat16()).float() + x @ self.up @ self.down
        x = self.norm(x)[:, self.table] * self.scale + self.wide + self.empty.sum()
        x = self.twin_again(self.twin(x))
        out = self.wide_head(x.double()) + x.double() @ self.turned.double()
        return out + self.phase.abs().double()


def mixed_unit(toggle: bool) -> None:
    plain, sharded = twins(Mixed)
    for m in (plain, sharded):
        optimizer = torch.optim.AdamW([p for p in m.parameters() if p.is_floating_point()], lr=0.01)
        for step in range(3):
            if toggle:
                m.base.requires_grad_(step == 1)
                m.norm.requires_grad_(step != 1)
            optimizer.zero_grad()
            m(data(3, 6, seed=step)).square().mean().backward()
            if m is plain:
                average_grads(m)
            optimizer.step()
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        tolerance = 2e-2 if p.dtype == torch.bfloat16 else 2e-5
        torch.testing.assert_close(
            full(q), p.detach(), rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )
        assert q.dtype == p.dtype
        assert q.stride() == p.stride()


@pytest.mark.parametrize("toggle", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_mixed_dtypes_frozen_adapters_and_odd_shapes_train_in_one_unit(worlds: WorldPool, num_ranks, toggle):
    worlds.run(num_ranks, mixed_unit, toggle)


def late_head() -> None:
    """A head that is replaced after `fully_shard`, as when a vocabulary grows."""
    plain, sharded = twins(mlp, shard_children)
    for m in (plain, sharded):
        torch.manual_seed(5)
        m[4] = nn.Linear(5, 3)
        train(m, 3)
    same_weights(plain, sharded)
    assert all(isinstance(p, ShardedTensor) for p in sharded.parameters())


def test_a_head_that_is_replaced_after_sharding_trains_as_in_a_plain_model(worlds: WorldPool):
    worlds.run(2, late_head)


def units_of_a_root() -> list[str]:
    _, sharded = twins(lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), shard_root)
    sharded(data(2, 64)).sum().backward()
    units: list[Unit] = sharded._context().units
    return [unit.label for unit in units]


def test_without_a_plan_the_root_alone_is_cut_into_its_blocks(worlds: WorldPool):
    assert worlds.run(2, units_of_a_root) == [["0", "1", "2", "3"]] * 2
