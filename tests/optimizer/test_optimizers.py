"""Every optimizer of torch.optim, and what goes with optimizers, does to sharded parameters what it does to plain ones.

The reference is the same optimizer on the plain module, in the same process: it runs the batches of all ranks, and its
gradients are averaged by hand. Each optimizer in one mode, made at one moment, in one world, is one case; their number
is printed at the end.
"""

import copy
import inspect
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import lr_scheduler, swa_utils

import dshard
from dshard.testing import WorldPool, expect_error, oracle

SEED = 5
NUM_STEPS = 4
# Relative to the largest magnitude of each parameter, after four steps. Gradients of two ranks are the same bits, and
# what differs are kernels: vectorised on a whole tensor, scalar on the end of a shard.
TOLERANCE = 2e-6
LOOSE = 2e-4  # for LBFGS, whose steps divide dot products, which here are added over ranks

# --- what is trained -------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """Even, uneven and 0-d parameters, and one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 4)
        self.second = nn.Linear(4, 5)
        self.third = nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x))))) * self.scale


class WithEmpty(Small):
    """And one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x), self.nothing])


class Matrices(nn.Module):
    """Matrices alone, as Muon takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 4, bias=False)
        self.second = nn.Linear(4, 5, bias=False)
        self.third = nn.Linear(5, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def build(kind: type[nn.Module] = WithEmpty) -> nn.Module:
    torch.manual_seed(SEED)
    return kind()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """A loss on the batch of one rank, far enough from zero that gradients stay well above rounding."""
    generator = torch.Generator().manual_seed(step * 64 + rank)
    x, y = torch.randn(6, 7, generator=generator), torch.randn(6, 1, generator=generator) + 2
    return (model(x) - y).square().mean()


def average_gradients(model: nn.Module, step: int, ranks: Iterable[int]) -> float:
    """Leave in `.grad` of a plain model the mean over the ranks, added in pairs; gives the mean loss."""
    found: dict[str, list[Tensor]] = {}
    losses, ranks = [], list(ranks)
    before = {n: p.grad for n, p in model.named_parameters()}
    for rank in ranks:
        model.zero_grad()
        loss = loss_of(model, step, rank)
        loss.backward()
        losses.append(loss.item())
        for n, p in model.named_parameters():
            if p.grad is not None:
                found.setdefault(n, []).append(p.grad)
    for n, p in model.named_parameters():
        p.grad = before[n]
        if n in found:
            mean = oracle.sum_in_pairs(found[n]) / len(ranks)
            p.grad = mean if before[n] is None else before[n] + mean
    return sum(losses) / len(losses)


def full(value: Any) -> Any:
    """A plain copy of a tensor; everything else as it is."""
    if not isinstance(value, Tensor):
        return value
    with torch.no_grad():
        return (value.full_tensor() if isinstance(value, dshard.ShardedTensor) else value).detach().clone()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: full(p) for n, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: full(p.grad) for n, p in model.named_parameters()}


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Two units."""
    dshard.fully_shard(model.first, **options)
    dshard.fully_shard(model, **options)
    return model


def differences(found: Any, expected: Any, tolerance: float) -> list[str]:
    """Where two nested results differ by more than `tolerance`, relative to the largest magnitude of each tensor."""
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            return [f"keys {found.keys() ^ expected.keys()}"]
        return [f"{k}: {w}" for k in expected for w in differences(found[k], expected[k], tolerance)]
    if isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return [f"{len(found)} items, not {len(expected)}"]
        return [f"{i}: {w}" for i, e in enumerate(expected) for w in differences(found[i], e, tolerance)]
    if not isinstance(expected, Tensor):
        return [] if found == expected else [f"{found!r} is not {expected!r}"]
    if not isinstance(found, Tensor) or found.shape != expected.shape or found.dtype != expected.dtype:
        return [f"{found!r} is not {expected!r}"]
    if not expected.numel() or torch.equal(found, expected):
        return []
    off = (found - expected).abs().max().item() / max(expected.abs().max().item(), 1e-30)
    return [] if off <= tolerance else [f"off by {off:.2g}"]


# --- the table of optimizers -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """An optimizer.

    Args:
        options: Those without which a test would be weak: an eps well above the rounding of the gradients.
        variants: Further options, each a case of its own.
        is_elementwise: Whether its step needs no other element, so must not communicate.
        model: What it trains.
        tolerance: Relative difference after four steps.
    """

    options: dict[str, Any]
    variants: tuple[dict[str, Any], ...] = ()
    is_elementwise: bool = True
    model: type[nn.Module] = WithEmpty
    tolerance: float = TOLERANCE


KINDS: dict[str, Kind] = {
    "ASGD": Kind({"lr": 0.05, "t0": 1.0, "lambd": 1e-2}, ({"weight_decay": 0.1},)),
    "Adadelta": Kind({"lr": 1.0, "eps": 1e-4}, ({"weight_decay": 0.1},)),
    "Adafactor": Kind({"lr": 0.05}, ({"weight_decay": 0.1, "d": 1.5},), False, model=Small),
    "Adagrad": Kind({"lr": 0.05, "eps": 1e-6}, ({"weight_decay": 0.1, "initial_accumulator_value": 0.1},)),
    "Adam": Kind(
        {"lr": 0.02, "eps": 1e-5}, ({"amsgrad": True}, {"weight_decay": 0.1}, {"decoupled_weight_decay": True})
    ),
    "AdamW": Kind({"lr": 0.02, "eps": 1e-5, "weight_decay": 0.1}, ({"amsgrad": True},)),
    "Adamax": Kind({"lr": 0.02, "eps": 1e-5}, ({"weight_decay": 0.1},)),
    "LBFGS": Kind(
        {"lr": 0.1, "max_iter": 3}, ({"line_search_fn": "strong_wolfe", "max_iter": 2},), False, tolerance=LOOSE
    ),
    "Muon": Kind(
        {"lr": 0.02}, ({"adjust_lr_fn": "match_rms_adamw"}, {"nesterov": False}), False, model=Matrices, tolerance=1e-5
    ),
    "NAdam": Kind({"lr": 0.02, "eps": 1e-5}, ({"weight_decay": 0.1, "decoupled_weight_decay": True},)),
    "RAdam": Kind({"lr": 0.02, "eps": 1e-5}, ({"weight_decay": 0.1, "decoupled_weight_decay": True},)),
    "RMSprop": Kind(
        {"lr": 0.02, "eps": 1e-4}, ({"momentum": 0.5, "centered": True}, {"weight_decay": 0.1, "momentum": 0.9})
    ),
    "Rprop": Kind({"lr": 0.02}),
    "SGD": Kind({"lr": 0.1}, ({"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1})),
}
RAISING = ("SparseAdam",)  # takes sparse gradients alone, which sharded parameters do not have

# Accepted by every optimizer whose constructor knows the first of them.
MODES: tuple[dict[str, Any], ...] = (
    {"foreach": False},
    {"foreach": True},
    {"fused": True},
    {"capturable": True},
    {"foreach": True, "capturable": True},
    {"maximize": True, "foreach": False},
    {"maximize": True, "foreach": True},
    {"maximize": True},
    {"maximize": True, "fused": True},
    {"differentiable": True},
)
WHEN = ("before", "after", "after an eval forward", "before, with state")


def optimizer_classes() -> dict[str, type[torch.optim.Optimizer]]:
    found = {n: getattr(torch.optim, n) for n in dir(torch.optim)}
    return {
        n: c
        for n, c in found.items()
        if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer) and c is not torch.optim.Optimizer
    }


def modes_of(name: str) -> list[dict[str, Any]]:
    """Every combination of options that the constructor takes."""
    known = inspect.signature(getattr(torch.optim, name)).parameters
    modes: list[dict[str, Any]] = [{}, *KINDS[name].variants]
    modes += [mode for mode in MODES if all(option in known for option in mode)]
    if "foreach" in known:
        modes += [{**variant, "foreach": True} for variant in KINDS[name].variants]
    if "fused" in known:
        modes += [{**variant, "fused": True} for variant in KINDS[name].variants]
    if "Tensor" in str(known["lr"].annotation):
        modes.append({"lr": "tensor"})
        if "foreach" in known:
            modes += [{"lr": "tensor", "foreach": False}, {"lr": "tensor", "foreach": True, "capturable": True}]
        if "fused" in known:
            modes.append({"lr": "tensor", "fused": True})
    return [m for m in modes if all(option in known for option in m)]


def make(name: str, mode: dict[str, Any], params: Any) -> torch.optim.Optimizer:
    options = {**KINDS[name].options, **mode}
    if mode.get("lr") == "tensor":
        options["lr"] = torch.tensor(KINDS[name].options["lr"])
    return getattr(torch.optim, name)(params, **options)


# --- the kit ---------------------------------------------------------------------------------------------------------


class Counted:
    """Cases that the tests of this file ran."""

    cases: ClassVar[Counter[str]] = Counter()


@pytest.fixture(scope="module", autouse=True)
def _print_the_count() -> Iterator[None]:
    Counted.cases.clear()
    yield
    total = sum(Counted.cases.values())
    print(f"\n{total} cases of optimizers: " + ", ".join(f"{n} {k}" for k, n in sorted(Counted.cases.items())))


@dataclass(slots=True)
class Report:
    """What one rank found.

    Args:
        wrong: What differs.
        num_cases: How many cases it compared.
        refused: Cases that plain torch refuses, so that dshard has to too.
    """

    wrong: list[str] = field(default_factory=list)
    num_cases: int = 0
    refused: list[str] = field(default_factory=list)


def check(worlds: WorldPool, num_ranks: int, kind: str, fn: Callable[..., Any], *args: Any) -> list[Report]:
    """Run a function that gives a report, or a list of what is wrong, on every rank."""
    results = worlds.run(num_ranks, fn, *args)
    reports = [r if isinstance(r, Report) else Report(r, 1) for r in results]
    assert [r.wrong for r in reports] == [[] for _ in range(num_ranks)]
    assert reports[0].num_cases > 0
    Counted.cases[kind] += reports[0].num_cases
    return reports


def run_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> list[str]:
    """One step; gives the kinds of collectives that it started itself."""
    with dshard.CommTrace() as trace:
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
    return [f"{r.kind} of {r.label}" for r in trace.records]


def sharded_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, *, needs_closure: bool) -> list[str]:
    rank = dist.get_rank()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)  # a line search must see one loss on all ranks
        return total / dist.get_world_size()

    if needs_closure:
        return run_step(optimizer, closure)
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    return run_step(optimizer, None)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, *, needs_closure: bool) -> None:
    ranks = range(dist.get_world_size())

    def closure() -> Tensor:
        optimizer.zero_grad()
        return torch.tensor(average_gradients(model, step, ranks))

    if needs_closure:
        optimizer.step(closure)  # type: ignore[arg-type]
        return
    optimizer.zero_grad()
    average_gradients(model, step, ranks)
    optimizer.step()


# --- every optimizer in every mode -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reference:
    """What the plain optimizer did.

    Args:
        weights: After the steps.
        moved: Names of the parameters that they changed.
        state: `state_dict()["state"]`.
        groups: `state_dict()["param_groups"]`.
        refusal: What torch raised instead, if it did.
    """

    weights: dict[str, Tensor]
    moved: frozenset[str]
    state: dict[int, Any]
    groups: list[dict[str, Any]]
    refusal: Exception | None = None


@cache
def reference_run(name: str, mode: tuple[tuple[str, Any], ...], num_steps: int, num_ranks: int) -> Reference:
    """Steps of the plain optimizer on the batches of all ranks; the same whenever a sharded one is made."""
    plain = build(KINDS[name].model)
    optimizer = make(name, dict(mode), plain.parameters())
    start = weights(plain)
    refusal = None
    for step in range(num_steps):
        try:
            plain_step(plain, optimizer, step, needs_closure=name == "LBFGS")
        except (RuntimeError, AssertionError, ValueError) as error:
            refusal = error
            break
    moved = frozenset(n for n, w in weights(plain).items() if not torch.equal(w, start[n]))
    state = optimizer.state_dict()
    return Reference(weights(plain), moved, state["state"], state["param_groups"], refusal)


def one_mode(name: str, mode: dict[str, Any], when: str, report: Report) -> None:
    """Four steps of one optimizer, beside the plain one; the state too is compared."""
    kind = KINDS[name]
    needs_closure = name == "LBFGS"
    label = f"{name} {mode} {when}"
    report.num_cases += 1
    first = 1 if when == "before, with state" else 0
    expected = reference_run(name, tuple(mode.items()), first + NUM_STEPS, dist.get_world_size())
    model = build(kind.model)
    optimizer = make(name, mode, model.parameters()) if when.startswith("before") else None
    if expected.refusal is None and first:
        plain_step(model, optimizer, 0, needs_closure=needs_closure)
        model.zero_grad()
    shard(model)
    if when == "after an eval forward":
        model.eval()
        with torch.no_grad():
            loss_of(model, 99, 0)
        model.train()
    optimizer = optimizer or make(name, mode, model.parameters())
    if expected.refusal is not None:
        report.refused.append(label)
        try:
            sharded_step(model, optimizer, 0, needs_closure=needs_closure)
        except type(expected.refusal):
            settle()
        else:
            report.wrong.append(f"{label}: plain torch raises {expected.refusal}, dshard does not")
        return
    for step in range(first, first + NUM_STEPS):
        sent = sharded_step(model, optimizer, step, needs_closure=needs_closure)
        if kind.is_elementwise and sent:
            report.wrong.append(f"{label}: step {step} communicates: {sorted(set(sent))}")
    wrong = differences(weights(model), expected.weights, kind.tolerance)
    if expected.moved < {n for n, w in expected.weights.items() if w.numel()}:
        wrong.append(f"trained {sorted(expected.moved)} alone")
    if name != "LBFGS":  # its history is of flat vectors
        found = optimizer.state_dict()
        mine = {k: {n: own_part(v) for n, v in s.items()} for k, s in found["state"].items()}
        theirs = {
            k: {n: cut_like(found["state"].get(k, {}).get(n), v, kind) for n, v in s.items()}
            for k, s in expected.state.items()
        }
        wrong += differences(mine, theirs, 10 * kind.tolerance)
        wrong += differences(full_groups(found["param_groups"]), full_groups(expected.groups), 1e-7)
    report.wrong += [f"{label}: {w}" for w in wrong]


def own_part(value: Any) -> Any:
    """This rank's shard of a state, which takes no collective."""
    return value.to_local() if isinstance(value, dshard.ShardedTensor) else value


def cut_like(found: Any, expected: Any, kind: Kind) -> Any:
    """What this rank should hold: cut by the rule of `torch.chunk`, always if the optimizer is elementwise."""
    if not isinstance(expected, Tensor) or not expected.dim():
        return expected
    if not isinstance(found, dshard.ShardedTensor) and not kind.is_elementwise:
        return expected
    parts = expected.chunk(dist.get_world_size())
    return parts[dist.get_rank()] if dist.get_rank() < len(parts) else expected[:0]


def settle() -> None:
    """Have an interrupted step told; see test_optimizer_steps.py."""
    with suppress(dshard.StateError):
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1).step()


def full_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: full(v) for k, v in group.items()} for group in groups]


def all_modes(name: str, whens: Sequence[str], modes: Sequence[dict[str, Any]] | None = None) -> Report:
    report = Report()
    for when in whens:
        for mode in modes if modes is not None else modes_of(name):
            one_mode(name, mode, when, report)
    return report


def test_every_optimizer_of_torch_is_in_the_table():
    assert optimizer_classes().keys() == {*KINDS, *RAISING}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", KINDS)
def test_every_optimizer_in_every_mode_trains_two_ranks_as_the_plain_one_and_elementwise_ones_never_communicate(
    worlds: WorldPool, name, when
):
    report = check(worlds, 2, "modes", all_modes, name, (when,))[0]
    assert len(report.refused) < report.num_cases / 2, report.refused
    assert all("capturable" in r or "differentiable" in r for r in report.refused), report.refused


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("num_ranks", "when"), [(1, "before"), (3, "after"), (4, "before")])
def test_every_optimizer_trains_one_three_and_four_ranks_as_the_plain_one(worlds: WorldPool, num_ranks, when, name):
    modes = [m for m in modes_of(name) if m in ({}, {"foreach": False}, {"foreach": True}, {"fused": True})]
    check(worlds, num_ranks, "worlds", all_modes, name, (when,), modes)


def test_the_table_has_the_modes_that_it_claims():
    assert sum(len(modes_of(name)) for name in KINDS) > 130
    for mode in MODES:
        assert any(mode in modes_of(name) for name in KINDS), mode
    assert {"lr": "tensor"} in modes_of("AdamW")


def detuned(name: str) -> list[str]:
    """The comparison against an optimizer that is a thousandth off."""
    plain, other = build(KINDS[name].model), build(KINDS[name].model)
    for model, factor in ((plain, 1.0), (other, 1.001)):
        optimizer = make(name, {"lr": KINDS[name].options["lr"] * factor}, model.parameters())
        for step in range(NUM_STEPS):
            plain_step(model, optimizer, step, needs_closure=name == "LBFGS")
    return differences(weights(other), weights(plain), KINDS[name].tolerance)


@pytest.mark.parametrize("name", [n for n in KINDS if n != "Rprop"])  # its rate is its first step's alone
def test_the_comparison_sees_a_learning_rate_that_is_a_thousandth_off(worlds: WorldPool, name):
    assert all(worlds.run(1, detuned, name))


def refused_step(name: str) -> list[str]:
    """A step that torch refuses ahead of any write, and then others."""
    model = shard(build())
    refused = make(name, {"foreach": True, "capturable": True}, model.parameters())
    other = nn.Parameter(torch.ones(2))
    plain = torch.optim.SGD([other], lr=0.5)
    params = list(model.parameters())
    loss_of(model, 0, dist.get_rank()).backward()
    before = weights(model)
    with pytest.raises((AssertionError, RuntimeError)):
        refused.step()
    wrong = []
    other.grad = torch.ones(2)
    try:
        plain.step()
    except dshard.StateError as error:
        wrong.append(f"an optimizer that has nothing to do with it: {error}")
    if not torch.equal(other.detach(), torch.full((2,), 0.5)):
        wrong.append("the plain parameter did not move")
    refused.zero_grad()
    if any(p.grad is not None for p in params):
        wrong.append("zero_grad did not reach the parameters")
    if any(p is not q for p, q in zip(refused.param_groups[0]["params"], params, strict=True)):
        wrong.append("the optimizer holds other tensors than the parameters")
    loss_of(model, 0, dist.get_rank()).backward()
    return wrong + differences(weights(model), before, 0.0)


@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_a_step_that_torch_refuses_leaves_its_optimizer_and_others_as_they_were(worlds: WorldPool, name):
    check(worlds, 2, "refused", refused_step, name)


# --- sparse gradients ------------------------------------------------------------------------------------------------


def sparse_embedding(name: str) -> None:
    model = nn.Embedding(6, 4, sparse=True)
    dshard.fully_shard(model, sync="broadcast")
    optimizer = getattr(torch.optim, name)(model.parameters())
    model(torch.tensor([dist.get_rank(), 2])).sum().backward()
    optimizer.step()


def dense_gradients(name: str) -> None:
    model = build()
    shard(model)
    optimizer = getattr(torch.optim, name)(model.parameters())
    loss_of(model, 0, dist.get_rank()).backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["SparseAdam", "SGD"])
def test_sparse_gradients_raise_and_name_the_parameter_and_the_way_out(worlds: WorldPool, name):
    for type_name, message in expect_error(worlds.get_world(2), sparse_embedding, name):
        assert type_name == "UnsupportedOpError"
        assert message.startswith("weight: ")
        assert "sparse=False" in message
    Counted.cases["sparse"] += 1


def test_sparse_adam_refuses_dense_gradients_as_for_plain_parameters(worlds: WorldPool):
    for type_name, message in expect_error(worlds.get_world(2), dense_gradients, "SparseAdam"):
        assert type_name == "RuntimeError"
        assert "does not support dense gradients" in message
    Counted.cases["sparse"] += 1


# --- groups and plain parameters -------------------------------------------------------------------------------------


def groups_and_plain(name: str, mode: dict[str, Any]) -> Report:
    """Two groups with options of their own; one holds a plain parameter that all ranks hold alike."""
    report = Report(num_cases=1)
    runs = []
    extras = []
    for is_sharded in (False, True):
        model = build(KINDS[name].model)
        extra = nn.Parameter(torch.linspace(1, 2, 6).reshape(2, 3))
        if is_sharded:
            shard(model)
        by_dim = [[p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False)]
        lr = KINDS[name].options["lr"]
        groups = [{"params": [*by_dim[0], extra]}, {"params": by_dim[1], "lr": lr / 3}]
        optimizer = make(name, mode, groups)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            if is_sharded:
                loss_of(model, step, dist.get_rank()).backward()
            else:
                average_gradients(model, step, range(dist.get_world_size()))
            (extra * (step + 1)).square().sum().backward()
            sent = run_step(optimizer, None)
            if is_sharded and KINDS[name].is_elementwise and sent:
                report.wrong.append(f"{name} {mode}: communicates: {sent}")
        runs.append(weights(model))
        extras.append(extra.detach())
    if type(extra) is not nn.Parameter:
        report.wrong.append("the plain parameter became something else")
    report.wrong += differences(runs[1], runs[0], KINDS[name].tolerance)
    report.wrong += differences(extras[1], extras[0], KINDS[name].tolerance)
    return report


@pytest.mark.parametrize("name", [n for n in KINDS if n not in ("LBFGS", "Muon")])
def test_groups_with_options_of_their_own_and_a_plain_parameter_train_together(worlds: WorldPool, name):
    known = inspect.signature(getattr(torch.optim, name)).parameters
    for mode in [{}, *({option: True} for option in ("foreach", "fused") if option in known)]:
        for num_ranks in (2, 3):
            check(worlds, num_ranks, "groups", groups_and_plain, name, mode)


def group_added_later() -> list[str]:
    results = []
    for is_sharded in (False, True):
        model = build()
        if is_sharded:
            shard(model)
        optimizer = torch.optim.AdamW(model.first.parameters(), lr=0.02, eps=1e-5)
        for step in range(NUM_STEPS):
            if step == 2:
                rest = [p for n, p in model.named_parameters() if not n.startswith("first")]
                optimizer.add_param_group({"params": rest, "lr": 0.01})
            step_function = sharded_step if is_sharded else plain_step
            model.zero_grad()
            step_function(model, optimizer, step, needs_closure=False)
        results.append(weights(model))
    return differences(results[1], results[0], TOLERANCE)


def test_a_group_that_is_added_between_steps_trains(worlds: WorldPool):
    check(worlds, 2, "groups", group_added_later)


# --- zero_grad -------------------------------------------------------------------------------------------------------


def zeroing(set_to_none: bool, by_model: bool) -> list[str]:
    """Accumulate over two backwards, then zero."""
    plain, sharded = build(), build()
    shard(sharded)
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) for m in (plain, sharded)]
    wrong = []
    ranks, rank = range(dist.get_world_size()), dist.get_rank()
    for step in range(NUM_STEPS):
        for model, optimizer in pairs:
            (model if by_model else optimizer).zero_grad(set_to_none=set_to_none)
        zeroed = [p.grad for p in sharded.parameters()]
        if step and any((g is None) is not set_to_none for g in zeroed):
            wrong.append(f"step {step}: after zero_grad {zeroed}")
        if step and not set_to_none:
            wrong += [f"step {step}: {n} is not zero" for n, g in gradients(sharded).items() if g.abs().sum() != 0]
        for micro in range(2):
            loss_of(sharded, 2 * step + micro, rank).backward()
            average_gradients(plain, 2 * step + micro, ranks)
        wrong += [f"step {step}: {w}" for w in differences(gradients(sharded), gradients(plain), 10 * TOLERANCE)]
        for _, optimizer in pairs:
            optimizer.step()
    return wrong + differences(weights(sharded), weights(plain), 10 * TOLERANCE)


@pytest.mark.parametrize("by_model", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_zero_grad_zeroes_or_forgets_and_backwards_add_up(worlds: WorldPool, num_ranks, set_to_none, by_model):
    check(worlds, num_ranks, "zero_grad", zeroing, set_to_none, by_model)


# --- clipping --------------------------------------------------------------------------------------------------------


def clipped(norm_type: float, max_norm: float, foreach: bool | None) -> list[str]:
    """Torch's own function and dshard's, beside torch's on the plain module; with a plain parameter among them."""
    wrong = []
    for function in ("torch", "dshard", "parts"):
        plain, sharded = build(), build()
        shard(sharded)
        extras = [nn.Parameter(torch.linspace(-1, 1, 5)) for _ in range(2)]
        average_gradients(plain, 0, range(dist.get_world_size()))
        loss_of(sharded, 0, dist.get_rank()).backward()
        for extra in extras:
            extra.square().sum().backward()
        nonempty = [
            [*(p for p in m.parameters() if p.numel()), extra]
            for m, extra in zip((plain, sharded), extras, strict=True)
        ]  # torch itself has no infinity norm of nothing
        expected = nn.utils.clip_grad_norm_(nonempty[0], max_norm, norm_type=norm_type, foreach=foreach)
        with dshard.CommTrace() as trace:
            if function == "torch":
                found = nn.utils.clip_grad_norm_(nonempty[1], max_norm, norm_type=norm_type, foreach=foreach)
            elif function == "dshard":
                found = dshard.clip_grad_norm_([*sharded.parameters(), extras[1]], max_norm, norm_type=norm_type)
            else:
                found = nn.utils.get_total_norm([p.grad for p in nonempty[1]], norm_type, foreach=foreach)
                nn.utils.clip_grads_with_norm_(nonempty[1], max_norm, found, foreach=foreach)
        wrong += [f"{function} norm: {w}" for w in differences(full(found), expected, TOLERANCE)]
        wrong += [f"{function}: {w}" for w in differences(gradients(sharded), gradients(plain), 2 * TOLERANCE)]
        wrong += [f"{function}: {w}" for w in differences(extras[1].grad, extras[0].grad, 2 * TOLERANCE)]
        if trace.calls("all_gather"):
            wrong.append(f"{function}: gathers")
        if function == "dshard" and trace.calls() != (1 if dist.get_world_size() > 1 else trace.calls()):
            wrong.append(f"{function}: {trace.summary()}")
    return wrong


@pytest.mark.parametrize(
    ("norm_type", "max_norm"), [(2.0, 0.1), (2.0, 100.0), (1.0, 0.5), (float("inf"), 0.05), (3.0, 0.1)]
)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_clip_grad_norm_of_torch_and_dshard_gives_the_plain_norm_and_gradients_without_a_gather(
    worlds: WorldPool, num_ranks, norm_type, max_norm
):
    for foreach in (None, False, True):
        check(worlds, num_ranks, "clip", clipped, norm_type, max_norm, foreach)


def clipped_by_value(limit: float, foreach: bool | None) -> list[str]:
    plain, sharded = build(), build()
    shard(sharded)
    average_gradients(plain, 0, range(dist.get_world_size()))
    loss_of(sharded, 0, dist.get_rank()).backward()
    before = gradients(plain)
    nn.utils.clip_grad_value_(plain.parameters(), limit, foreach=foreach)
    with dshard.CommTrace() as trace:
        nn.utils.clip_grad_value_(sharded.parameters(), limit, foreach=foreach)
    wrong = differences(gradients(sharded), gradients(plain), 2 * TOLERANCE)
    if not differences(gradients(plain), before, 0.0):
        wrong.append("nothing was clipped")
    return wrong + ([trace.summary()] if trace.records else [])


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_clip_grad_value_clips_shards_and_does_not_communicate(worlds: WorldPool, num_ranks, foreach):
    for limit in (0.05, 0.5):
        check(worlds, num_ranks, "clip", clipped_by_value, limit, foreach)


def not_finite() -> list[str]:
    """An infinite gradient on the last rank: an error where asked for, on every rank alike."""
    wrong = []
    for function in (nn.utils.clip_grad_norm_, dshard.clip_grad_norm_):
        sharded = build()
        shard(sharded)
        factor = float("inf") if dist.get_rank() == dist.get_world_size() - 1 else 1.0
        (loss_of(sharded, 0, dist.get_rank()) * factor).backward()
        try:
            function([p for p in sharded.parameters() if p.numel()], 1.0, error_if_nonfinite=True)
            wrong.append(f"{function.__module__}: did not raise")
        except RuntimeError:
            pass
    return wrong


def test_clipping_with_error_if_nonfinite_raises_on_every_rank_for_one_ranks_infinity(worlds: WorldPool):
    for num_ranks in (2, 3):
        check(worlds, num_ranks, "clip", not_finite)


# --- GradScaler ------------------------------------------------------------------------------------------------------


def scaled(name: str, mode: dict[str, Any], clips: bool) -> list[str]:
    """Step 1 has an infinity in one gradient row of the last rank alone: every rank skips it and halves the scale."""
    plain, sharded = build(), build()
    shard(sharded)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    runs = []
    for model, is_sharded in ((plain, False), (sharded, True)):
        optimizer = make(name, mode, model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        scales, steps = [], []
        for step in range(NUM_STEPS + 1):
            optimizer.zero_grad()
            before = weights(model)
            for r in [rank] if is_sharded else range(num_ranks):
                loss = loss_of(model, step, r)
                if step == 1:
                    loss = loss + model.first.weight[3, 0] * (float("inf") if r == num_ranks - 1 else 0.0)
                if not is_sharded:
                    loss = loss / num_ranks
                scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(optimizer)
                clip = dshard.clip_grad_norm_ if is_sharded else nn.utils.clip_grad_norm_
                clip(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            steps.append(bool(differences(weights(model), before, 0.0)))
        runs.append((scales, steps, weights(model)))
    wrong = [] if runs[0][1] == [True, False, True, True, True] else [f"the reference stepped {runs[0][1]}"]
    if len(set(runs[0][0])) < 2:
        wrong.append(f"the reference's scales {runs[0][0]}")
    return wrong + differences(runs[1], runs[0], 20 * TOLERANCE)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(("name", "mode"), [("SGD", {}), ("AdamW", {}), ("AdamW", {"foreach": True})])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_grad_scaler_skips_a_step_on_all_ranks_for_one_ranks_infinity(
    worlds: WorldPool, num_ranks, name, mode, clips
):
    check(worlds, num_ranks, "scaler", scaled, name, mode, clips)


def scaled_and_fused() -> list[str]:
    """A fused optimizer unscales in its own step."""
    plain, sharded = build(), build()
    shard(sharded)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    runs = []
    for model, is_sharded in ((plain, False), (sharded, True)):
        optimizer = make("AdamW", {"fused": True}, model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        stepped = []
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            before = weights(model)
            for r in [rank] if is_sharded else range(num_ranks):
                loss = loss_of(model, step, r)
                if step == 1:
                    loss = loss + model.first.weight[3, 0] * (float("inf") if r == num_ranks - 1 else 0.0)
                scaler.scale(loss if is_sharded else loss / num_ranks).backward()
            scaler.step(optimizer)
            scaler.update()
            stepped.append(bool(differences(weights(model), before, 0.0)))
        runs.append((scaler.get_scale(), stepped, weights(model)))
    wrong = [] if runs[0][1] == [True, False, True, True] else [f"the reference stepped {runs[0][1]}"]
    return wrong + differences(runs[1], runs[0], 20 * TOLERANCE)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_grad_scaler_and_a_fused_optimizer_skip_a_step_on_all_ranks(worlds: WorldPool, num_ranks):
    check(worlds, num_ranks, "scaler", scaled_and_fused)


# --- averages of weights ---------------------------------------------------------------------------------------------

AVERAGES: dict[str, Callable[[nn.Module], swa_utils.AveragedModel]] = {
    "swa": swa_utils.AveragedModel,
    "swa with buffers": lambda m: swa_utils.AveragedModel(m, use_buffers=True),
    "ema": lambda m: swa_utils.AveragedModel(m, avg_fn=swa_utils.get_ema_avg_fn(0.9)),
    "ema multi": lambda m: swa_utils.AveragedModel(m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
    "swa multi": lambda m: swa_utils.AveragedModel(m, multi_avg_fn=swa_utils.get_swa_multi_avg_fn()),
}


def averaged(kind: str) -> list[str]:
    plain, sharded = build(), build()
    shard(sharded)
    runs = []
    wrong = []
    for model, step_function in ((plain, plain_step), (sharded, sharded_step)):
        average = AVERAGES[kind](model)
        optimizer = make("SGD", {"momentum": 0.9}, model.parameters())
        for step in range(NUM_STEPS):
            step_function(model, optimizer, step, needs_closure=False)
            with dshard.CommTrace() as trace:
                average.update_parameters(model)
            if trace.records and kind not in ("swa", "swa with buffers"):  # divide by a plain 0-d tensor
                wrong.append(f"step {step} communicates: {trace.summary()}")
        with torch.no_grad():
            loss = loss_of(average, 99, dist.get_rank())
        if list(average.state_dict()) != list(AVERAGES[kind](build()).state_dict()):
            wrong.append("keys")
        runs.append(({n: full(t) for n, t in average.state_dict().items()}, loss))
        if not differences(weights(average.module), weights(model), 1e-4):
            wrong.append("the average is the model itself")
    return wrong + differences(runs[1], runs[0], 5 * TOLERANCE)


@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_an_averaged_model_is_the_plain_one_and_an_ema_does_not_communicate(worlds: WorldPool, num_ranks, kind):
    check(worlds, num_ranks, "averages", averaged, kind)


# --- learning-rate schedules -----------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=True),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.3, total_iters=3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.7),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=2),
}


def scheduled(name: str, lr_is_tensor: bool) -> list[str]:
    plain, sharded = build(), build()
    runs = []
    for model, step_function in ((plain, plain_step), (sharded, sharded_step)):
        lr = torch.tensor(0.1) if lr_is_tensor else 0.1
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        schedule = SCHEDULES[name](optimizer)  # made ahead of fully_shard
        if model is sharded:
            shard(model)
        rates = []
        for step in range(NUM_STEPS):
            step_function(model, optimizer, step, needs_closure=False)
            schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append(float(optimizer.param_groups[0]["lr"]))
        runs.append((rates, weights(model)))
    wrong = [] if len(set(runs[0][0])) > 1 else ["the rate did not change"]
    return wrong + differences(runs[1], runs[0], 2 * TOLERANCE)


def test_every_schedule_of_torch_is_in_the_table():
    found = {n for n, c in vars(lr_scheduler).items() if inspect.isclass(c) and issubclass(c, lr_scheduler.LRScheduler)}
    assert found - {"LRScheduler", "_LRScheduler"} == SCHEDULES.keys() - {"SWALR"}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_learning_rate_schedule_trains_as_for_the_plain_module(worlds: WorldPool, name):
    for lr_is_tensor in (False, True):
        check(worlds, 2, "schedules", scheduled, name, lr_is_tensor)


# --- state dicts of optimizers ---------------------------------------------------------------------------------------


def round_trip(name: str, mode: dict[str, Any], saved_by: str) -> list[str]:
    """Two steps, a state dict into a new model and optimizer, two steps: as four steps without a break."""
    kind = KINDS[name]
    needs_closure = name == "LBFGS"
    plain = build(kind.model)
    reference = make(name, mode, plain.parameters())
    sharded = shard(build(kind.model))
    optimizer = make(name, mode, sharded.parameters())
    for step in range(2):
        plain_step(plain, reference, step, needs_closure=needs_closure)
        sharded_step(sharded, optimizer, step, needs_closure=needs_closure)
    if saved_by == "plain":
        states = copy.deepcopy(plain.state_dict()), copy.deepcopy(reference.state_dict())
    elif saved_by == "deepcopy":
        states = copy.deepcopy(sharded.state_dict()), copy.deepcopy(optimizer.state_dict())
    else:
        buffer = io.BytesIO()
        torch.save((sharded.state_dict(), optimizer.state_dict()), buffer)
        buffer.seek(0)
        states = torch.load(buffer, weights_only=False)
    again = shard(build(kind.model))
    resumed = make(name, mode, again.parameters())
    again.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    for step in range(2, 4):
        plain_step(plain, reference, step, needs_closure=needs_closure)
        sent = sharded_step(again, resumed, step, needs_closure=needs_closure)
        if kind.is_elementwise and sent:
            return [f"step {step} communicates: {sent}"]
    return differences(weights(again), weights(plain), kind.tolerance)


@pytest.mark.parametrize("saved_by", ["plain", "deepcopy", "torch.save"])
@pytest.mark.parametrize("name", KINDS)
def test_an_optimizers_state_dict_continues_in_a_new_model_as_without_a_break(worlds: WorldPool, name, saved_by):
    known = inspect.signature(getattr(torch.optim, name)).parameters
    for mode in [{}, *({option: True} for option in ("foreach", "fused") if option in known)]:
        check(worlds, 2, "state dicts", round_trip, name, mode, saved_by)
    check(worlds, 3, "state dicts", round_trip, name, {}, saved_by)


# --- optimizers in backward ------------------------------------------------------------------------------------------


def in_backward(name: str, when: str) -> Report:
    """An optimizer for each parameter, stepped by a hook as soon as its gradient is there."""
    report = Report(num_cases=1)
    plain, sharded = build(KINDS[name].model), build(KINDS[name].model)
    reference = make(name, {}, plain.parameters())
    if when == "after":
        shard(sharded)
    optimizers: dict[str, torch.optim.Optimizer] = {}
    fired: Counter[str] = Counter()

    def attach(label: str, param: Tensor) -> None:
        optimizers[label] = make(name, {}, [param])

        def hook(p: Tensor) -> None:
            fired[label] += 1
            if not isinstance(p.grad, dshard.ShardedTensor):
                report.wrong.append(f"{label}: the gradient is {type(p.grad).__name__}")
            optimizers[label].step()
            optimizers[label].zero_grad()

        param.register_post_accumulate_grad_hook(hook)

    for label, param in sharded.named_parameters():
        attach(label, param)
    if when == "before":
        shard(sharded)
    for step in range(NUM_STEPS):
        plain_step(plain, reference, step, needs_closure=False)
        loss_of(sharded, step, dist.get_rank()).backward()
        report.wrong += [f"{n} kept a gradient" for n, g in gradients(sharded).items() if g is not None]
    if set(fired.values()) != {NUM_STEPS} or fired.keys() != dict(plain.named_parameters()).keys():
        report.wrong.append(f"hooks fired {fired}")
    report.wrong += differences(weights(sharded), weights(plain), KINDS[name].tolerance)
    return report


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor", "Rprop"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_an_optimizer_in_backward_trains_as_one_after_it(worlds: WorldPool, num_ranks, name, when):
    check(worlds, num_ranks, "in backward", in_backward, name, when)


# --- several meshes --------------------------------------------------------------------------------------------------


def two_meshes(name: str, mode: dict[str, Any], clips: str | None) -> Report:
    """Two models on two slices of a 2 x 2 mesh, in one optimizer: each averages over its own two ranks.

    With `clips`, data depend on the place within a slice alone: a norm over both models is then the same on all ranks.
    """
    report = Report(num_cases=1)
    kind = KINDS[name]
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    members = {axis: dist.get_process_group_ranks(mesh[axis].get_group()) for axis in ("a", "b")}
    if rank in (0, 3) and members["a"] == members["b"]:
        report.wrong.append(f"the slices are the same ranks: {members}")
    plains = {axis: build(kind.model) for axis in members}
    sharded = {axis: shard(build(kind.model), mesh=mesh[axis]) for axis in members}

    def both(models: dict[str, nn.Module]) -> list[nn.Parameter]:
        return [p for model in models.values() for p in model.parameters()]

    reference, optimizer = make(name, mode, both(plains)), make(name, mode, both(sharded))
    for step in range(NUM_STEPS):
        reference.zero_grad()
        optimizer.zero_grad()
        for axis, ranks in members.items():
            seeds = ranks if clips is None else list(range(len(ranks)))
            average_gradients(plains[axis], step, seeds)
            loss_of(sharded[axis], step, seeds[ranks.index(rank)]).backward()
        if clips is not None:
            expected = nn.utils.clip_grad_norm_(both(plains), 0.3)
            clip = nn.utils.clip_grad_norm_ if clips == "torch" else dshard.clip_grad_norm_
            found = clip(both(sharded), 0.3)
            report.wrong += [f"norm: {w}" for w in differences(full(found), expected, TOLERANCE)]
        reference.step()
        sent = run_step(optimizer, None)
        if kind.is_elementwise and sent:
            report.wrong.append(f"communicates: {sent}")
    for axis in members:
        wrong = differences(weights(sharded[axis]), weights(plains[axis]), 2 * kind.tolerance)
        report.wrong += [f"{axis}: {w}" for w in wrong]
    return report


@pytest.mark.parametrize("name", [n for n in KINDS if n != "LBFGS"])
def test_two_models_on_two_slices_of_a_mesh_train_in_one_optimizer(worlds: WorldPool, name):
    known = inspect.signature(getattr(torch.optim, name)).parameters
    for mode in [{}, *({option: True} for option in ("foreach", "fused") if option in known)]:
        check(worlds, 4, "meshes", two_meshes, name, mode, None)


@pytest.mark.parametrize("clips", ["torch", "dshard"])
def test_gradients_of_two_meshes_are_clipped_together(worlds: WorldPool, clips):
    check(worlds, 4, "meshes", two_meshes, "SGD", {}, clips)
    check(worlds, 4, "meshes", two_meshes, "AdamW", {"foreach": True}, clips)


def clip_models_that_differ() -> None:
    """On crossing slices each rank shares a gradient with two others, whose second model is another one."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    models = [shard(build(), mesh=mesh[axis]) for axis in ("a", "b")]
    for model in models:
        loss_of(model, 0, rank).backward()
    dshard.clip_grad_norm_([p for model in models for p in model.parameters()], 0.3)


def test_norms_that_differ_between_ranks_that_share_a_gradient_are_refused(worlds: WorldPool):
    errors = expect_error(worlds.get_world(4), clip_models_that_differ)
    assert all(kind == "DivergenceError" and "Clip the parameters of each mesh" in text for kind, text in errors)
    Counted.cases["meshes"] += 1
