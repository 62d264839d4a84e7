"""Training on virtual ranks: the same bits on every number of processes, and those of the documented tree."""

import contextlib
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dshard
from dshard.collectives import ShardGroup, TreeSum
from dshard.testing import WorldPool, expect_error


class Block(nn.Module):
    """Attention over width 12 and a layer of 7 features, so that nothing is cut evenly; with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.mix = nn.Linear(12, 36)
        self.out = nn.Linear(12, 12)
        self.mlp = nn.Sequential(nn.Linear(12, 7), nn.GELU(), nn.Dropout(0.2), nn.Linear(7, 12))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + self.mlp(x)


class Net(nn.Module):
    """A small GPT with a tied head, a batch norm, a frozen weight, and one that some virtual ranks alone use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.statistics = nn.BatchNorm1d(12, affine=False)
        self.head = nn.Linear(12, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.rand(5), requires_grad=False)
        self.rare = nn.Parameter(torch.full((5, 3), 0.1))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor, uses_rare: bool) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.statistics(x.flatten(0, 1).float()).to(x.dtype).view_as(x) * self.gain + self.frozen.sum()
        out = self.head(x)
        return out + self.rare.square().sum() * out.std() if uses_rare else out


@dataclass(frozen=True)
class Case:
    """How to train."""

    virtual: int = 4
    strategy: Any = None
    precision: str = "none"
    micro: int = 1
    optimizer: str = "adamw"
    clip: str = "dshard"
    grad_reduce: Any = "mean"
    divisor: float | None = None
    steps: int = 4
    restarts: tuple[int, ...] = ()
    native: bool = False
    loops: int = 1
    folder: str | None = None  # for restarts from a checkpoint, and not by hand


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True, momentum=0.5),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}
PRECISIONS: dict[str, Any] = {
    "none": None,
    "bf16": dshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "bf16 reduced": dshard.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
}


def batch(step: int, rank: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + part)
    return torch.randint(0, 11, (3, 6), generator=generator)


def build(case: Case) -> Any:
    torch.manual_seed(7)
    model = Net()
    options: dict[str, Any] = {
        "strategy": case.strategy,
        "mp_policy": PRECISIONS[case.precision],
        "grad_reduce": case.grad_reduce,
    }
    for block in model.blocks:
        dshard.fully_shard(block, **options)
    sharded = dshard.fully_shard(model, virtual_ranks=case.virtual, **options)
    if case.divisor is not None:
        for module in sharded.modules():
            if isinstance(module, dshard.FSDPModule):
                module.set_gradient_divide_factor(case.divisor)
    return sharded


@dataclass
class Saved:
    """What one process knows of a run: full values, and the states of its virtual ranks."""

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    moments: list[dict[str, Any]]
    states: dict[int, Tensor]
    losses: list[list[float]]
    norms: list[float]


@contextlib.contextmanager
def natively() -> Any:
    """The collectives of backends that have their own, here gloo's."""
    init = ShardGroup.__init__

    def without_direct(self: ShardGroup, *args: Any) -> None:
        init(self, *args)
        self.is_direct = False

    ShardGroup.__init__ = without_direct
    try:
        yield
    finally:
        ShardGroup.__init__ = init


def trained(case: Case, start: int = 0, saved: Saved | None = None) -> Saved:
    """Steps of a case on this number of processes, from where another number left it."""
    with natively() if case.native else nullcontext():
        model = build(case)
        optimizer = OPTIMIZERS[case.optimizer](p for p in model.parameters() if p.requires_grad)
        losses: list[list[float]] = []
        norms: list[float] = []
        if saved is not None:
            losses, norms = saved.losses, saved.norms
            if case.folder is None:
                restore(model, optimizer, saved)
            else:
                assert dshard.checkpoint.load(case.folder, model, optimizer) == {"next": start}
        torch.manual_seed(1000 + dist.get_rank())  # what is outside of the loop must not matter
        for step in range(start, start + case.steps):
            loss, norm = train_step(case, model, optimizer, step)
            losses.append(loss)
            norms.append(norm)
        if case.folder is not None:
            end = start + case.steps
            dshard.checkpoint.save(f"{case.folder}/{end}", model, optimizer, step=end, extra={"next": end}, keep=1)
        return save(model, optimizer, losses, norms)


def train_step(case: Case, model: Any, optimizer: torch.optim.Optimizer, step: int) -> tuple[list[float], float]:
    found: dict[int, Tensor] = {}
    for loop in range(case.loops):
        for rank in dshard.virtual_ranks(model):
            for part in range(case.micro):
                with nullcontext() if part == case.micro - 1 else dshard.no_sync(model):
                    tokens = batch(step, rank, part + 10 * loop)
                    out = model(tokens[:, :-1], uses_rare=(rank + step) % 3 == 0).float()
                    loss = F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())
                    loss.backward()
            found[rank] = loss
    norm = torch.zeros(())
    if case.clip == "dshard":
        norm = dshard.clip_grad_norm_(model.parameters(), 0.7)
    elif case.clip == "torch":
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.7)
    optimizer.step()
    optimizer.zero_grad()
    return dshard.virtual.of_all_ranks(model, found).tolist(), float(norm)


def save(model: Any, optimizer: torch.optim.Optimizer, losses: list[list[float]], norms: list[float]) -> Saved:
    def full(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, dshard.ShardedTensor) else value

    params = [p for group in optimizer.param_groups for p in group["params"]]
    return Saved(
        {name: p.full_tensor().detach() for name, p in model.named_parameters()},
        {name: b.clone() for name, b in model.named_buffers()},
        [{key: full(value) for key, value in optimizer.state[p].items()} for p in params],
        dshard.virtual.states_of(model),
        losses,
        norms,
    )


def restore(model: Any, optimizer: torch.optim.Optimizer, saved: Saved) -> None:
    model.load_state_dict({**saved.weights, **saved.buffers}, strict=False)
    groups = optimizer.state_dict()["param_groups"]
    moments = {number: state for number, state in enumerate(saved.moments) if state}
    optimizer.load_state_dict({"state": moments, "param_groups": groups})
    dshard.virtual.restore_states(model, saved.states)


def run(worlds: WorldPool, num_processes: int, case: Case, start: int = 0, saved: Saved | None = None) -> Saved:
    found = worlds.run(num_processes, trained, case, start, saved)
    states = {rank: state for each in found for rank, state in each.states.items()}
    assert sorted(states) == list(range(case.virtual))
    return replace(found[0], states=states)


def same(left: Saved, right: Saved) -> None:
    """All bits are."""
    assert left.losses == right.losses
    assert left.norms == right.norms
    for one, other in ((left.weights, right.weights), (left.buffers, right.buffers)):
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
    for one, other in zip(left.moments, right.moments, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one)
    for rank, state in left.states.items():
        assert torch.equal(state, right.states[rank])


@pytest.mark.parametrize(("num_steps", "strategy"), [(40, None), (8, {"blocks.1.*": "zero1", "*": "ddp"})])
def test_forty_steps_through_restarts_are_those_without(worlds: WorldPool, tmp_path, num_steps, strategy):
    case = Case(strategy=strategy, steps=num_steps)
    whole = run(worlds, 4, case)
    assert len(set(map(tuple, whole.losses))) == num_steps
    for num_processes in (2, 1):
        same(whole, run(worlds, num_processes, case))
    part = num_steps // 4
    for folder in (None, str(tmp_path)):
        saved: Saved | None = None
        for start, num_processes in zip(range(0, num_steps, part), (4, 2, 1, 4), strict=True):
            saved = run(worlds, num_processes, replace(case, steps=part, folder=folder), start, saved)
        assert saved is not None
        same(whole, saved)


cases = st.builds(
    Case,
    virtual=st.sampled_from([4, 4, 12]),
    strategy=st.sampled_from([None, "ddp", "zero1", "zero2", "keep", {"blocks.0.*": "ddp", "*": "full"}]),
    precision=st.sampled_from(list(PRECISIONS)),
    micro=st.sampled_from([1, 2, 3]),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    clip=st.sampled_from(["dshard", "torch", "none"]),
    grad_reduce=st.sampled_from(["mean", "sum"]),
    divisor=st.sampled_from([None, None, 3.0]),
    native=st.booleans(),
    loops=st.sampled_from([1, 1, 2]),
    steps=st.just(2),
)


@settings(max_examples=8)
@given(case=cases)
def test_every_way_of_training_gives_the_same_bits_on_4_2_and_1_processes(worlds: WorldPool, case):
    alone = run(worlds, 1, case)
    for num_processes in (2, 4):
        same(alone, run(worlds, num_processes, case))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("virtual", [4, 12])
def test_replicas_of_shards_give_the_same_bits(worlds: WorldPool, virtual, native):
    case = Case(virtual=virtual, strategy="hybrid(2)", steps=3, native=native)
    expected = run(worlds, 1, replace(case, strategy=None))
    for num_processes in (2, 4):
        same(expected, run(worlds, num_processes, case))


@pytest.mark.parametrize(("virtual", "counts"), [(6, (3, 2, 1)), (3, (3, 1)), (1, (1,)), (5, (1,))])
def test_numbers_that_are_no_powers_of_two(worlds: WorldPool, virtual, counts):
    case = Case(virtual=virtual, steps=3)
    expected = run(worlds, 1, case)
    for num_processes in counts:
        same(expected, run(worlds, num_processes, case))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def inputs(step: int, rank: int, part: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + part))


def simple(virtual: int, micro: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = dshard.fully_shard(Plain(), virtual_ranks=virtual)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        for rank in dshard.virtual_ranks(model):
            for part in range(micro):
                with nullcontext() if part == micro - 1 else dshard.no_sync(model):
                    model(inputs(step, rank, part)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def by_the_tree(virtual: int, micro: int) -> dict[str, Tensor]:
    """Plain torch: the gradient of each virtual rank by itself, added by halves, divided once."""

    def total(grads: list[Tensor]) -> Tensor:
        if len(grads) == 1:
            return grads[0]
        left = 1 << (len(grads) - 1).bit_length() - 1
        return total(grads[:left]) + total(grads[left:])

    torch.manual_seed(0)
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        found: list[list[Tensor]] = []
        for rank in range(virtual):
            model.zero_grad()
            for part in range(micro):
                model(inputs(step, rank, part)).square().mean().backward()
            found.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
        for p, grads in zip(model.parameters(), zip(*found, strict=True), strict=True):
            p.grad = total(list(grads)) / virtual
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("virtual", "num_processes", "micro"), [(4, 1, 1), (4, 2, 2), (4, 4, 1), (6, 2, 1), (6, 3, 2), (7, 1, 1), (8, 2, 1)]
)
def test_the_sum_is_the_documented_tree(worlds: WorldPool, virtual, num_processes, micro):
    expected = by_the_tree(virtual, micro)
    for got in worlds.run(num_processes, simple, virtual, micro):
        assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


def sharded(**options: Any) -> Any:
    torch.manual_seed(0)
    return dshard.fully_shard(Plain(), virtual_ranks=4, **options)


def random_draws(num_loops: int) -> tuple[dict[int, list[float]], float, float]:
    model = sharded()
    torch.manual_seed(5)
    before = torch.rand(()).item()
    torch.manual_seed(5)
    found: dict[int, list[float]] = {}
    for _ in range(num_loops):
        for rank in dshard.virtual_ranks(model):
            found.setdefault(rank, []).append(torch.rand(()).item())
    return found, before, torch.rand(()).item()


def test_each_virtual_rank_has_random_numbers_of_its_own(worlds: WorldPool):
    found: dict[int, dict[int, list[float]]] = {}
    for num_processes in (1, 2, 4):
        found[num_processes] = {}
        for draws, outside, after in worlds.run(num_processes, random_draws, 3):
            found[num_processes] |= draws
            assert outside == after  # the loop has drawn none of them
    assert found[1] == found[2] == found[4]
    assert len(set(itertools.chain(*found[1].values()))) == 12


# --- what is refused ---


def step(model: Any, **options: Any) -> None:
    for rank in dshard.virtual_ranks(model):
        model(inputs(0, rank, 0)).sum().backward()


def forward_outside() -> None:
    model = sharded()
    with torch.no_grad():
        model(inputs(0, 0, 0))
    model.eval()
    model(inputs(0, 0, 0))
    model.train()
    model(inputs(0, 0, 0))


def backward_outside() -> None:
    sharded().eval()(inputs(0, 0, 0)).sum().backward()


def two_backwards() -> None:
    model = sharded()
    for _ in dshard.virtual_ranks(model):
        model(inputs(0, 0, 0)).sum().backward()
        model(inputs(0, 0, 0)).sum().backward()


def reads_early() -> None:
    model = sharded()
    for rank in dshard.virtual_ranks(model):
        with dshard.no_sync(model):
            model(inputs(0, rank, 0)).sum().backward()
        model.layers[0].weight.grad.sum()


def drops() -> None:
    model = sharded()
    for rank in dshard.virtual_ranks(model):
        model.zero_grad()
        model(inputs(0, rank, 0)).sum().backward()


def ends_early() -> None:
    model = sharded()
    for rank in dshard.virtual_ranks(model):
        with dshard.no_sync(model):
            model(inputs(0, rank, 0)).sum().backward()
        break
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def unreduced() -> None:
    model = sharded()
    with dshard.no_sync(model):
        step(model)
    step(model)


def captured() -> None:
    model = sharded()
    for rank in dshard.virtual_ranks(model):
        torch.autograd.grad(model(inputs(0, rank, 0)).sum(), [model.layers[0].weight])


def hooked() -> None:
    model = sharded()
    model.layers[0].weight.register_hook(lambda grad: grad * 2)
    step(model)


def nested() -> None:
    model = sharded()
    for _ in dshard.virtual_ranks(model):
        step(model)


def fused() -> None:
    model = sharded()
    step(model)
    torch.optim.AdamW(model.parameters(), fused=True).step()


def half() -> None:
    torch.manual_seed(0)
    step(dshard.fully_shard(Plain().bfloat16(), virtual_ranks=4))


def reduce_hook() -> None:
    model = sharded()
    model.set_all_reduce_hook(lambda row: None)
    step(model)


def owed() -> None:
    model = sharded()
    model.set_requires_all_reduce(False)
    step(model)


def sliced() -> None:
    step(sharded(strategy="split(2)"))


def statistics() -> None:
    model = dshard.fully_shard(nn.Sequential(nn.Linear(5, 5), nn.SyncBatchNorm(5)), virtual_ranks=4)
    step(model)


def broadcast() -> None:
    sharded(buffers="broadcast")


def joined() -> None:
    with dshard.join(sharded()):
        pass


def order_three() -> None:
    model = sharded()
    step(model)
    dshard.clip_grad_norm_(model.parameters(), 1.0, norm_type=3)


def no_virtual() -> None:
    step(dshard.fully_shard(Plain()))


def three() -> None:
    dshard.fully_shard(Plain(), virtual_ranks=3)


def lacks_states() -> None:
    model = sharded()
    dshard.virtual.restore_states(model, {})


def lacks_losses() -> None:
    model = sharded()
    dshard.virtual.of_all_ranks(model, {0: torch.ones(())})


REFUSED: list[tuple[Callable[[], None], str, str]] = [
    (forward_outside, "StateError", "a forward that is to be trained runs outside"),
    (backward_outside, "StateError", "a backward runs outside"),
    (two_backwards, "StateError", "each virtual rank reduces a gradient once"),
    (reads_early, "StateError", "a gradient is the sum over all virtual ranks, but it is used at virtual rank"),
    (drops, "StateError", "dropped within the loop"),
    (ends_early, "StateError", "the loop over them ended early"),
    (unreduced, "StateError", "added up in no_sync"),
    (captured, "UnsupportedOpError", "autograd.grad asks for it"),
    (hooked, "UnsupportedOpError", "a hook is to see it"),
    (nested, "StateError", "needs the loop over virtual ranks to be over"),
    (fused, "UnsupportedOpError", "fused=True"),
    (half, "UnsupportedOpError", "is kept in torch.bfloat16"),
    (reduce_hook, "UnsupportedOpError", "hooks on reduced shards"),
    (owed, "UnsupportedOpError", "set_requires_all_reduce"),
    (sliced, "UnsupportedOpError", "split(q)"),
    (statistics, "UnsupportedOpError", "takes statistics over processes"),
    (broadcast, "StateError", 'buffers is "broadcast"'),
    (joined, "StateError", "equally many"),
    (order_three, "UnsupportedOpError", "norm_type 1, 2 and inf"),
    (no_virtual, "StateError", "has none"),
    (three, "StateError", "there are 3 virtual ranks and 2 processes"),
    (lacks_states, "StateError", "is missing"),
    (lacks_losses, "StateError", "needs a value of each virtual rank"),
]


@pytest.mark.parametrize(("fn", "kind", "text"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_would_depend_on_the_processes_is_refused_on_all_of_them(worlds: WorldPool, fn, kind, text):
    for type_name, message in expect_error(worlds.get_world(2), fn):
        assert type_name == kind
        assert text in message


def goes_on_after_an_error() -> dict[str, Tensor]:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.suppress(ZeroDivisionError):
        for rank in dshard.virtual_ranks(model):
            with dshard.no_sync(model):
                model(inputs(9, rank, 0)).sum().backward()
            raise ZeroDivisionError
    optimizer.zero_grad()
    step(model)
    optimizer.step()
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def goes_on() -> dict[str, Tensor]:
    model = sharded()
    step(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def test_a_step_that_raised_leaves_nothing(worlds: WorldPool):
    expected = worlds.run(2, goes_on)[0]
    got = worlds.run(2, goes_on_after_an_error)[0]
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_the_tree_of_the_oracle_is_that_of_the_package():
    total: TreeSum[str] = TreeSum(lambda left, right: f"({left}+{right})")
    for rank in range(7):
        total.push(rank, 1, str(rank))
    assert total.total() == "(((0+1)+(2+3))+((4+5)+6))"


def norms(kind: str) -> list[float]:
    torch.manual_seed(0)
    model = dshard.fully_shard(nn.Sequential(nn.Linear(37, 41), nn.Linear(41, 3)).double(), virtual_ranks=4)
    found = []
    for number in range(6):
        for rank in dshard.virtual_ranks(model):
            generator = torch.Generator().manual_seed(10 * number + rank)
            model(torch.randn(4, 37, generator=generator).double()).square().sum().backward()
        if kind == "dshard":
            found += [dshard.clip_grad_norm_(model.parameters(), 1e9, norm_type=p).item() for p in (1, 2, torch.inf)]
        elif kind == "torch":
            found += [nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type=p).item() for p in (1, 2, torch.inf)]
        else:
            with torch.no_grad():
                found += [f(p.grad).item() for p in model.parameters() for f in (torch.sum, torch.mean, torch.norm)]
        model.zero_grad()
    return found


@pytest.mark.parametrize("kind", ["dshard", "torch", "sums"])
def test_norms_and_sums_of_gradients_do_not_depend_on_how_they_are_cut(worlds: WorldPool, kind):
    assert worlds.run(1, norms, kind)[0] == worlds.run(2, norms, kind)[0] == worlds.run(4, norms, kind)[0]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def signs() -> list[list[bool]]:
    model = nn.ModuleList([Scale(), Scale()])
    for scale in model:
        dshard.fully_shard(scale)
    dshard.fully_shard(model, virtual_ranks=4)
    minus = torch.tensor(-0.0)
    for rank in dshard.virtual_ranks(model):
        (model[1](minus) + model[0](minus) if rank in (0, 2) else model[1](minus)).backward()
    return [torch.signbit(p.grad.full_tensor()).tolist() for p in model.parameters()]


def test_what_a_virtual_rank_does_not_use_counts_as_zero_to_the_sign(worlds: WorldPool):
    for num_processes in (1, 2):
        assert worlds.run(num_processes, signs)[0] == [[False] * 3, [True] * 3]


def wrapped(path: str) -> list[bool]:
    """The states that a save keeps of virtual ranks whose model is within another module, as `torch.compile` makes."""
    torch.manual_seed(0)
    models = [
        dshard.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), virtual_ranks=4, sync="broadcast")
        for _ in range(2)
    ]
    for turns, model in zip((1, 3), models, strict=True):
        for _ in range(turns):
            for _ in dshard.virtual_ranks(model):
                model(torch.ones(2, 4)).sum().backward()
    whole: list[Any] = [torch.compile(models[0], backend="eager"), nn.Sequential(models[0])]
    found = []
    for number, wrapper in enumerate(whole):
        dshard.checkpoint.save(f"{path}/{number}", wrapper)
        other: Any = torch.compile(models[1], backend="eager") if number == 0 else nn.Sequential(models[1])
        before = dshard.virtual.states_of(models[0])
        differed = any(not torch.equal(before[r], s) for r, s in dshard.virtual.states_of(models[1]).items())
        dshard.checkpoint.load(f"{path}/{number}", other)
        found.append(all(torch.equal(before[r], s) for r, s in dshard.virtual.states_of(models[1]).items()))
        found.append(differed == (number == 0))
    return found


def two_in_one(path: str) -> None:
    torch.manual_seed(0)
    both = nn.ModuleList([dshard.fully_shard(nn.Linear(4, 4), virtual_ranks=4) for _ in range(2)])
    with pytest.raises(dshard.StateError, match="one model with virtual ranks, but ModuleList holds 2"):
        dshard.checkpoint.save(path, both)


def test_two_models_with_virtual_ranks_are_not_saved_as_if_one_had_none(worlds: WorldPool, tmp_path):
    worlds.run(2, two_in_one, str(tmp_path / "saved"))
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_what_wraps_a_model_keeps_its_virtual_ranks(worlds: WorldPool, tmp_path):
    assert worlds.run(2, wrapped, str(tmp_path)) == [[True] * 4] * 2
