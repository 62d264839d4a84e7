"""Modules that some ranks run: as one process on the batches of all ranks, whoever runs what and when."""

from contextlib import nullcontext
from dataclasses import dataclass
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

WIDTH = 6
Runs = tuple[tuple[bool, ...], ...]  # of each place, how often its block comes, and whether a rank runs it


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rest = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(torch.tanh(self.first(x)))


class Net(nn.Module):
    """Three places with a tower that a rank may run or not: behind the first layer, in a checkpoint, and at the end.

    Args:
        checkpoints: How the second place is computed again: "", "reentrant" or "not reentrant".
        shares: Whether `dshard.run_by_some` is around each use.
    """

    def __init__(self, checkpoints: str = "", *, shares: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.towers = nn.ModuleList(Tower() for _ in range(2))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.checkpoints, self.shares = checkpoints, shares

    def use(self, x: Tensor, tower: nn.Module, runs: tuple[bool, ...]) -> Tensor:
        for does in runs:
            with dshard.run_by_some(tower, runs=does) if self.shares else nullcontext():
                if does:
                    x = x + tower(x)
        return x

    def forward(self, x: Tensor, runs: Runs) -> Tensor:
        x = self.use(self.embed(x), self.towers[0], runs[0])
        x = torch.tanh(self.blocks[0](x))
        if self.checkpoints and torch.is_grad_enabled():
            is_reentrant = self.checkpoints == "reentrant"
            x = checkpoint(self.use, x, self.towers[1], runs[1], use_reentrant=is_reentrant)
        else:
            x = self.use(x, self.towers[1], runs[1])
        return self.head(self.use(torch.tanh(self.blocks[1](x)), self.towers[0], runs[2]))


@dataclass(frozen=True)
class Program:
    """A training; `runs` by step, micro-batch and rank."""

    units: str
    strategy: Any
    checkpoints: str
    is_synced: bool  # whether each micro-batch reduces
    is_frozen: bool  # whether the towers alone are trained
    is_half: bool
    runs: tuple[tuple[tuple[Runs, ...], ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.runs[0][0])


@st.composite
def programs(draw: st.DrawFn, worlds: tuple[int, ...] = (2, 2, 3, 4)) -> Program:
    num_ranks = draw(st.sampled_from(worlds))
    num_micro = draw(st.integers(1, 2))
    steps = []
    for _ in range(2):
        micros = []
        for _ in range(num_micro):
            lengths = draw(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 1)))
            own = st.tuples(*(st.tuples(*[st.booleans()] * length) for length in lengths))
            micros.append(draw(st.tuples(*[own] * num_ranks)))
        steps.append(tuple(micros))
    mixes: list[Any] = ["full", "keep", "zero1", "zero2", "ddp", "split(2)", {"towers.0*": "ddp", "*": "full"}]
    is_frozen = draw(st.booleans())
    return Program(
        units=draw(st.sampled_from(["root", "blocks", "fine"])),
        strategy=draw(st.sampled_from([*mixes, *(["hybrid(2)"] if num_ranks == 4 else [])])),
        checkpoints=draw(st.sampled_from(["", "not reentrant", *([] if is_frozen else ["reentrant"])])),
        is_synced=is_frozen or draw(st.booleans()),
        is_frozen=is_frozen,
        is_half=draw(st.booleans()),
        runs=tuple(steps),
    )


def net(program: Program, *, shares: bool) -> Net:
    torch.manual_seed(0)
    model = Net(program.checkpoints if shares else "", shares=shares)
    for name, param in model.named_parameters():
        param.requires_grad_(not program.is_frozen or name.startswith("towers"))
    return model.double()


def shard(model: Net, program: Program) -> None:
    options: dict[str, Any] = {}
    if program.is_half:
        options["mp_policy"] = dshard.MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    parts = {
        "root": [],
        "blocks": [*model.towers, *model.blocks],
        "fine": [each for tower in model.towers for each in (tower.first, tower.rest)],
    }[program.units]
    for part in parts:
        own = {"*": "full"} if isinstance(program.strategy, dict) else program.strategy
        dshard.fully_shard(part, strategy=own, **options)
    rules = program.strategy if not parts or not isinstance(program.strategy, dict) else {"*": "full"}
    dshard.fully_shard(model, strategy=rules, **options)


def batch(step: int, micro: int, rank: int) -> Tensor:
    seed = 1000 * step + 100 * micro + rank
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def train(program: Program) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, plain = net(program, shares=True), net(program, shares=False)
    shard(model, program)
    steps = [torch.optim.SGD(each.parameters(), 0.05, momentum=0.9) for each in (model, plain)]
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if program.is_half else {"rtol": 1e-9, "atol": 1e-12}
    for step, micros in enumerate(program.runs):
        for micro, runs in enumerate(micros):
            is_synced = program.is_synced or micro == len(micros) - 1
            with nullcontext() if is_synced else model.no_sync():
                loss = model(batch(step, micro, rank), runs[rank]).double().square().mean()
                assert loss.requires_grad == (not program.is_frozen or any(any(map(any, own)) for own in runs))
                if loss.requires_grad:
                    loss.backward()
            for other in range(size):
                loss = plain(batch(step, micro, other), runs[other]).square().mean() / size
                if loss.requires_grad:
                    loss.backward()
        for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (found.grad is None) == (expected.grad is None), name
            if expected.grad is not None:
                torch.testing.assert_close(found.grad.full_tensor(), expected.grad, **tolerance)
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            own = program.runs[step][0][rank]
            torch.testing.assert_close(
                model(batch(9, 9, rank), own).double(), plain(batch(9, 9, rank), own), **tolerance
            )


@settings(max_examples=60)
@given(program=programs())
def test_a_training_is_that_of_one_process_on_all_batches(worlds: WorldPool, program):
    worlds.run(program.num_ranks, train, program)


@settings(max_examples=15)
@given(program=programs())
def test_the_same_by_messages(messaging: WorldPool, program):
    messaging.run(program.num_ranks, train, program)


def records(runs: tuple[bool, bool]) -> list[tuple[str, str]]:
    """What a forward and backward send of a tower, and ahead of it."""
    torch.manual_seed(0)
    model = Net()
    dshard.fully_shard(model.towers[0])
    dshard.fully_shard(model)
    own = ((runs[dist.get_rank()],), (), ())
    for _ in range(2):  # the first compares what ranks use
        with dshard.CommTrace() as trace:
            model(batch(0, 0, 0).float(), own).sum().backward()
    return [(each.kind, each.label) for each in trace.records if "towers.0" in each.label]


def test_a_region_sends_one_message_and_where_none_runs_nothing_else(worlds: WorldPool):
    message = [("check", "run_by_some(towers.0)")]
    assert worlds.run(2, records, (False, False)) == [message] * 2
    gather, reduce = ("all_gather", "towers.0"), ("reduce_scatter", "towers.0")
    assert worlds.run(2, records, (True, False)) == [[*message, gather, gather, reduce]] * 2


class Nested(nn.Module):
    """A tower whose first layer lies in a block of its own; and a forward that is decorated."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.other, self.head = Tower(), Decorated(), nn.Linear(WIDTH, WIDTH)
        self.shares = True

    def forward(self, x: Tensor, outer: bool, inner: bool) -> Tensor:
        x = self.head(x)
        with dshard.run_by_some(self.tower, runs=outer) if self.shares else nullcontext():
            if outer:
                with dshard.run_by_some(self.tower.first, runs=inner) if self.shares else nullcontext():
                    if inner:
                        x = x + self.tower.first(x)
                x = x + self.tower.rest(x)
        found = self.other(x if inner else None)
        return self.head(x if found is None else x + found)


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.is_plain = False

    @dshard.run_by_some(runs=lambda self, x: x is not None)
    def forward(self, x: Tensor | None) -> Tensor | None:
        assert x is not None
        return self.layer(x)


def nested() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain, model = Nested().double(), None
    torch.manual_seed(0)
    model = Nested().double()
    plain.shares = False
    for part in (model.tower.first, model.tower.rest, model.other):
        dshard.fully_shard(part)
    dshard.fully_shard(model)
    for step in range(4):
        runs = [((step + other) % 2 == 0, (step // 2 + other) % 2 == 0) for other in range(size)]
        model(batch(step, 0, rank), *runs[rank]).square().mean().backward()
        for other in range(size):
            (plain(batch(step, 0, other), *runs[other]).square().mean() / size).backward()
        for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (found.grad is None) == (expected.grad is None), name
            if expected.grad is not None:
                torch.testing.assert_close(found.grad.full_tensor(), expected.grad)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_blocks_within_one_another_and_decorated_forwards(worlds: WorldPool, num_ranks):
    worlds.run(num_ranks, nested)


def wrong(how: str) -> str:
    model = Net()
    dshard.fully_shard(model.towers[0])
    dshard.fully_shard(model.towers[1])
    dshard.fully_shard(model)
    if how == "another module":
        try:
            with dshard.run_by_some(model.towers[0], runs=dist.get_rank() == 0):
                if dist.get_rank() == 0:
                    model.towers[1](torch.ones(1, WIDTH))
        except dshard.StateError as error:
            return str(error)
    elif how == "without it":
        model.shares = False
        model(torch.ones(1, WIDTH), ((dist.get_rank() == 0,), (), ())).sum().backward()
    elif how == "no module":
        with dshard.run_by_some(runs=True):
            pass
    return ""


def test_what_the_block_does_not_name_is_refused_in_it(worlds: WorldPool):
    text, other = worlds.run(2, wrong, "another module")
    assert other == ""
    assert (
        "run_by_some(towers.0): in the block all ranks gather the parameters of the module that it names, but" in text
    )
    assert "this rank uses those of 'towers.1'" in text


def test_a_module_of_some_ranks_is_told_the_way_out(worlds: WorldPool):
    for kind, text in expect_error(worlds.get_world(2), wrong, "without it"):
        assert kind == "DivergenceError"
        assert "dshard.run_by_some" in text


def test_a_block_needs_a_module(worlds: WorldPool):
    for kind, text in expect_error(worlds.get_world(1), wrong, "no module"):
        assert kind == "ArgumentError"
        assert "module was left out" in text


def as_it_is() -> Tensor:
    """A program runs with and without sharding."""
    torch.manual_seed(0)
    model = Net()
    return model(torch.ones(1, WIDTH), ((True, False), (True,), ())).sum().detach()


def test_a_plain_module_is_left_alone(worlds: WorldPool):
    assert len(set(map(float, worlds.run(2, as_it_is)))) == 1
