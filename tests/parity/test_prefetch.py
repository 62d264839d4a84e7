"""Gathering ahead and keeping within a budget: fewer waits and gathers, the same bits, and no byte too many."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dshard
from dshard.planner.texts import parse_bytes
from dshard.testing import WorldPool
from dshard.units.context import Eviction
from dshard.units.unit import Unit
from tests.parity.test_memory import units_of

WIDTH, NUM_BLOCKS = 8, 6


class Chain(nn.Module):
    """Blocks of one size, run in any order."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(num_blocks)])

    def forward(self, x: Tensor, order: Any = None, checkpointed: bool = False) -> Tensor:
        for i in range(len(self.blocks)) if order is None else order:
            block = self.blocks[i]
            x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
            x = torch.tanh(x)
        return x


def build(reshard: bool | None = True, budget: Any = None, depth: int | None = None, num_blocks: int = 6) -> Any:
    torch.manual_seed(0)
    model: Any = Chain(num_blocks)
    for block in model.blocks:
        dshard.fully_shard(block, reshard_after_forward=reshard)
    dshard.fully_shard(model, memory_budget=budget)
    if depth is not None:
        model.set_prefetch(depth)
    return model


def loss_of(model: Any, step: int, *args: Any) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randn(
        3, WIDTH, generator=generator
    ).requires_grad_()  # so that the first block's backward uses its weight
    return model(x, *args).square().sum()


def started_ahead(depth: int) -> list[list[str]]:
    """For each of three steps, which blocks were under way when their own forward began."""
    model = build(depth=depth)
    seen: list[list[str]] = []

    def note(module: nn.Module, args: Any) -> None:
        (unit,) = module.__dict__["_dshard_units"]
        if unit.is_gathered:
            seen[-1].append(unit.label)

    for block in model.blocks:
        block.register_forward_pre_hook(note, prepend=True)
    for step in range(3):
        seen.append([])
        loss_of(model, step).backward()
    return seen


def test_from_the_second_step_on_each_block_but_the_first_is_under_way_when_its_turn_comes(worlds: WorldPool):
    rest = [f"blocks.{i}" for i in range(1, NUM_BLOCKS)]
    assert worlds.run(2, started_ahead, 1) == [[[], rest, rest]] * 2
    assert worlds.run(2, started_ahead, 0) == [[[], [], []]] * 2


@dataclass(slots=True)
class Counts:
    """What some steps gathered.

    Args:
        gathers: All-gathers of each step.
        peak_bytes: Most gathered bytes that were alive at one time, in the last step.
        losses: Of each step.
        weights: At the end.
        left_bytes: Gathered bytes at the end.
    """

    gathers: list[int] = field(default_factory=list)
    peak_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    left_bytes: int = 0


def train(model: Any, steps: list[tuple[Any, ...]]) -> Counts:
    """AdamW steps; each of `steps` is what is passed to the forward."""
    counts = Counts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    on_gather = Eviction.note_gather

    def watched(self: Eviction, unit: Unit) -> None:
        on_gather(self, unit)
        counts.peak_bytes = max(counts.peak_bytes, self.num_bytes)

    Eviction.note_gather = watched  # type: ignore[method-assign]
    try:
        for step, args in enumerate(steps):
            counts.peak_bytes = 0
            with dshard.CommTrace() as trace:
                loss = loss_of(model, step, *args)
                loss.backward()
            counts.gathers.append(trace.calls("all_gather"))
            counts.losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    finally:
        Eviction.note_gather = on_gather  # type: ignore[method-assign]
    counts.left_bytes = model._context().gathered_bytes
    counts.weights = [p.full_tensor().detach() for p in model.parameters()]
    return counts


def train_new(steps: list[tuple[Any, ...]], options: dict[str, Any]) -> Counts:
    return train(build(**options), steps)


def assert_same(found: list[Counts], expected: list[Counts]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.losses == b.losses
        assert all(torch.equal(x, y) for x, y in zip(a.weights, b.weights, strict=True))
        assert a.left_bytes == 0


UNIT_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def test_gathers_per_step_fall_from_2u_to_u_as_the_budget_grows_and_live_bytes_keep_to_it(worlds: WorldPool):
    steps: list[tuple[Any, ...]] = [()] * 3
    base = worlds.run(2, train_new, steps, {"depth": 0})
    curve = []
    for kept in range(NUM_BLOCKS + 2):
        for slack in (0, UNIT_BYTES - 1):
            options = {"reshard": None, "budget": kept * UNIT_BYTES + slack, "depth": 1}
            found = worlds.run(2, train_new, steps, options)
            assert_same(found, base)
            assert all(c.gathers == found[0].gathers for c in found)
            assert len(set(found[0].gathers)) == 1  # the first step guesses right here
            assert found[0].peak_bytes <= options["budget"] + 2 * UNIT_BYTES  # one in use, one in flight
        curve.append(found[0].gathers[-1])
    assert curve == [max(NUM_BLOCKS, 2 * NUM_BLOCKS - kept) for kept in range(NUM_BLOCKS + 2)]


def test_an_automatic_budget_keeps_what_fits_from_the_second_step_on(worlds: WorldPool):
    steps: list[tuple[Any, ...]] = [()] * 3
    found = worlds.run(2, train_new, steps, {"reshard": None, "budget": "auto"})
    assert_same(found, worlds.run(2, train_new, steps, {"depth": 0}))
    assert found[0].gathers == [2 * NUM_BLOCKS, NUM_BLOCKS, NUM_BLOCKS]  # a few kilobytes fit on any machine


@pytest.mark.parametrize("text", ["2KiB", "2048", " 2.048 kB "])
def test_a_budget_may_be_text_as_the_memory_of_a_plan_may(worlds: WorldPool, text):
    assert worlds.run(1, budget_after_two_calls, text) == [parse_bytes("plan", "memory", text)] == [2048]


@pytest.mark.parametrize("budget", [0, 5])
def test_a_call_without_a_budget_keeps_that_of_an_earlier_one_below(worlds: WorldPool, budget):
    assert worlds.run(1, budget_after_two_calls, budget) == [budget]


def budget_after_two_calls(budget: int | str) -> Any:
    model: Any = Chain()
    dshard.fully_shard(model.blocks[0], memory_budget=budget)
    dshard.fully_shard(model)
    return units_of(model)[0].model.settings.memory_budget


def test_units_that_were_told_are_no_matter_of_the_budget(worlds: WorldPool):
    for reshard, gathers in ((True, 2 * NUM_BLOCKS), (False, NUM_BLOCKS)):
        found = worlds.run(2, train_new, [()] * 2, {"reshard": reshard, "budget": 3 * UNIT_BYTES})
        assert found[0].gathers == [gathers] * 2


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    """Steps that run the blocks in orders of their own, some twice, some not at all, some checkpointed."""
    order = st.none() | st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=8).map(tuple)
    few = draw(st.lists(order, min_size=1, max_size=2))
    steps = draw(st.lists(st.tuples(st.sampled_from(few), st.booleans()), min_size=2, max_size=6))
    options = {
        "reshard": draw(st.sampled_from([None, True, False])),
        "budget": draw(st.none() | st.integers(0, 7 * UNIT_BYTES)),
        "depth": draw(st.integers(0, 4)),
    }
    return steps, options


@settings(max_examples=40)
@example(drawn=([(None, False), ((0, 2, 0), False)], {"reshard": None, "budget": None, "depth": 1}), num_ranks=1)
@given(drawn=runs(), num_ranks=st.sampled_from([1, 2, 3]))
def test_depth_budget_and_any_order_of_use_change_no_bit_and_end_with_all_units_sharded(
    worlds: WorldPool, drawn, num_ranks
):
    steps, options = drawn
    found = worlds.run(num_ranks, train_new, steps, options)
    assert_same(found, worlds.run(num_ranks, train_new, steps, {"depth": 0}))
    if options["reshard"] is not False:
        budget = options["budget"] if options["budget"] is not None and options["reshard"] is None else 0
        assert all(c.peak_bytes <= budget + (1 + max(1, options["depth"])) * UNIT_BYTES for c in found)


def test_a_wrong_guess_costs_one_gather_and_is_right_the_next_time(worlds: WorldPool):
    steps = [(o,) for o in ((0, 1, 2), (0, 1, 2), (0, 2, 1), (0, 2, 1))]
    found = worlds.run(2, train_new, steps, {"depth": 1})
    assert found[0].gathers[0] == found[0].gathers[1] == found[0].gathers[3] == 6
    assert 6 < found[0].gathers[2] <= 10


def interleaved() -> tuple[list[int], int]:
    """Evaluation between steps, on other data and in another order; then generation by tokens."""
    model = build(depth=1)
    gathers = []
    for step in range(4):
        with dshard.CommTrace() as trace:
            loss_of(model, step).backward()
        gathers.append(trace.calls("all_gather"))
        with torch.no_grad(), dshard.CommTrace() as trace:
            loss_of(model, step, (3, 1, 2))
            loss_of(model, step, (3, 1, 2))
        gathers.append(trace.calls("all_gather"))
    return gathers, model._context().gathered_bytes


def test_evaluation_between_steps_has_an_order_of_its_own(messaging: WorldPool):
    assert messaging.run(2, interleaved) == [([2 * NUM_BLOCKS, 6] * 4, 0)] * 2


def broken_forward() -> int:
    model = build(depth=2)
    for step in range(2):
        loss_of(model, step).backward()
    with pytest.raises(IndexError):
        loss_of(model, 2, (0, 1, 17))
    with dshard.CommTrace() as trace:
        loss_of(model, 3).backward()
    assert len(units_of(model)) >= NUM_BLOCKS
    assert model._context().gathered_bytes == 0
    return trace.calls("all_gather")


def test_after_a_forward_that_raised_the_next_step_is_a_normal_one(worlds: WorldPool):
    assert worlds.run(2, broken_forward) == [2 * NUM_BLOCKS] * 2


def refuse(options: dict[str, Any]) -> str:
    with pytest.raises((dshard.StateError, ValueError)) as raised:
        build(**options)
    return str(raised.value)


@pytest.mark.parametrize("budget", [-1, "all", 1.5, True, "-1GiB", "2GiBs", "", "1e999"])
def test_a_budget_that_is_no_number_of_bytes_is_refused(worlds: WorldPool, budget):
    assert worlds.run(1, refuse, {"budget": budget}) == [
        "fully_shard: memory_budget must be a number of bytes, text such as '2GiB', 'auto' or None, but it is "
        f"{budget!r}. Pass 0 to keep nothing."
    ]


@pytest.mark.parametrize("depth", [-1, 0.5])
def test_a_depth_that_is_no_count_is_refused(worlds: WorldPool, depth):
    assert "set_prefetch: depth must be" in worlds.run(1, refuse, {"depth": depth})[0]


class Scaled(nn.Module):
    """A weight that multiplies, as in RMSNorm: autograd saves it itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.scale * x)


class ScaledTwice(nn.Module):
    """Two blocks, checkpointed or not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scaled(), Scaled()])

    def forward(self, x: Tensor, use_reentrant: bool | None) -> Tensor:
        for block in self.blocks:
            x = block(x) if use_reentrant is None else checkpoint(block, x, use_reentrant=use_reentrant)
        return x


def gathers_under_checkpoint(use_reentrant: bool | None) -> list[str]:
    """What a step gathers, by label."""
    model: Any = ScaledTwice()
    for block in model.blocks:
        dshard.fully_shard(block)
    dshard.fully_shard(model)
    with dshard.CommTrace() as trace:
        model(torch.ones(2, WIDTH, requires_grad=True), use_reentrant).sum().backward()
    return sorted(record.label for record in trace.select("all_gather"))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_saves_again_is_gathered_with_its_unit(worlds: WorldPool, use_reentrant):
    plain = worlds.run(2, gathers_under_checkpoint, None)
    assert worlds.run(2, gathers_under_checkpoint, use_reentrant) == plain
