"""Steps of whole parameters by their owners have the bits of the same optimizer over plain parameters.

Random programs: parameters of many shapes under different strategies, in two groups, some of whose gradients are
missing or clipped; between steps states are read and loaded, strategies are changed and settings too.
"""

import copy
import gc
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dshard
import dshard.optim
from dshard.layout import assign
from dshard.planner import Cluster, Link, Links, ModelCosts, ParamCosts, UnitCosts
from dshard.planner.owners import Owners
from dshard.testing import WorldPool, expect_error, fake_world
from tests.optimizer.random_programs import ACTIONS, Dims, Model, Parallel, check_states, gradients, run

SHAPES = ((6, 4), (5, 7), (1, 3), (16, 16), (9, 2), (3, 130))
VECTORS = ((8,), (3,), ())
KINDS = ("Muon", "Adafactor", "Preconditioned")


class Preconditioned(torch.optim.Optimizer):
    """As Shampoo: states of other shapes than the parameter's, counts in Python, in a tensor and in the group."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "rounds": 0})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.num_steps += 1
        for group in self.param_groups:
            group["rounds"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, group["lr"] / group["rounds"])
        return loss

    def _step(self, p: Tensor, lr: float) -> None:
        state, grad = self.state[p], p.grad.reshape(p.shape[0] if p.dim() else 1, -1)  # type: ignore[union-attr]
        if not state:
            state["left"] = torch.eye(grad.shape[0], dtype=p.dtype)
            state["count"], state["tensor count"], state["mean"] = 0, torch.tensor(0.0), torch.zeros_like(p)
        state["count"] += 1
        state["tensor count"] += 0.5
        state["left"].mul_(0.9).addmm_(grad, grad.T)
        state["mean"].lerp_(p.grad, 0.5)  # type: ignore[arg-type]
        update = torch.linalg.solve(state["left"] + 0.1 * torch.eye(grad.shape[0], dtype=p.dtype), grad).reshape(
            p.shape
        )
        p.add_(update + 0.01 * state["mean"], alpha=-lr * math.sqrt(state["count"]) / float(state["tensor count"]))


def make(kind: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.05}]
    groups = [group for group in groups if group["params"]]
    if kind == "Preconditioned":
        return dshard.optim.whole(Preconditioned(groups))
    return getattr(torch.optim, kind)(groups, lr=0.02)


STRATEGIES: tuple[Any, ...] = ("full", "ddp", "zero2", {"own.0": "ddp", "own.1": "zero1"})


@settings(max_examples=12)
@given(data=st.data())
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_random_programs_have_the_bits_of_plain_parameters(worlds: WorldPool, kind, num_ranks, data):
    check_random_program(worlds, kind, num_ranks, data)


@settings(max_examples=12)
@given(data=st.data())
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_so_they_have_where_ranks_exchange_messages(messaging: WorldPool, num_ranks, data):
    check_random_program(messaging, "Muon", num_ranks, data)


@settings(max_examples=12)
@given(data=st.data())
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_so_they_have_under_tensor_parallelism(worlds: WorldPool, kind, num_ranks, data):
    check_random_program(worlds, kind, num_ranks, data, is_parallel=True)


@pytest.mark.parametrize("kind", KINDS)
def test_so_they_have_where_that_has_replicas(worlds: WorldPool, kind):
    shapes = [(6, 4), (5, 7), (16, 16), (1, 3)]
    program = [("none", {1}), ("load", set()), ("clip", {0}), ("look", set())]
    dims = [(0,), (1,), ("replicated",), None]
    worlds.run(8, run, make, kind, shapes, "full", program, dims, 2)


def check_random_program(
    worlds: WorldPool, kind: str, num_ranks: int, data: st.DataObject, *, is_parallel: bool = False
) -> None:
    allowed = SHAPES if kind == "Muon" else SHAPES + VECTORS
    shapes = data.draw(st.lists(st.sampled_from(allowed), min_size=2, max_size=5))
    strategies = (*STRATEGIES, "hybrid(2)") if num_ranks == 4 else STRATEGIES
    missing = st.sets(st.integers(0, len(shapes) - 1), max_size=1)
    program = data.draw(st.lists(st.tuples(st.sampled_from(ACTIONS), missing), min_size=2, max_size=6))
    dims = None
    if is_parallel:
        strategies = STRATEGIES
        num_axes = data.draw(st.integers(1, num_ranks // 2))
        each = [st.tuples(*[st.sampled_from(["replicated", *range(len(shape))])] * num_axes) for shape in shapes]
        dims = [data.draw(each[0]), *(data.draw(st.none() | some) for some in each[1:])]
    worlds.run(num_ranks, run, make, kind, shapes, data.draw(st.sampled_from(strategies)), program, dims)


def least_makespan(costs: list[float], num_owners: int) -> float:
    """The best of all assignments."""
    best = sum(costs)

    def go(left: list[float], loads: tuple[float, ...]) -> None:
        nonlocal best
        if not left:
            best = min(best, max(loads))
            return
        for owner in range(num_owners):
            after = (*loads[:owner], loads[owner] + left[0], *loads[owner + 1 :])
            if after[owner] < best:
                go(left[1:], tuple(sorted(after)))

    go(sorted(costs, reverse=True), (0.0,) * num_owners)
    return best


@settings(max_examples=60)
@given(st.lists(st.integers(0, 40), max_size=11), st.integers(1, 4))
def test_no_rank_has_more_than_5_percent_above_the_best_assignment(costs, num_owners):
    owners = assign(costs, num_owners)
    loads = [
        sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == each) for each in range(num_owners)
    ]
    assert max(loads, default=0) <= 1.05 * least_makespan(list(map(float, costs)), num_owners)


def test_many_pieces_of_work_are_shared_out_within_5_percent_of_what_no_assignment_can_be_below():
    generator = torch.Generator().manual_seed(0)
    for num_owners in (2, 8, 64):
        costs = (torch.randint(1, 5, (num_owners * 6,), generator=generator) ** 3).tolist()
        owners = assign(costs, num_owners)
        loads = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == each) for each in range(num_owners)]
        assert max(loads) <= 1.05 * max(sum(costs) / num_owners, *costs)


def counted(model: nn.Module) -> tuple[int, int, list[str], int]:
    """Bytes that the second of two steps sends, those of all parameters, its collectives, and bytes of states here."""
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
    for step in range(2):
        model(gradients([(8, 8)] * 8, set(), step)).backward()
        with dshard.CommTrace() as trace:
            optimizer.step()
    sent = torch.tensor([sum(record.payload_bytes for record in trace.records)])
    dist.all_reduce(sent)
    holdings = optimizer.__dict__["_dshard_owners"].holdings.values()
    kept = sum(tensor.nbytes for holding in holdings for tensor in holding.tensors.values())
    return int(sent), sum(p.numel() * 4 for p in model.parameters()), [r.kind for r in trace.records], kept


def counted_of(strategy: str) -> tuple[int, int, list[str], int]:
    return counted(dshard.fully_shard(Model([(8, 8)] * 8), strategy=strategy))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_step_sends_parameters_and_gradients_to_owners_and_parameters_back_and_states_stay(
    worlds: WorldPool, num_ranks
):
    for sent, num_bytes, kinds, kept in worlds.run(num_ranks, counted_of, "full"):
        assert sent == 3 * num_bytes * (num_ranks - 1) // num_ranks
        assert kinds == ["all_to_all", "all_to_all"]
        assert kept == num_bytes // num_ranks
    for sent, num_bytes, kinds, kept in worlds.run(num_ranks, counted_of, "ddp"):
        assert sent == num_bytes * (num_ranks - 1)
        assert kinds == ["all_gather"]
        assert kept == num_bytes // num_ranks


def counted_on_two_meshes(dims: Dims) -> tuple[int, int, list[str], int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return counted(dshard.fully_shard(Parallel([(8, 8)] * 8, mesh["tp"], dims), mesh=mesh["dp"]))


def test_under_tensor_parallelism_a_matrix_has_one_owner_among_all_ranks(worlds: WorldPool):
    for sent, num_bytes, _, kept in worlds.run(4, counted_on_two_meshes, [(0,), (1,)] * 4):
        assert kept == num_bytes // 4
        # Half of values and gradients to the owner's place in data parallelism, half of them on to the owner; and back.
        assert sent == 2 * num_bytes * 3 // 2
    for sent, num_bytes, _, kept in worlds.run(4, counted_on_two_meshes, [("replicated",)] * 8):
        assert kept == num_bytes // 4
        # Both planes send half of values and gradients, none goes along the other mesh; all comes back, and then half.
        assert sent == 2 * num_bytes + num_bytes + num_bytes


def test_a_rank_of_a_fake_world_steps_what_it_owns():
    with fake_world(1, 4):
        model = dshard.fully_shard(Model([(8, 8)] * 6))
        optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
        for step in range(2):
            model(gradients([(8, 8)] * 6, set(), step)).backward()
            with dshard.CommTrace() as trace:
                optimizer.step()
            assert [record.kind for record in trace.records] == ["all_to_all", "all_to_all"]
        assert all(list(optimizer.state[p]) == ["momentum_buffer"] for p in model.parameters())


@pytest.mark.parametrize(("strategy", "within"), [("full", 4), ("hybrid(2)", 2), ("ddp", 1)])
def test_plans_reckon_with_the_bytes_that_are_sent(worlds: WorldPool, strategy, within):
    sent, *_ = worlds.run(4, counted_of, strategy)[0]
    params = tuple(ParamCosts(f"{number}", 8, 8, owner_work=1) for number in range(8))
    model = ModelCosts((UnitCosts("unit", params, forward_s=1.0, backward_s=1.0),))
    cluster = Cluster(4, 4, Links.of(Link(0.0, seconds_per_byte=1.0)))
    assert 4 * Owners(model, cluster).exchange_s(params, within) == sent  # by all ranks


class Forgetful(torch.optim.SGD):
    """Keeps a tensor like the parameter in its first step, and a number from then on."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"number": 1} if self.state[p] else {"like": torch.zeros_like(p)}
        return super().step(closure)


def forget() -> list[list[str]]:
    model = dshard.fully_shard(Model([(4, 4)] * 3))
    params = list(model.parameters())
    optimizer = dshard.optim.whole(Forgetful(params[:2], lr=0.1))
    for step in range(3):
        model(gradients([(4, 4)] * 3, set(), step)).backward()
        optimizer.step()
        if step == 1:
            optimizer.add_param_group({"params": params[2:]})  # who owns what is anew
    return [list(optimizer.state[p]) for p in params]


def test_states_that_are_no_more_are_not_brought_back(worlds: WorldPool):
    assert worlds.run(2, forget) == [[["number"], ["number"], ["like"]]] * 2


class OfLists(torch.optim.SGD):
    """Keeps a list for each parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = [1.0]
        return super().step(closure)


class Twice(torch.optim.SGD):
    """Calls its closure twice."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
        return super().step(closure)


def refused(kind: type[torch.optim.Optimizer]) -> None:
    model = dshard.fully_shard(Model([(4, 4), (3, 2)]))
    optimizer = dshard.optim.whole(kind(model.parameters(), lr=0.1))

    def closure() -> Tensor:
        loss = model(gradients([(4, 4), (3, 2)], set(), 0))
        loss.backward()
        return loss

    closure()
    optimizer.step(closure)


def test_what_owners_cannot_step_is_refused_by_name(worlds: WorldPool):
    with worlds.get_world(2) as world:
        texts = [text for _, text in expect_error(world, refused, OfLists)]
    assert any("own.0" in text and "'history' is a list" in text for text in texts), texts
    for _, text in expect_error(worlds.get_world(2), refused, Twice):
        assert "Twice: a step of whole parameters may call its closure once" in text


def one_by_all() -> None:
    plain, model = Model([(6, 6), (5, 3)]), dshard.fully_shard(Model([(6, 6), (5, 3)]))
    other, optimizer = torch.optim.Muon(plain.parameters()), torch.optim.Muon(model.parameters())
    dshard.optim.whole(optimizer, params=[list(model.parameters())[1]])
    for step in range(3):
        grads = gradients([(6, 6), (5, 3)], set(), step)
        for each, own in ((plain, other), (model, optimizer)):
            own.zero_grad()
            each(grads).backward()
            own.step()
    held = optimizer.__dict__["_dshard_owners"].holdings
    assert len(held) == 1
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-5, atol=1e-6)
    check = optimizer.state[list(model.parameters())[1]]["momentum_buffer"].full_tensor()
    assert torch.equal(check, other.state[list(plain.parameters())[1]]["momentum_buffer"])


def test_parameters_that_are_left_out_are_stepped_by_all_ranks(worlds: WorldPool):
    worlds.run(2, one_by_all)


class Nested(torch.optim.Muon):
    """Its step is that of its base class, which torch has put hooks around by then."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Counting(torch.optim.SGD):
    """Reads what is beside its parameters: an argument, names, counts in itself, in a group and in its state."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.number, self.state["all"] = torch.zeros(1), {"steps": 0}
        for group in self.param_groups:
            group["count"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        self.number += 1
        self.state["all"]["steps"] += 1
        for group in self.param_groups:
            group["count"] += 1
            for p, name in zip(group["params"], group["param_names"], strict=True):
                if p.grad is not None:
                    factor = scale * (1 + int(name)) / (self.number + group["count"] + self.state["all"]["steps"])
                    p.sub_(p.grad * factor)


def beside(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    shapes = [(3, 4), (8, 8), (5, 2), (0, 3)]
    torch.optim.Muon([nn.Parameter(torch.ones(2, 2))])  # the class's step has hooks from here on
    plain, model = Model(shapes), dshard.fully_shard(Model(shapes))
    own = [kind([(str(i), p) for i, p in enumerate(each.own)], lr=0.1) for each in (plain, model)]
    dshard.optim.whole(own[1])
    for step in range(3):
        for each, optimizer in zip((plain, model), own, strict=True):
            optimizer.zero_grad()
            each(gradients(shapes, {step}, step)).backward()
            optimizer.step(**options)
        assert [len(group["params"]) for group in own[1].param_groups] == [4]
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q)
    assert getattr(own[0], "number", 0) == getattr(own[1], "number", 0)


@pytest.mark.parametrize(("kind", "options"), [(Nested, {}), (Counting, {"scale": 0.25}), (Counting, {})])
def test_a_step_may_read_what_is_beside_its_parameters(worlds: WorldPool, kind, options):
    worlds.run(2, beside, kind, options)


class Failing(torch.optim.SGD):
    """Raises once told."""

    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ValueError("told to")
        return super().step(closure)


def states_by_hand() -> None:
    shapes = [(6, 4), (6, 4), (5, 3)]
    plain, model = Model(shapes), dshard.fully_shard(Model(shapes))
    own = [Failing(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    dshard.optim.whole(own[1])

    def train(step: int) -> None:
        for each, optimizer in zip((plain, model), own, strict=True):
            optimizer.zero_grad()
            each(gradients(shapes, set(), step)).backward()
            optimizer.step()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q), f"after step {step}"

    train(0)
    early = [copy.deepcopy(own[0].state_dict()), own[1].state_dict()]  # the latter is what it is, with its owners
    for optimizer in own:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(1)
    own[0].load_state_dict(early[0])
    own[1].load_state_dict(early[1])
    train(2)
    for each, optimizer in zip((plain, model), own, strict=True):  # states of two parameters, swapped
        first, second = list(each.parameters())[:2]
        optimizer.state[first], optimizer.state[second] = optimizer.state[second], optimizer.state[first]
    train(3)
    for optimizer in own:
        optimizer.__dict__["fails"] = True
        with pytest.raises(ValueError, match="told to"):
            optimizer.step()
        optimizer.__dict__["fails"] = False
    check_states(own[1], own[0])
    train(4)
    check_states(own[1], own[0])


def test_states_that_a_program_keeps_and_exchanges_or_that_a_step_which_raised_has_left(worlds: WorldPool):
    worlds.run(2, states_by_hand)


def freed() -> bool:
    model = dshard.fully_shard(Model([(6, 4), (5, 3)]))
    optimizer = torch.optim.Muon(model.parameters())
    model(gradients([(6, 4), (5, 3)], set(), 0)).backward()
    optimizer.step()
    holdings = optimizer.__dict__["_dshard_owners"].holdings.values()
    kept = [weakref.ref(tensor) for holding in holdings for tensor in holding.tensors.values()]
    assert all(each() is not None for each in kept)
    gc.collect()
    gc.disable()
    try:
        del optimizer, holdings
        return all(each() is None for each in kept)
    finally:
        gc.enable()


def test_states_go_with_their_optimizer(worlds: WorldPool):
    assert worlds.run(2, freed) == [True, True]


class Replacing(torch.optim.Optimizer):
    """Its state is another tensor in each step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        assert self.param_groups[0]["lr"] == 0.1
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                self.state[p]["basis"] = torch.linalg.qr(p.grad + torch.eye(*p.shape))[0]
            if params:
                torch._foreach_add_(params, [self.state[p]["basis"] for p in params], alpha=-group["lr"])


def replaced_states(*, reads: bool) -> None:
    norms = []
    for kind in ("plain", "owners"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
        optimizer: Any = Replacing(model.parameters())
        if kind == "owners":
            dshard.fully_shard(model)
            optimizer = dshard.optim.whole(Replacing(model.parameters()))
        kept, changes = [], []
        for _ in range(3):
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            assert len(optimizer.param_groups[0]["params"]) == 2
            kept.append(optimizer.state[model[0].weight]["basis"])
            if reads:
                kept[-1].sum()
        if reads or kind == "plain":
            changes = [(b - a).norm().item() for a, b in itertools.pairwise(kept)]
        else:
            with pytest.raises(dshard.StateError, match=r"0\.weight: its owner's step .* 'basis', .* clone\(\)"):
                kept[0].sum()
        norms.append(changes)
    if reads:
        assert norms[0] == pytest.approx(norms[1], abs=1e-6)
        assert min(norms[0]) > 0.01


@pytest.mark.parametrize("reads", [False, True])
def test_a_state_that_a_step_replaces_leaves_the_one_before_as_it_was_or_gone(worlds: WorldPool, reads):
    worlds.run(2, replaced_states, reads=reads)


def order_of_states() -> list[tuple[int, ...]]:
    torch.manual_seed(0)
    sizes = ((8, 4), (4, 12), (12, 6), (6, 8))
    model = dshard.fully_shard(nn.Sequential(*[nn.Linear(a, b, bias=False) for a, b in sizes]))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    return [tuple(state["momentum_buffer"].shape) for state in optimizer.state.values()]


def test_states_are_in_the_order_of_the_parameters(worlds: WorldPool):
    assert worlds.run(2, order_of_states) == [[(4, 8), (12, 4), (6, 12), (8, 6)]] * 2
