"""Strategies mix within a model and change between steps: the same bits, the wire of each, and what is whole where."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dshard
from dshard.testing import WorldPool, expect_error
from dshard.testing.strategies import shardings, world_sizes
from tests.gradients.test_rank_dependent_use import Spared
from tests.parity.models import CASES, batch, build, full_weights
from tests.parity.test_schedule_independence import PARTS
from tests.tensor.extended import Rounded, extend

BASES = ("ddp", "zero1", "zero2", "keep", "full")


def mixes(name: str, num_ranks: int) -> st.SearchStrategy[Any]:
    """A strategy, or some by patterns; the last one may leave names out."""
    return shardings([n for n, _ in build(name).named_parameters()], num_ranks)


@dataclass(frozen=True, slots=True)
class Course:
    """How a model is trained.

    Args:
        strategies: The first one is `fully_shard`'s, those that follow are set ahead of each step; None for no change.
        parts: Names of modules that are units of their own.
        passes_optimizer: Whether `set_strategy` is given the optimizer.
        when: Where in a step it is called: ahead of it, or between backward and the optimizer's step.
        num_micro: Backwards per step; the last one reduces.
    """

    strategies: tuple[Any, ...]
    parts: tuple[str, ...] = ()
    passes_optimizer: bool = True
    when: str = "ahead"
    num_micro: int = 1


@dataclass(frozen=True, slots=True)
class Result:
    losses: list[float]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]


def train(name: str, course: Course, num_steps: int = 3) -> Result:
    model: Any = build(name)
    for part in course.parts:
        dshard.fully_shard(model.get_submodule(part))
    first = course.strategies[0] if not course.parts else None
    dshard.fully_shard(model, strategy=first)
    objects = list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(num_steps):
        strategy = course.strategies[step % len(course.strategies)] if step or course.parts else None

        def switch(strategy: Any = strategy) -> None:
            if strategy is not None:
                dshard.set_strategy(model, strategy, optimizer=optimizer if course.passes_optimizer else None)

        optimizer.zero_grad()
        if course.when == "ahead":
            switch()
        for micro in range(course.num_micro):
            model.set_requires_gradient_sync(micro == course.num_micro - 1)
            inputs, targets = batch(name, 1, step * course.num_micro + micro, dist.get_rank())
            loss = CASES[name].loss(model(inputs), targets)
            loss.backward()
            losses.append(loss.item())
        if course.when == "after backward":
            switch()
        optimizer.step()
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    grads = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    return Result(losses, grads, full_weights(model))


def assert_same(found: list[Result], expected: list[Result]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.losses == b.losses
        assert [n for n in b.grads if not torch.equal(a.grads[n], b.grads[n])] == []
        assert [n for n in b.weights if not torch.equal(a.weights[n], b.weights[n])] == []


@pytest.fixture(scope="module")
def full(worlds: WorldPool) -> Any:
    """Results of full sharding, each computed once."""
    known: dict[Any, list[Result]] = {}

    def get(num_ranks: int, name: str, num_micro: int = 1) -> list[Result]:
        key = num_ranks, name, num_micro
        if key not in known:
            known[key] = worlds.run(num_ranks, train, name, Course(("full",), num_micro=num_micro))
        return known[key]

    return get


@settings(max_examples=25)
@given(data=st.data(), name=st.sampled_from(list(PARTS)), num_ranks=world_sizes(max_size=4))
def test_any_mix_and_any_change_of_strategies_gives_the_same_bits(worlds: WorldPool, full, data, name, num_ranks):
    course = Course(
        tuple(data.draw(st.lists(mixes(name, num_ranks), min_size=1, max_size=3))),
        data.draw(st.sampled_from([(), PARTS[name][:1], PARTS[name]])),
        data.draw(st.booleans()),
        data.draw(st.sampled_from(["ahead", "after backward"])),
        data.draw(st.sampled_from([1, 1, 2])),
    )
    assert_same(worlds.run(num_ranks, train, name, course), full(num_ranks, name, course.num_micro))


# --- the wire --------------------------------------------------------------------------------------------------------

WIDTH, NUM_LAYERS = 16, 3
NUMEL = NUM_LAYERS * (WIDTH * WIDTH + WIDTH)


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)])


def rows(step: int, rank: int | None = None) -> Tensor:
    g = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(4, WIDTH, generator=g)


def sharded(strategy: Any) -> Any:
    model = stack()
    for layer in model:
        dshard.fully_shard(layer, strategy=strategy)
    return dshard.fully_shard(model)


def wire_of_a_step(strategy: str, num_backwards: int, sets: bool) -> list[dict[str, int]]:
    """Payload bytes that this rank sends in each of three steps."""
    model = sharded("full" if sets else strategy)
    if sets:
        dshard.set_strategy(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        with dshard.CommTrace() as trace:
            for micro in range(num_backwards):
                model(rows(10 * step + micro).requires_grad_()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        kinds = ("all_gather", "reduce_scatter", "all_reduce")
        found.append({k: sum(r.payload_bytes for r in trace.records if r.kind == k) for k in kinds})
    return found


def expected_wire(strategy: str, num_ranks: int, num_backwards: int) -> dict[str, float]:
    """Bytes that a rank sends in a step, in units of (N - 1) / N of the parameters' bytes over its own N ranks."""
    once = 4 * NUMEL * (num_ranks - 1) / num_ranks
    if strategy == "ddp":
        return {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 2 * once * num_backwards}
    if strategy.startswith("hybrid"):
        k, replicas = 2, num_ranks // 2
        inside = 4 * NUMEL * (k - 1) / k
        across = 2 * 4 * NUMEL / k * (replicas - 1) / replicas
        return {
            "all_gather": 2 * inside * num_backwards,
            "reduce_scatter": inside * num_backwards,
            "all_reduce": across * num_backwards,
        }
    num_gathers = {"full": 2 * num_backwards, "keep": num_backwards, "zero2": 1, "zero1": 1}[strategy]
    num_reductions = 1 if strategy == "zero1" else num_backwards
    return {"all_gather": num_gathers * once, "reduce_scatter": num_reductions * once, "all_reduce": 0}


@pytest.mark.parametrize("sets", [False, True])
@pytest.mark.parametrize("num_backwards", [1, 3])
@pytest.mark.parametrize("strategy", [*BASES, "hybrid(2)"])
def test_a_step_sends_what_its_strategy_says(worlds: WorldPool, strategy, num_backwards, sets):
    for steps in worlds.run(4, wire_of_a_step, strategy, num_backwards, sets):
        want = expected_wire(strategy, 4, num_backwards)
        first = want
        if strategy == "zero1":  # until a step has shown how many backwards make one, each of them reduces
            first = {**want, "reduce_scatter": want["reduce_scatter"] * num_backwards}
        assert steps == [first, want, want]


def calls_of_each_backward(num_backwards: int) -> list[list[int]]:
    """How many reduce-scatters start in each backward, and in the optimizer's step, of each of three steps."""
    model = sharded("zero1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        counts = []
        for micro in range(num_backwards):
            with dshard.CommTrace() as trace:
                model(rows(10 * step + micro)).square().sum().backward()
            counts.append(trace.calls("reduce_scatter"))
        with dshard.CommTrace() as trace:
            optimizer.step()
        optimizer.zero_grad()
        found.append([*counts, trace.calls("reduce_scatter")])
    return found


def test_zero1_reduces_in_every_backward_of_the_first_step_and_then_in_the_last_of_each(worlds: WorldPool):
    first, later = [NUM_LAYERS, NUM_LAYERS, 0], [0, NUM_LAYERS, 0]
    assert worlds.run(2, calls_of_each_backward, 2) == [[first, later, later]] * 2


def fewer_backwards() -> list[int]:
    """Reduce-scatters in the backwards, and in the optimizer's step, of a step that has fewer than the one before."""
    model = sharded("zero1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, num_backwards in enumerate((3, 1)):
        optimizer.zero_grad()
        with dshard.CommTrace() as backwards:
            for micro in range(num_backwards):
                model(rows(10 * step + micro)).square().sum().backward()
        with dshard.CommTrace() as reading:
            optimizer.step()
    return [backwards.calls("reduce_scatter"), reading.calls("reduce_scatter")]


def test_zero1_reduces_when_gradients_are_read_if_a_step_has_fewer_backwards(worlds: WorldPool):
    assert worlds.run(2, fewer_backwards) == [[0, NUM_LAYERS]] * 2


def uses_apart(num_backwards: Sequence[int], clips: bool) -> list[str]:
    """Weights that are not those of one process, where a parameter is used by the first rank alone."""
    torch.manual_seed(0)
    plain, model = Spared(torch.float32), Spared(torch.float32)
    model.load_state_dict(plain.state_dict())
    dshard.fully_shard(model, strategy="zero1")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model)]
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for step, num in enumerate(num_backwards):
        for micro in range(num):
            for r in range(num_ranks):
                (plain(rows(10 * step + micro, r)[:, :3], r == 0).square().sum() / num_ranks).backward()
            model(rows(10 * step + micro)[:, :3], rank == 0).square().sum().backward()
        if clips:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            dshard.clip_grad_norm_(model.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    known = dict(plain.named_parameters())
    return [n for n, w in full_weights(model).items() if not torch.allclose(w, known[n], rtol=1e-4, atol=1e-5)]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("num_backwards", [(1, 1), (2, 2, 2), (1, 3)])
def test_zero1_takes_parameters_that_one_rank_uses_alone(worlds: WorldPool, num_backwards, clips):
    assert worlds.run(2, uses_apart, num_backwards, clips) == [[]] * 2


def test_zero1_refuses_to_read_ahead_what_one_rank_used_alone(worlds: WorldPool):
    for name, message in expect_error(worlds.get_world(2), uses_apart, (2, 1), True):
        assert name == "StateError"
        assert message.startswith("spare: a gradient can be used ahead of its reduction, which zero1 puts off")


def accumulated(strategy: str) -> list[Tensor]:
    model = sharded(strategy)
    for micro in range(3):
        model(rows(micro)).square().sum().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def test_gradients_of_several_backwards_add_up_under_every_strategy(worlds: WorldPool):
    plain = stack()
    for rank in range(2):
        for micro in range(3):
            (plain(rows(micro, rank)).square().sum() / 2).backward()
    for strategy in BASES:
        for found in worlds.run(2, accumulated, strategy):
            for got, param in zip(found, plain.parameters(), strict=True):
                torch.testing.assert_close(got, param.grad, rtol=1e-5, atol=1e-5)


# --- what is whole ---------------------------------------------------------------------------------------------------


def bytes_of(tensors: Any) -> int:
    return sum(t.to_local().nbytes for t in tensors)


def persistent_bytes(before: str, after: str) -> dict[str, int]:
    """Bytes on this rank after a step, the gradients still there: of each kind, and of gathered copies."""
    model = sharded(before)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(rows(step)).square().sum().backward()
        optimizer.step()
        if step == 0 and before != after:
            dshard.set_strategy(model, after, optimizer=optimizer)
    states = [s for param in model.parameters() for s in optimizer.state[param].values() if s.dim()]
    return {
        "parameters": bytes_of(model.parameters()),
        "gradients": bytes_of(p.grad for p in model.parameters()),
        "states": bytes_of(states),
        "gathered": model._context().gathered_bytes,
    }


@pytest.mark.parametrize("after", [*BASES, "hybrid(2)"])
@pytest.mark.parametrize("before", ["full", "ddp", "hybrid(2)", "same"])
def test_each_rank_holds_what_the_strategy_says_after_a_change_too(messaging: WorldPool, before, after):
    whole = 4 * NUMEL
    shard = whole if after == "ddp" else whole // 2 if after == "hybrid(2)" else whole // 4
    want = {
        "parameters": shard,
        "gradients": shard,
        "states": 2 * shard,
        "gathered": whole if after in ("zero1", "zero2") else 0,
    }
    assert messaging.run(4, persistent_bytes, after if before == "same" else before, after) == [want] * 4


def gathers_of_generation(strategy: str) -> list[int]:
    """All-gathers of three forwards without gradients, after a step, with what `set_strategy` leaves gathered."""
    model = sharded("full")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(rows(0)).sum().backward()
    optimizer.step()
    dshard.set_strategy(model, strategy, optimizer=optimizer)
    counts = []
    for step in range(3):
        with dshard.CommTrace() as trace, torch.no_grad():
            model(rows(step))
        counts.append(trace.calls("all_gather"))
    return counts


def test_for_generation_everything_is_gathered_once(messaging: WorldPool):
    assert messaging.run(2, gathers_of_generation, "zero2") == [[NUM_LAYERS, 0, 0]] * 2
    assert messaging.run(2, gathers_of_generation, "ddp") == [[0, 0, 0]] * 2
    assert messaging.run(2, gathers_of_generation, "full") == [[NUM_LAYERS] * 3] * 2


def gradients_after_a_switch(strategy: str) -> tuple[int, bool]:
    """Bytes of the gradients that wait for a step when the strategy changes, and whether they keep their values."""
    model = sharded("full")
    model(rows(0)).square().sum().backward()
    before = [p.grad.full_tensor() for p in model.parameters()]
    objects = [p.grad for p in model.parameters()]
    dshard.set_strategy(model, strategy)
    same = all(torch.equal(p.grad.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True))
    same &= all(p.grad is o for p, o in zip(model.parameters(), objects, strict=True))
    return bytes_of(p.grad for p in model.parameters()), same


def test_gradients_that_wait_for_a_step_move_along(worlds: WorldPool):
    for strategy, share in (("ddp", 1), ("hybrid(2)", 2), ("zero2", 4)):
        assert worlds.run(4, gradients_after_a_switch, strategy) == [(4 * NUMEL // share, True)] * 4


def under_way_at_the_start(strategy: str) -> list[list[bool]]:
    """Whether each layer's copies were under way, and fresh, when its forward of the third step began."""
    model = sharded(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[list[bool]] = []
    for step in range(3):
        seen: list[bool] = []

        def look(layer: Any, args: Any, seen: list[bool] = seen) -> None:
            (unit,) = layer._dshard_units
            seen.append(unit.copies.are_there and unit.copies.are_fresh())

        handles = [layer.register_forward_pre_hook(look, prepend=True) for layer in model]
        model(rows(step)).square().sum().backward()
        for handle in handles:
            handle.remove()
        optimizer.step()
        optimizer.zero_grad()
        found.append(seen)
    return found


def test_stale_copies_are_gathered_anew_ahead_of_their_use(worlds: WorldPool):
    ahead = [False, *[True] * (NUM_LAYERS - 1)]
    for found in worlds.run(2, under_way_at_the_start, "zero2"):
        assert found[0] == [False] * NUM_LAYERS  # the order is not known yet
        assert found[1:] == [ahead, ahead]


def bytes_on_the_way(max_bytes: int) -> tuple[int, int]:
    """The most bytes that one gather of a move holds, and how many gathers there are."""
    from dshard.optimizer import replace

    model = sharded("full")
    known, replace._MAX_BYTES = replace._MAX_BYTES, max_bytes
    try:
        with dshard.CommTrace() as trace:
            dshard.set_strategy(model, "hybrid(2)")
    finally:
        replace._MAX_BYTES = known
    sent = [r.payload_bytes for r in trace.records if r.kind == "all_gather"]
    return max(sent) * 4 // 3, len(sent)


def test_a_move_holds_no_more_full_tensors_than_the_largest(worlds: WorldPool):
    weight = 4 * WIDTH * WIDTH
    assert worlds.run(4, bytes_on_the_way, 1) == [(weight, 2 * NUM_LAYERS)] * 4
    assert worlds.run(4, bytes_on_the_way, 10 * weight) == [(weight, NUM_LAYERS + 1)] * 4  # all biases together


# --- together with everything else -----------------------------------------------------------------------------------

MIX = {"0.*": "ddp", "1.*": "hybrid(2)", "2.weight": "zero1", "*": "keep"}


def clipped(strategy: Any, num_steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    model = dshard.fully_shard(stack(), strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    norms = []
    for step in range(num_steps):
        optimizer.zero_grad()
        model(rows(step)).square().sum().backward()
        norms.append(dshard.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    return norms, full_weights(model)


def test_clipping_takes_a_mix_as_one_norm(worlds: WorldPool):
    plain = stack()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    want = []
    for step in range(3):
        optimizer.zero_grad()
        sum(plain(rows(step, rank)).square().sum() / 4 for rank in range(4)).backward()  # type: ignore[union-attr]
        want.append(nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item())
        optimizer.step()
    for norms, weights in worlds.run(4, clipped, MIX):
        assert norms == pytest.approx(want, rel=1e-5)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(weights[name], param.detach(), rtol=1e-4, atol=1e-5)


def saved_and_loaded(path: str, first: Any, second: Any) -> tuple[list[float], list[float]]:
    """Losses of steps after a checkpoint, and of a model in another mix that loads it."""

    def steps(model: Any, optimizer: Any) -> list[float]:
        losses = []
        for step in range(3, 6):
            optimizer.zero_grad()
            loss = model(rows(step)).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model = dshard.fully_shard(stack(), strategy=first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(rows(0)).square().sum().backward()
    optimizer.step()
    dshard.checkpoint.save(path, model, optimizer)
    went_on = steps(model, optimizer)
    other = dshard.fully_shard(stack(), strategy=second)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    dshard.checkpoint.load(path, other, other_optimizer)
    return went_on, steps(other, other_optimizer)


@pytest.mark.parametrize(("first", "second"), [(MIX, "full"), ("full", MIX), ("ddp", "hybrid(2)"), ("zero1", "ddp")])
def test_a_checkpoint_of_one_mix_goes_on_in_another(worlds: WorldPool, tmp_path, first, second):
    for went_on, loaded in worlds.run(4, saved_and_loaded, str(tmp_path / "saved"), first, second):
        assert went_on == loaded


def mixed_precision(strategy: Any, switches: bool) -> list[float]:
    policy = dshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = dshard.fully_shard(stack(), strategy="full" if switches else strategy, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        if switches and step == 2:
            dshard.set_strategy(model, strategy)
        optimizer.zero_grad()
        loss = model(rows(step)).float().square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "hybrid(2)", MIX])
def test_under_mixed_precision_too(worlds: WorldPool, strategy):
    want = worlds.run(4, mixed_precision, "full", False)
    assert worlds.run(4, mixed_precision, strategy, False) == want
    assert worlds.run(4, mixed_precision, strategy, True) == want


def copied(strategy: Any) -> bool:
    import copy

    model = dshard.fully_shard(stack(), strategy=strategy)
    model(rows(0)).sum().backward()
    other = copy.deepcopy(model)
    dshard.set_strategy(other, "full")
    with torch.no_grad():
        same = torch.equal(model(rows(1)), other(rows(1)))
    return same and other[0].weight.to_local().shape[0] == WIDTH // dist.get_world_size()


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "hybrid(1)"])
def test_a_copy_has_the_strategy_and_can_have_another(worlds: WorldPool, strategy):
    assert worlds.run(2, copied, strategy) == [True] * 2


def loaded_states(first: str, second: str) -> tuple[list[float], list[float]]:
    """Losses of a training that goes on, and of a model in another strategy that was given its states in memory."""
    import copy

    def trained(model: Any, optimizer: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = model(rows(step)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, other = (dshard.fully_shard(stack(), strategy=s) for s in (first, second))
    optimizer, other_optimizer = (torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True) for m in (model, other))
    trained(model, optimizer, range(2))
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return trained(model, optimizer, range(2, 4)), trained(other, other_optimizer, range(2, 4))


@pytest.mark.parametrize(("first", "second"), [("ddp", "full"), ("full", "ddp"), ("hybrid(2)", "zero2")])
def test_states_of_another_strategy_are_taken(worlds: WorldPool, first, second):
    for went_on, loaded in worlds.run(4, loaded_states, first, second):
        assert went_on == loaded


def added_later(strategy: Any) -> tuple[list[str], list[float], list[Tensor]]:
    """Where a layer is that came after a switch, and the losses and weights of two steps with it."""
    model = sharded("full")
    dshard.set_strategy(model, strategy)
    torch.manual_seed(1)
    model.append(nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        loss = model(rows(step)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    where = [str(tuple(p.to_local().shape)) for p in model[-1].parameters()]
    return where, losses, list(full_weights(model).values())


def test_what_is_added_after_a_switch_follows_it(worlds: WorldPool):
    _, losses, weights = worlds.run(2, added_later, "full")[0]
    for strategy, want in (
        ("ddp", [(WIDTH, WIDTH), (WIDTH,)]),
        ({f"{NUM_LAYERS}.*ght": "ddp", "*": "keep"}, [(WIDTH, WIDTH), (WIDTH // 2,)]),
    ):
        where, found, found_weights = worlds.run(2, added_later, strategy)[0]
        assert where == [str(shape) for shape in want]
        assert found == losses
        assert all(map(torch.equal, found_weights, weights))


def settings_of_others() -> list[tuple[Any, bool]]:
    """When a layer is freed that was told so by hand, after switches that name other parameters."""
    found = []
    for strategy in (None, "full"):
        model = sharded(strategy)
        model[1].set_reshard_after_forward(False)
        model[1].set_reshard_after_backward(False)
        dshard.set_strategy(model, {"1.bias": "ddp", "0.*": "zero2"})
        unit = model[1].weight.gather_source
        found.append((unit.settings.reshard_after_forward, unit.settings.reshard_after_backward))
    return found


def test_what_no_pattern_matches_keeps_what_it_was_told(worlds: WorldPool):
    assert worlds.run(2, settings_of_others) == [[(False, False)] * 2] * 2


def called_on_all(strategy: Any) -> list[float]:
    """Losses where blocks and a root without parameters of its own are given the same strategy."""
    model: Any = stack()
    for layer in model:
        dshard.fully_shard(layer, strategy=strategy)
    dshard.fully_shard(model, strategy=strategy)
    return [model(rows(step)).square().sum().item() for step in range(2)]


@pytest.mark.parametrize("strategy", ["ddp", {"*bias": "zero2", "*": "keep"}])
def test_a_root_without_parameters_of_its_own_takes_a_strategy(worlds: WorldPool, strategy):
    assert worlds.run(2, called_on_all, strategy) == worlds.run(2, called_on_all, None)


def several_at_once(strategy: str | None) -> tuple[bool, list[float]]:
    """Whether modules that one call took have the same units after a switch of one, and losses."""
    model = stack()
    dshard.fully_shard([model[0], model[1]])
    dshard.fully_shard(model[2])
    if strategy is not None:
        dshard.set_strategy(model[0], {"weight": strategy})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        loss = model(rows(step)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model[0]._dshard_units == model[1]._dshard_units, losses


def test_modules_that_one_call_took_change_together(worlds: WorldPool):
    expected = worlds.run(2, several_at_once, None)
    assert worlds.run(2, several_at_once, "ddp") == expected
    assert all(is_same for is_same, _ in expected)


def of_extended_weights(strategy: str, sets: bool) -> list[float]:
    """Losses of weights that say how they are gathered."""
    model: Any = extend(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), Rounded)
    torch.manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape))
    dshard.fully_shard(model, strategy="full" if sets else strategy)
    if sets:
        dshard.set_strategy(model, strategy)
    return [model(rows(step)).square().mean().item() for step in range(2)]


@pytest.mark.parametrize("sets", [False, True])
def test_weights_that_say_how_they_are_gathered_take_all_but_ddp(worlds: WorldPool, sets):
    for num_ranks in (1, 2):
        for strategy in ("zero2", "keep", "ddp")[: 3 if num_ranks == 1 else 2]:
            found = worlds.run(num_ranks, of_extended_weights, strategy, sets)
            assert found == worlds.run(num_ranks, of_extended_weights, "full", False)
    for name, message in expect_error(worlds.get_world(2), of_extended_weights, "ddp", sets):
        assert name == "UnsupportedOpError"
        assert re.search(r"0.weight: a Rounded says how it is gathered .* Choose among 'full'", message)


def on_replicas() -> list[list[float]]:
    """Losses under each strategy that a mesh with replicas can have."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = []
    for strategy in BASES:
        model = dshard.fully_shard(stack(), mesh=mesh, strategy="full")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for step in range(4):
            if step == 2:
                dshard.set_strategy(model, strategy, optimizer=optimizer)
            optimizer.zero_grad()
            loss = model(rows(step)).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append(losses)
    return found


def test_a_mesh_with_replicas_takes_all_but_hybrid(worlds: WorldPool):
    for found in worlds.run(4, on_replicas):
        assert found == [found[0]] * len(BASES)


def compiled(strategy: Any, switch: Any, backend: str | None) -> list[float]:
    model: Any = dshard.fully_shard(stack(), strategy=strategy)
    forward = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        if step == 2:
            dshard.set_strategy(model, switch, optimizer=optimizer)
        loss = forward(rows(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("strategy", "switch"), [("full", "ddp"), ("ddp", "hybrid(2)"), (MIX, "zero2")])
def test_a_compiled_model_follows(worlds: WorldPool, strategy, switch):
    assert worlds.run(4, compiled, strategy, switch, "aot_eager") == worlds.run(4, compiled, "full", "full", None)


# --- what is refused -------------------------------------------------------------------------------------------------


def copies_across_a_switch(strategies: tuple[Any, Any]) -> list[str]:
    """Best weights so far and an EMA, taken under one strategy, read, averaged on and loaded under another."""
    model, wrong = sharded(strategies[0]), []
    train_a_step(model)
    copies = {
        "clone of a state dict": {name: value.clone() for name, value in model.state_dict().items()},
        "clone of parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
        "cast": {name: p.detach().to(torch.float64).to(torch.float32) for name, p in model.named_parameters()},
        "product": {name: p.detach() * 1.0 for name, p in model.named_parameters()},
    }
    best = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    train_a_step(model)
    dshard.set_strategy(model, strategies[1])
    for what, copied in copies.items():
        if not all(torch.equal(value.full_tensor(), best[name]) for name, value in copied.items()):
            wrong.append(f"{what} reads other values")
        average = {name: value.clone() for name, value in copied.items()}
        with torch.no_grad():
            for name, p in model.named_parameters():
                average[name].lerp_(p, 0.25)
                if not torch.equal(average[name].full_tensor(), best[name].lerp(p.full_tensor(), 0.25)):
                    wrong.append(f"an average of {what} is another one")
        now = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
        model.load_state_dict(copied)
        if not all(torch.equal(p.full_tensor(), best[name]) for name, p in model.named_parameters()):
            wrong.append(f"{what} loads other values")
        model.load_state_dict(now)
    return wrong


def train_a_step(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(rows(0, dist.get_rank())).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "strategies",
    [("full", "ddp"), ("ddp", "full"), ("full", "hybrid(2)"), ("hybrid(2)", "ddp"), ("zero1", "full")],
    ids=str,
)
def test_copies_of_weights_from_before_a_switch_keep_their_values_after_it(worlds: WorldPool, strategies):
    assert worlds.run(4, copies_across_a_switch, strategies) == [[]] * 4


def aliases() -> list[str]:
    model = sharded("full")
    old: Any = [model[0].weight.detach(), model[0].weight[1:]]
    held = model[0].weight.to_local()
    dshard.set_strategy(model, "ddp")
    held.zero_()  # a copy by now
    found = [str(model[0].weight.full_tensor().abs().sum().item() > 0)]
    for tensor in old:
        try:
            (tensor + 0).sum().item()
        except dshard.StateError as error:
            found.append(str(error))
    return found


def test_an_alias_from_before_raises_and_names_the_parameter(worlds: WorldPool):
    for found in worlds.run(2, aliases):
        assert found[0] == "True"
        assert all("weight" in text and "Take it from the parameter again" in text for text in found[1:])
        assert len(found) == 2  # the view is one of the parameter itself, and follows it


def refused(case: str) -> None:
    if case == "plain":
        dshard.set_strategy(stack(), "full")
    model = sharded("full")
    if case == "none":
        dshard.set_strategy(model, {})
    elif case == "no optimizer":
        dshard.set_strategy(model, "ddp", optimizer=[torch.optim.SGD(model.parameters()), model])
    elif case == "pattern":
        dshard.set_strategy(model, {"embed*": "ddp"})
    elif case == "both":
        dshard.fully_shard(stack(), strategy="keep", reshard_after_forward=False)
    elif case == "gathered":
        with dshard.gathered(model):
            dshard.set_strategy(model, "ddp")
    elif case == "forward":
        model[0].register_forward_hook(lambda *args: dshard.set_strategy(model, "ddp"))
        model(rows(0))
    elif case == "backward":
        x = model(rows(0))
        x.register_hook(lambda grad: dshard.set_strategy(model, "ddp"))
        x.sum().backward()
    elif case == "ranks differ":
        dshard.set_strategy(model, "ddp" if dist.get_rank() else "full")
    elif case == "a rank's pattern":
        dshard.set_strategy(model, {"0.*" if dist.get_rank() else "embed": "ddp"})
    elif case == "does not divide":
        dshard.set_strategy(model, "hybrid(3)")
    elif case == "replicas":
        mesh = init_device_mesh("cpu", (2, 1))
        dshard.fully_shard(stack(), mesh=mesh, strategy="hybrid(1)")
        mesh = init_device_mesh("cpu", (1, 2))
        dshard.fully_shard(stack(), mesh=mesh, strategy="hybrid(1)")


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("plain", dshard.ArgumentError, "module must be a module that fully_shard was called on"),
        ("none", dshard.ArgumentError, "set_strategy: strategy must be one of"),
        ("no optimizer", dshard.ArgumentError, "optimizer must be an optimizer of torch.optim"),
        ("pattern", dshard.StateError, "'embed\\*' matches none of 0.weight"),
        ("both", dshard.StateError, "Leave one of them out"),
        ("gathered", dshard.StateError, r"a gathered\(\) scope is open"),
        ("forward", dshard.StateError, "a forward is open"),
        ("backward", dshard.StateError, "a backward is open"),
        ("ranks differ", dshard.DivergenceError, "all ranks must pass the same strategy, but number 0 is"),
        ("a rank's pattern", dshard.DivergenceError, "all ranks must pass the same strategy, but number 0 is"),
        ("does not divide", dshard.PlacementError, "they are 3"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(worlds: WorldPool, case, kind, text):
    for name, message in expect_error(worlds.get_world(2), refused, case):
        assert name == kind.__name__
        assert re.search(text, message), message


def test_the_numbers_that_this_file_counts_with():
    assert sum(math.prod(p.shape) for p in stack().parameters()) == NUMEL
