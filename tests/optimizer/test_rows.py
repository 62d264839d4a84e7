"""Small shards are stepped in rows, and nobody can tell but by the time that it takes."""

import copy
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dshard
from dshard.optimizer.rows import Rows
from dshard.testing import WorldPool
from tests.kit.counted import counted_peak
from tests.optimizer.random_programs import ACTIONS, Model, run

# Shards with and without whole vectors of a CPU, with fewer rows than ranks, without a dim, and too large for a row.
SHAPES: tuple[tuple[int, ...], ...] = ((5,), (16,), (48,), (7, 3), (16, 4), (1,), (2, 8), (), (160, 130))
KINDS: dict[str, dict[str, Any]] = {
    "ASGD": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adadelta": {},
    "Adagrad": {"initial_accumulator_value": 0.5},
    "Adam": {"amsgrad": True},
    "Adamax": {},
    "AdamW": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
}
FUSED = ("SGD", "Adagrad", "Adam", "AdamW")
STRATEGIES: tuple[Any, ...] = ("full", "ddp", "zero2", {"own.0": "ddp", "own.1": "zero1"})


def make(kind: str, params: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Every third parameter is in a group without weight decay; `kind` is a name and "foreach", "fused" or neither."""
    name, mode = kind.split(" ")
    decay = {} if name == "Rprop" else {"weight_decay": 0.1}
    groups = [{"params": list(params[1::3])}, {"params": [*params[::3], *params[2::3]], **decay, "lr": 0.02}]
    options = {**KINDS[name], **({} if mode == "for-loop" else {mode: True})}
    made: torch.optim.Optimizer = getattr(torch.optim, name)([g for g in groups if g["params"]], lr=0.01, **options)
    return made


def rows(optimizer: torch.optim.Optimizer) -> list[int]:
    """How many parameters each of those has that the last step took."""
    known: Rows = optimizer.__dict__["_dshard_rows"]
    return [len(row.params) for row in known.rows]


@st.composite
def programs(draw: st.DrawFn, actions: Sequence[str]) -> tuple[list[tuple[int, ...]], list[tuple[str, set[int]]]]:
    """Shapes of parameters, and what is done in each step, with those that have no gradient.

    Each step comes twice: rows are made again where one is like the one before.
    """
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=6, max_size=16))
    missing = st.sets(st.integers(0, len(shapes) - 1), max_size=2)
    steps = draw(st.lists(st.tuples(st.sampled_from(actions), missing), min_size=1, max_size=5))
    return shapes, [step for step in steps for _ in range(2)]


@settings(max_examples=15)
@given(data=st.data())
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_random_programs_have_the_bits_of_the_unsharded_one(worlds: WorldPool, num_ranks, data):
    shapes, program = data.draw(programs(ACTIONS))
    kind = f"{data.draw(st.sampled_from(sorted(KINDS)))} {data.draw(st.sampled_from(('for-loop', 'foreach')))}"
    worlds.run(num_ranks, run, make, kind, shapes, data.draw(st.sampled_from(STRATEGIES)), program)


def of_shards(params: Sequence[Any]) -> list[nn.Parameter]:
    return [nn.Parameter(param.to_local().detach().clone(), requires_grad=param.requires_grad) for param in params]


def give_gradients(params: Sequence[Any], twins: Sequence[Tensor], missing: set[int], scale: float) -> None:
    """To parameters, and the same to plain tensors of their shards."""
    for number, (param, twin) in enumerate(zip(params, twins, strict=True)):
        if not param.requires_grad:
            continue
        param.grad = twin.grad = None
        if number not in missing:
            param.grad = torch.zeros_like(param)
            twin.grad = param.grad.to_local().copy_(torch.randn(twin.shape, dtype=twin.dtype) * scale).clone()


def own(value: Any) -> Any:
    return value.to_local() if isinstance(value, dshard.ShardedTensor) else value


def check(params: Sequence[Any], optimizer: torch.optim.Optimizer, twins: Sequence[Any], other: Any) -> None:
    """All that a program can look at is what it would be of plain tensors; of order, too."""
    of_twin = {id(twin): number for number, twin in enumerate(twins)}
    of_param = {id(param): number for number, param in enumerate(params)}
    assert [of_param[id(param)] for param in optimizer.state] == [of_twin[id(twin)] for twin in other.state]
    for number, (param, twin) in enumerate(zip(params, twins, strict=True)):
        assert torch.equal(param.to_local(), twin), f"parameter {number}"
        assert (param.grad is None) == (twin.grad is None)
        if twin.grad is not None:
            assert torch.equal(param.grad.to_local(), twin.grad), f"gradient {number}"
        states = {name: own(value) for name, value in optimizer.state.get(param, {}).items()}
        assert list(states) == list(other.state.get(twin, {}))
        for name, value in other.state.get(twin, {}).items():
            assert type(states[name]) is type(value), f"state {name} of {number}"
            assert torch.equal(torch.as_tensor(states[name]), torch.as_tensor(value)), f"state {name} of {number}"


def fused(shapes: Sequence[tuple[int, ...]], name: str, dtype: torch.dtype, program: list[tuple[str, set[int]]]) -> int:
    """Compare fused steps with torch's own on plain tensors of the shards; gives how many parameters were in rows."""
    torch.manual_seed(1)
    model = dshard.fully_shard(Model(list(shapes)).to(dtype))
    model.own[0].requires_grad_(False)
    params = list(model.parameters())
    twins = of_shards(params)
    optimizer: Any = make(f"{name} fused", params)
    other: Any = make(f"{name} fused", twins)
    most = 0
    for action, missing in program:
        is_scaled = action == "scaled" and name != "Adagrad"  # whose kernel takes no scale
        missing = set() if name == "SGD" else missing  # torch's own refuses to begin with some momenta and not others
        give_gradients(params, twins, missing, 64.0 if is_scaled else 1.0)
        for each in (optimizer, other) if is_scaled else ():  # what GradScaler.step does
            each.grad_scale, each.found_inf = torch.tensor(64.0), torch.tensor(float(len(missing) > 1))
        optimizer.step()
        other.step()
        for each in (optimizer, other) if is_scaled else ():
            del each.grad_scale, each.found_inf
        check(params, optimizer, twins, other)
        most = max(most, sum(rows(optimizer)))
        if action == "write":
            with torch.no_grad():
                params[-1].add_(1)
                twins[-1].add_(1)
    return most


@settings(max_examples=15)
@given(data=st.data())
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_fused_steps_have_the_bits_of_torchs_on_the_shards(worlds: WorldPool, num_ranks, data):
    shapes, program = data.draw(programs(("none", "scaled", "write")))
    dtype = data.draw(st.sampled_from((torch.float32, torch.float64)))
    worlds.run(num_ranks, fused, shapes, data.draw(st.sampled_from(FUSED)), dtype, program)


def test_shards_of_whole_vectors_are_in_rows_of_fused_steps(worlds: WorldPool):
    shapes = [(16,), (48,), (16, 4), (2, 8), (32,), (5,), (64,), (16, 2), (160, 130), (32,), (16,), (16,)]
    program: list[tuple[str, set[int]]] = [("none", set()), ("scaled", set())]
    # The first is frozen, (5,) has no whole vectors on any rank, and (160, 130) is too large: two groups remain.
    assert worlds.run(2, fused, shapes, "AdamW", torch.float32, program) == [9, 9]


def changed(change: str) -> list[list[int]]:
    """Change what a program can between steps, in ways that a row must notice; gives the rows of each step."""
    torch.manual_seed(1)
    params = list(dshard.fully_shard(Model([(16,)] * 10)).parameters())
    twins = of_shards(params)
    optimizer, other = torch.optim.AdamW(params, lr=0.1), torch.optim.AdamW(twins, lr=0.1)
    found, held, loaded = [], [], []
    for step in range(5):
        give_gradients(params, twins, {step} if change == "other gradients each time" and step > 1 else set(), 1.0)
        optimizer.step()
        other.step()
        check(params, optimizer, twins, other)
        found.append(rows(optimizer))
        for each, state in ((params, optimizer.state), (twins, other.state)) if step == 1 else ():
            at = state[each[4]]
            if change == "a step count":
                at["step"].fill_(7)
            elif change == "a state":
                at["exp_avg"].mul_(2)
            elif change == "another tensor as a state":
                at["exp_avg"] = at["exp_avg"] * 2
            elif change == "no states":
                del state[each[4]]
            elif change == "a setting":
                (optimizer if state is optimizer.state else other).param_groups[0]["lr"] = 0.5
            elif change == "a held state":
                held.append(own(at["exp_avg"]))
            elif change == "a held step count":
                held.append(at["step"])
        if change == "a group" and step == 1:
            for each in (optimizer, other):
                moved = each.param_groups[0]["params"][5:]
                del each.param_groups[0]["params"][5:]
                each.add_param_group({"params": moved, "lr": 0.01})
        if change == "loaded states" and step == 1:
            for each in (optimizer, other):
                each.load_state_dict(copy.deepcopy(each.state_dict()))
        if change == "loaded states that are kept" and step == 1:
            for each in (optimizer, other):
                loaded.append(copy.deepcopy(each.state_dict()))
                each.load_state_dict(loaded[-1])
                held.append(loaded[-1]["state"][4]["step"])
        if change == "one step count of two" and step == 1:
            for each, state in ((params, optimizer.state), (twins, other.state)):
                state[each[4]]["step"] = state[each[5]]["step"]
    for one, two in zip(held[::2], held[1::2], strict=True):
        assert torch.equal(one, two)  # which the optimizer still writes to
    return found


@pytest.mark.parametrize(
    ("change", "between", "after"),
    [
        ("nothing", [10], [10]),
        ("a state", [10], [10]),
        ("a setting", [10], [10]),
        ("a held state", [10], [10]),
        ("a held step count", [10], [10]),
        ("a step count", [], [9]),
        ("another tensor as a state", [], [10]),
        ("no states", [], [9]),
        ("a group", [], [5, 5]),
        ("loaded states", [], [10]),
        ("loaded states that are kept", [], [10]),
        ("one step count of two", [], [8]),
        ("other gradients each time", [], []),
    ],
)
def test_what_a_program_changes_between_steps_is_stepped_with(worlds: WorldPool, change, between, after):
    for found in worlds.run(2, changed, change):
        assert found == [[10], [10], between, after, after]


def held_while_rows_change() -> int:
    """A program holds states, and then a gradient is missing; gives the number of parameters in rows."""
    params = list(dshard.fully_shard(Model([(16,)] * 10)).parameters())
    optimizer = torch.optim.AdamW(params, lr=0.1)
    for number, missing in enumerate((set(), set(), {1}, {1})):
        give_gradients(params, of_shards(params), missing, 1.0)
        optimizer.step()
        if number == 1:
            held, count = optimizer.state[params[4]]["exp_avg"].to_local(), optimizer.state[params[6]]["step"]
    assert count is optimizer.state[params[6]]["step"]
    assert count == 4
    assert torch.equal(held, optimizer.state[params[4]]["exp_avg"].to_local())
    assert held.data_ptr() == optimizer.state[params[4]]["exp_avg"].to_local().data_ptr()
    return sum(rows(optimizer))


def test_a_state_that_somebody_holds_stays_where_it_is(worlds: WorldPool):
    assert worlds.run(2, held_while_rows_change) == [8, 8]  # all but the one, and that without a gradient


def references() -> list[bool]:
    params: list[Any] = list(dshard.fully_shard(Model([(16,), (4, 4), (8, 3)] * 4)).parameters())
    optimizer = torch.optim.AdamW(params, lr=0.1)
    for _ in range(2):
        give_gradients(params, of_shards(params), set(), 1.0)
        optimizer.step()
    assert rows(optimizer) == [12]
    memory = [row.tensor.untyped_storage().nbytes() for row in optimizer.__dict__["_dshard_rows"].rows]
    assert memory == [0]
    return [param.shard_storage.is_held(own_refs=0, storage_refs=1) for param in params]


def test_rows_keep_no_shard_where_it_is_and_take_no_memory_between_steps(worlds: WorldPool):
    assert worlds.run(2, references) == [[False] * 12] * 2


def moved() -> tuple[int, int]:
    """Move one of many parameters with its states; gives the bytes that came beside at most, and stayed."""
    torch.manual_seed(1)
    model = dshard.fully_shard(Model([(1024,)] * 100))
    params: list[Any] = list(model.parameters())
    optimizer: Any = torch.optim.AdamW(params, lr=0.1)
    for _ in range(2):
        give_gradients(params, of_shards(params), set(), 1.0)
        optimizer.step()
    assert len(rows(optimizer)) == 4  # of 32 shards of 512 elements
    optimizer.zero_grad()
    values = [state["exp_avg"].full_tensor() for state in optimizer.state.values()]
    held = optimizer.state[params[7]]["exp_avg"].to_local()
    with counted_peak(model, optimizer) as counted:
        before = counted.alive_bytes()
        dshard.set_strategy(model, {"own.3": "ddp"}, optimizer=optimizer)
        after = counted.alive_bytes()
    for state, value in zip(optimizer.state.values(), values, strict=True):
        assert torch.equal(state["exp_avg"].full_tensor(), value)
    assert held.data_ptr() == optimizer.state[params[7]]["exp_avg"].to_local().data_ptr()
    return counted.num_bytes - before, after - before


def test_states_leave_rows_one_after_the_other_where_one_of_them_moves(worlds: WorldPool):
    row_bytes, moved_bytes = 4 << 14, 3 * 4 * 512  # the parameter and two states become twice as large
    for peak, left in worlds.run(2, moved):
        assert peak <= 2 * row_bytes + moved_bytes  # of eight: the one that is held keeps its own
        assert left <= row_bytes + 4 * moved_bytes  # with what a transport keeps


def compiled() -> int:
    """Train by a compiled step; gives how many graphs that took."""
    params = list(dshard.fully_shard(Model([(16,)] * 10)).parameters())
    twins = of_shards(params)
    optimizer, other = torch.optim.AdamW(params, lr=torch.tensor(0.1)), torch.optim.AdamW(twins, lr=torch.tensor(0.1))
    num_graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    torch._dynamo.reset()
    warnings.simplefilter("ignore")  # of dynamo's own
    step, twin_step = torch.compile(optimizer.step, backend=backend), torch.compile(other.step, backend="eager")
    for _ in range(4):
        give_gradients(params, twins, set(), 1.0)
        step()
        twin_step()
        check(params, optimizer, twins, other)
    assert rows(optimizer) == [10]
    return num_graphs


def gradients_after_a_step_without_rows() -> list[bool]:
    model = dshard.fully_shard(nn.ModuleList([*(nn.Linear(16, 16) for _ in range(4)), nn.Linear(160, 130)]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert rows(optimizer) == [9], "all but the large weight"
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    large = model[4].weight
    large.grad = large.grad.t().t()  # a lazy view: no shard stands in for a parameter with such a gradient
    optimizer.step()
    known = [weakref.ref(param.grad.shard_storage.tensor) for param in model[:4].parameters()]
    optimizer.zero_grad()
    return [shard() is None for shard in known]


def test_a_step_that_takes_no_rows_keeps_no_gradients(worlds: WorldPool):
    assert worlds.run(2, gradients_after_a_step_without_rows) == [[True] * 8] * 2


def test_a_compiled_step_of_rows_is_compiled_once(worlds: WorldPool):
    assert worlds.run(2, compiled) == [1, 1]
