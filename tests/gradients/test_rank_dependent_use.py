"""Parameters that only some ranks use: their gradients reach all ranks, whatever the units, hooks and micro-batches."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dshard
from dshard.testing import WorldPool, expect_error
from tests.models import Experts


class Spared(nn.Module):
    """Layers around a scale, and a head with a bias of its own, that the first rank alone uses.

    Args:
        dtype: Of what the first rank alone uses: another than that of the rest travels in a bucket of its own.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 4)
        self.third = nn.Linear(4, 2)
        self.spare = nn.Parameter(torch.tensor([1.5, -0.5], dtype=dtype))
        self.extra = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        x = self.third(x)
        return (x * self.spare if uses else x) * self.extra


UNITS = {
    "root": lambda m: [],
    "one": lambda m: [m.first],
    "each": lambda m: [m.first, m.second, m.third],
    "last": lambda m: [m.third],
}


def inputs(micro: int, rank: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * micro + rank))


def sharded(units: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = Spared(dtype)
    for part in UNITS[units](model):
        dshard.fully_shard(part)
    return dshard.fully_shard(model)


def train(units: str, dtype: torch.dtype, num_micro: int, syncs: bool, hooked: str | None = None) -> list[str]:
    torch.manual_seed(0)
    plain, model = Spared(dtype), sharded(units, dtype)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for m in (plain, model):
        if hooked is not None:
            m.get_parameter(hooked).register_hook(lambda g: g * 2)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model)]
    wrong = []
    for step in range(2):
        for micro in range(num_micro):
            model.set_requires_gradient_sync(syncs or micro == num_micro - 1)
            for r in range(num_ranks):
                (plain(inputs(10 * step + micro, r), r == 0).square().sum() / num_ranks).backward()
            model(inputs(10 * step + micro, rank), rank == 0).square().sum().backward()
        for (name, p), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            if p.grad is None or not torch.allclose(p.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-6):
                wrong.append(f"step {step}: {name}: {p.grad} is not {expected.grad}")
        dshard.clip_grad_norm_(model.parameters(), 1e9)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return wrong


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize(("num_micro", "syncs"), [(1, True), (2, True), (2, False)])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_what_one_rank_uses_are_those_of_one_process(
    worlds: WorldPool, dtype, num_ranks, units, num_micro, syncs
):
    assert worlds.run(num_ranks, train, units, dtype, num_micro, syncs) == [[]] * num_ranks


@pytest.mark.parametrize("units", ["root", "each"])
def test_a_hook_that_reads_a_gradient_early_loses_no_gradient_of_others(worlds: WorldPool, units):
    assert worlds.run(2, train, units, torch.float32, 1, True, "third.weight") == [[]] * 2


def test_a_bucket_that_one_rank_uses_leaves_after_another_one_of_its_unit_was_read_early(worlds: WorldPool):
    assert worlds.run(2, train, "each", torch.float64, 1, True, "extra") == [[]] * 2


class Choosy(nn.Module):
    """A part that computes in one of four ways: two need a weight in backward, two do not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(4, 4), nn.Parameter(torch.full((4,), 1.5))
        self.shift, self.table = nn.Parameter(torch.zeros(4)), nn.Embedding(3, 4)

    def forward(self, x: Tensor, way: int) -> Tensor:
        if way == 0:
            return torch.tanh(self.linear(x))
        if way == 1:
            return x * self.gain
        return x + (self.shift if way == 2 else self.table(torch.arange(x.shape[0]) % 3))


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Choosy() for _ in range(3))

    def forward(self, x: Tensor, ways: Sequence[int]) -> Tensor:
        for part, way in zip(self.parts, ways, strict=True):
            x = part(x, way)
        return x.square().sum()


def choose(ways: list[list[list[int]]], options: dict[str, Any], num_micro: int) -> list[str]:
    """Train where `ways[step][rank]` says how each part computes; names what differs from one process."""
    torch.manual_seed(0)
    plain, model = Parts(), Parts()
    model.load_state_dict(plain.state_dict())
    for part in model.parts:
        dshard.fully_shard(part, **options)
    sharded_model: Any = dshard.fully_shard(model)
    rank, num_ranks, wrong = dist.get_rank(), dist.get_world_size(), []
    for step, chosen in enumerate(ways):
        for micro in range(num_micro):
            sharded_model.set_requires_gradient_sync(micro == num_micro - 1)
            rows = [
                torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * step + 10 * micro + r))
                for r in range(num_ranks)
            ]
            for each in rows:
                each.requires_grad_(step % 2 == 0)
            (sum(plain(rows[r], chosen[r]) for r in range(num_ranks)) / num_ranks).backward()
            model(rows[rank].detach().requires_grad_(step % 2 == 0), chosen[rank]).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            found = torch.zeros(()) if p.grad is None else p.grad.full_tensor()
            if not torch.allclose(found, torch.zeros(()) if q.grad is None else q.grad, rtol=1e-4, atol=1e-5):
                wrong.append(f"step {step}: {name}")
        with torch.no_grad():
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                q.sub_(0.01 * (q.grad if q.grad is not None else 0))
                p.sub_(0.01 * (p.grad if p.grad is not None else 0))
        model.zero_grad()
        plain.zero_grad()
    return wrong


@settings(max_examples=40)
@given(data=st.data(), num_ranks=st.sampled_from([2, 3]))
def test_ranks_may_use_any_parameters_of_a_unit_whatever_their_backwards_need(worlds: WorldPool, data, num_ranks):
    way = st.integers(0, 3)
    step = st.lists(st.lists(way, min_size=3, max_size=3), min_size=num_ranks, max_size=num_ranks)
    ways = data.draw(st.lists(step, min_size=1, max_size=4), label="ways")
    options = data.draw(
        st.sampled_from([{}, {"reshard_after_forward": False}, {"strategy": "ddp"}, {"strategy": "zero1"}]),
        label="options",
    )
    num_micro = data.draw(st.sampled_from([1, 2]), label="micro-batches")
    assert worlds.run(num_ranks, choose, ways, options, num_micro) == [[]] * num_ranks


def read_without_sync(dtype: torch.dtype) -> list[bool]:
    """After a backward without sync, whether all gradients of a unit are there once one of them was read."""
    model = sharded("each", dtype)
    model.set_requires_gradient_sync(False)
    model(inputs(0, dist.get_rank()), dist.get_rank() == 0).square().sum().backward()
    before = model.spare.grad is not None
    model.extra.grad.full_tensor()
    return [before, model.spare.grad is not None and bool(model.spare.grad.full_tensor().any())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reading_one_gradient_without_sync_hands_out_those_of_other_ranks(worlds: WorldPool, dtype):
    assert worlds.run(2, read_without_sync, dtype) == [[True, True], [False, True]]


class Scaled(nn.Module):
    """A part whose output takes part in the loss on the first rank alone."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.scale = Spared(dtype), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        x = self.inner(x, True)
        return (x if uses else x.detach()) * self.scale


def use_a_unit_on_one_rank(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model: Any = Scaled(dtype)
    dshard.fully_shard(model.inner, reshard_after_forward=False)
    dshard.fully_shard(model)
    model(inputs(0, 0), dist.get_rank() == 0).sum().backward()
    model.scale.grad.full_tensor()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_unit_of_which_one_rank_uses_nothing_in_backward_is_named_on_all_ranks(worlds: WorldPool, dtype):
    errors = expect_error(worlds.get_world(2), use_a_unit_on_one_rank, dtype)
    assert [kind for kind, _ in errors] == ["DivergenceError"] * 2
    assert errors[0][1].startswith("'inner': all ranks must communicate about the same thing at the same time")
    assert "rank 0 is at 'inner'" in errors[1][1]


def route(num_steps: int) -> list[str]:
    torch.manual_seed(1)
    plain: Any = Experts(count=2)
    model: Any = Experts(count=2)
    model.load_state_dict(plain.state_dict())
    dshard.fully_shard(model.first)
    dshard.fully_shard(model.experts)
    dshard.fully_shard(model.last)
    dshard.fully_shard(model)
    num_ranks = dist.get_world_size()
    for step in range(num_steps):
        choices = torch.randint(0, 2, (num_ranks,), generator=torch.Generator().manual_seed(step)).tolist()
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).requires_grad_()
        for choice in choices:
            (plain(x, choice).square().sum() / num_ranks).backward()
        model(x, choices[dist.get_rank()]).square().sum().backward()
    return [
        name
        for (name, p), expected in zip(model.named_parameters(), plain.parameters(), strict=True)
        if not torch.allclose(p.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-6)
    ]


def test_experts_of_one_unit_are_routed_by_each_rank_alone(worlds: WorldPool):
    assert worlds.run(2, route, 6) == [[]] * 2
    assert worlds.run(3, route, 6) == [[]] * 3


class Passing(nn.Module):
    """Blocks that are given their input in one of the ways in which models do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Taking() for _ in range(4)])

    def forward(self, x: Tensor, how: str) -> Tensor:
        for block in self.blocks:
            if how == "keyword":
                x = block(hidden=x)
            elif how == "nested":
                x = block(None, [{"hidden": x}])
            elif how == "second":
                x = block(torch.ones(3), x)
            elif how.startswith("checkpoint"):
                x = checkpoint(block, x, use_reentrant="reentrant" in how)
            else:
                x = block(x)
        return x


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, *args: Any, hidden: Any = None) -> Tensor:
        value = hidden if hidden is not None else args[-1]
        return torch.tanh(self.inner(value[0]["hidden"] if isinstance(value, list) else value))


def order_of_collectives(how: str) -> list[str]:
    torch.manual_seed(0)
    model = Passing()
    for block in model.blocks:
        dshard.fully_shard(block)
    dshard.fully_shard(model)
    loss = model(torch.ones(2, 3, requires_grad="reentrant" in how), how).sum()
    with dshard.CommTrace() as trace:
        loss.backward()
    return [f"{r.kind} {r.label}" for r in trace.records]


@pytest.mark.parametrize(
    "how", ["positional", "keyword", "nested", "second", "checkpointed", "checkpointed, reentrant"]
)
def test_gradients_leave_while_backward_goes_on_however_a_block_is_given_its_input(worlds: WorldPool, how):
    orders = worlds.run(2, order_of_collectives, how)
    assert orders[0] == orders[1]
    reduced = [orders[0].index(f"reduce_scatter blocks.{i}") for i in (3, 2, 1, 0)]
    assert reduced == sorted(reduced)
    assert orders[0].index("reduce_scatter blocks.3") < orders[0].index("all_gather blocks.1")
