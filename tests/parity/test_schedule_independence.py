"""Which units there are, when they are freed, and when gradients travel changes no bit of what is computed."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dshard
from dshard.testing import WorldPool
from dshard.testing.strategies import world_sizes
from tests.parity.models import CASES, batch, build, full_weights

# Modules that can be units, none inside another; what is not taken stays with the root.
PARTS = {
    "gpt": ("tokens", "positions", "blocks.0", "blocks.1.norm1", "blocks.1.qkv", "blocks.1.up", "norm", "head"),
    "tied": ("positions", "blocks.0.norm1", "blocks.0.qkv", "blocks.0.down", "blocks.1", "norm"),
    "uneven": ("first", "second", "third"),
}
RESHARD = st.sampled_from([True, False, None])


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a model is cut and run; it must not matter.

    Args:
        groups: Names of modules that share a unit, and the unit's `reshard_after_forward`.
        root: `reshard_after_forward` of the root.
        switch: None, or a flag that `set_reshard_after_forward` sets after the first step.
        touch: A parameter that is read between forward and backward, by number; None for none.
        pin: Whether the forward runs inside `dshard.gathered`.
    """

    groups: tuple[tuple[tuple[str, ...], bool | None], ...]
    root: bool | None
    switch: bool | None = None
    touch: int | None = None
    pin: bool = False


@st.composite
def schedules(draw: st.DrawFn, name: str) -> Schedule:
    owner = draw(st.lists(st.integers(-1, 3), min_size=len(PARTS[name]), max_size=len(PARTS[name])))
    parts = [tuple(p for p, o in zip(PARTS[name], owner, strict=True) if o == group) for group in range(4)]
    groups = tuple((draw(st.permutations(part)), draw(RESHARD)) for part in draw(st.permutations(parts)) if part)
    return Schedule(
        tuple((tuple(part), reshard) for part, reshard in groups),
        draw(RESHARD),
        draw(RESHARD),
        draw(st.none() | st.integers(0, 30)),
        draw(st.booleans()),
    )


@dataclass(frozen=True, slots=True)
class Result:
    """Losses, gradients of the last step and final weights, full ones."""

    losses: list[float]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]


def run(name: str, schedule: Schedule, num_micro: int = 1, sync_all: bool = True, num_steps: int = 2) -> Result:
    model: Any = build(name)
    for group, reshard in schedule.groups:
        dshard.fully_shard([model.get_submodule(p) for p in group], reshard_after_forward=reshard)
    dshard.fully_shard(model, reshard_after_forward=schedule.root)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    params = list(model.parameters())
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        for micro in range(num_micro):
            model.set_requires_gradient_sync(sync_all or micro == num_micro - 1)
            inputs, targets = batch(name, 1, step * num_micro + micro, dist.get_rank())
            if schedule.pin:
                with dshard.gathered(model):
                    loss = CASES[name].loss(model(inputs), targets)
            else:
                loss = CASES[name].loss(model(inputs), targets)
            if schedule.touch is not None:
                params[schedule.touch % len(params)].full_tensor()
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        if schedule.switch is not None:
            model.set_reshard_after_forward(schedule.switch)
    grads = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    return Result(losses, grads, full_weights(model))


def assert_same(found: list[Result], expected: list[Result]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.losses == b.losses
        assert a.grads.keys() == b.grads.keys()
        assert [n for n in a.grads if not torch.equal(a.grads[n], b.grads[n])] == []
        assert [n for n in a.weights if not torch.equal(a.weights[n], b.weights[n])] == []


BASE = Schedule((), True)


@pytest.fixture(scope="module")
def baseline(worlds: WorldPool) -> Any:
    """Results of the root sharded alone, each computed once."""
    known: dict[Any, list[Result]] = {}

    def get(num_ranks: int, *args: Any) -> list[Result]:
        if (num_ranks, args) not in known:
            name, *rest = args
            known[num_ranks, args] = worlds.run(num_ranks, run, name, BASE, *rest)
        return known[num_ranks, args]

    return get


@settings(max_examples=30)
@given(data=st.data(), name=st.sampled_from(list(PARTS)), num_ranks=world_sizes(max_size=3))
def test_unit_boundaries_flags_and_touches_change_no_bit(worlds: WorldPool, baseline, data, name, num_ranks):
    schedule = data.draw(schedules(name))
    assert_same(worlds.run(num_ranks, run, name, schedule), baseline(num_ranks, name))


@settings(max_examples=10)
@given(
    data=st.data(), num_micro=st.integers(2, 4), sync_all=st.booleans(), num_ranks=world_sizes(min_size=2, max_size=3)
)
def test_with_micro_batches_unit_boundaries_change_no_bit(
    worlds: WorldPool, baseline, data, num_micro, sync_all, num_ranks
):
    schedule = data.draw(schedules("uneven"))
    found = worlds.run(num_ranks, run, "uneven", schedule, num_micro, sync_all)
    assert_same(found, baseline(num_ranks, "uneven", num_micro, sync_all))


class Exact(nn.Module):
    """Integer weights and inputs in float64: sums are exact, so their order cannot matter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, 3)
        self.double()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randint(-3, 4, p.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def exact_gradients(synced: tuple[bool, ...], units: bool) -> dict[str, Tensor]:
    """Gradients of some micro-batches, of which some are reduced at once; the last always is."""
    model: Any = Exact()
    if units:
        dshard.fully_shard(model.first)
        dshard.fully_shard(model.second)
    dshard.fully_shard(model)
    for micro, is_synced in enumerate((*synced, True)):
        model.set_requires_gradient_sync(is_synced)
        generator = torch.Generator().manual_seed(100 * micro + dist.get_rank())
        model(torch.randint(-4, 5, (7, 5), generator=generator).double()).square().sum().backward()
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}


@settings(max_examples=15)
@given(
    num_ranks=st.sampled_from([1, 2, 4]),  # the mean over them is exact
    synced=st.lists(st.booleans(), max_size=4).map(tuple),
    units=st.booleans(),
)
def test_which_micro_batches_are_synced_changes_no_bit_of_exact_gradients(worlds: WorldPool, num_ranks, synced, units):
    expected: dict[str, Tensor] = {}
    for micro in range(len(synced) + 1):
        for rank in range(num_ranks):
            model = Exact()
            generator = torch.Generator().manual_seed(100 * micro + rank)
            model(torch.randint(-4, 5, (7, 5), generator=generator).double()).square().sum().backward()
            for n, p in model.named_parameters():
                assert p.grad is not None
                expected[n] = expected.get(n, torch.zeros(())) + p.grad / num_ranks
    for grads in worlds.run(num_ranks, exact_gradients, synced, units):
        assert [n for n in expected if not torch.equal(grads[n], expected[n])] == []


def test_ranks_agree_on_every_bit_of_the_weights_and_differ_in_their_losses(worlds: WorldPool):
    first, second, third = worlds.run(3, run, "gpt", BASE)
    assert first.losses != second.losses
    for other in (second, third):
        assert all(torch.equal(first.weights[n], other.weights[n]) for n in first.weights)


def test_the_comparison_sees_another_order_of_additions(worlds: WorldPool):
    """Sanity: micro-batches reduced one by one do round differently from those added up first."""
    one = worlds.run(3, run, "gpt", BASE, 3, True)
    other = worlds.run(3, run, "gpt", BASE, 3, False)
    with pytest.raises(AssertionError):
        assert_same(one, other)
