"""Every optimizer of torch.optim, and what goes with optimizers, does to sharded parameters what it does to plain ones.

The reference is the same optimizer on the plain module, in the same process: it runs the batches of all ranks, and its
gradients are averaged by hand. Each optimizer in one mode, made at one moment, in one world, is one case; their number
is printed at the end.
"""

import inspect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dshard
from dshard.testing import WorldPool, expect_error
from tests.optimizer.kit import (
    KINDS,
    NUM_STEPS,
    TOLERANCE,
    Counted,
    Kind,
    Report,
    average_gradients,
    build,
    check,
    differences,
    full,
    loss_of,
    make,
    plain_step,
    run_step,
    shard,
    sharded_step,
    weights,
)

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
# Options with states or kernels of their own are crossed with every moment; these, which do not, with "after" alone.
AFTER_ALONE = {"maximize", "capturable", "differentiable"}


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
        if kind.is_elementwise:
            wrong += whole_states(found["state"])
        wrong += differences(full_groups(found["param_groups"]), full_groups(expected.groups), 1e-7)
    report.wrong += [f"{label}: {w}" for w in wrong]


def own_part(value: Any) -> Any:
    """This rank's shard of a state, which takes no collective."""
    return value.to_local() if isinstance(value, dshard.ShardedTensor) else value


def whole_states(state: dict[int, Any]) -> list[str]:
    """States of an element that are no sharded tensors."""
    pairs = [(n, v) for s in state.values() for n, v in s.items() if isinstance(v, Tensor) and v.dim()]
    return [f"{n} is a {type(v).__name__}" for n, v in pairs if not isinstance(v, dshard.ShardedTensor)]


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
    modes = [m for m in modes_of(name) if when == "after" or not m.keys() & AFTER_ALONE]
    report = check(worlds, 2, "modes", all_modes, name, (when,), modes)[0]
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


# Options of which torch learns in the step that it cannot do it.
REFUSED: dict[str, dict[str, Any]] = {
    "AdamW": {"foreach": True, "capturable": True},
    "RMSprop": {"foreach": True, "capturable": True},
    "SGD": {"lr": "no number"},
}


def refused_step(name: str) -> list[str]:
    """A step that torch refuses ahead of any write, and then others."""
    model = shard(build())
    refused = make(name, {}, model.parameters())
    refused.param_groups[0].update(REFUSED[name])
    other = nn.Parameter(torch.ones(2))
    plain = torch.optim.SGD([other], lr=0.5)
    params = list(model.parameters())
    loss_of(model, 0, dist.get_rank()).backward()
    before = weights(model)
    with pytest.raises((AssertionError, RuntimeError, TypeError)):
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


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_torch_refuses_leaves_its_optimizer_and_others_as_they_were(worlds: WorldPool, name):
    check(worlds, 2, "refused", refused_step, name)


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
        check(worlds, 2, "groups", groups_and_plain, name, mode)
    check(worlds, 3, "groups", groups_and_plain, name, {})


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
