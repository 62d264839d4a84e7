"""Hooks: registered before `fully_shard`, and on some ranks alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import dshard
from dshard.testing import WorldPool


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))


def data(step: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


# Each registers a hook that notes its name, and gives what removes it.
BEFORE: dict[str, Callable[[nn.Module, list[str]], Any]] = {
    "tensor": lambda m, calls: m[0].weight.register_hook(lambda _: calls.append("tensor")),
    "accumulated": lambda m, calls: m[0].weight.register_post_accumulate_grad_hook(
        lambda _: calls.append("accumulated")
    ),
    "all": lambda m, calls: register_multi_grad_hook(list(m.parameters()), lambda _: calls.append("all")),
    "any": lambda m, calls: register_multi_grad_hook(list(m.parameters()), lambda _: calls.append("any"), mode="any"),
    "node": lambda m, calls: m.node.register_hook(lambda *_: calls.append("node")),
    "ahead of the node": lambda m, calls: m.node.register_prehook(lambda *_: calls.append("ahead of the node")),
}


def called(shard: bool, removed: bool, units: bool) -> list[str]:
    """What two backwards call of each kind; its handle is used between the two."""
    model, calls = net(), list[str]()
    model.node = get_gradient_edge(model[0].weight).node
    handles = [register(model, calls) for register in BEFORE.values()]
    if shard:
        node, model.node = model.node, None
        if units:
            dshard.fully_shard(model[0])
        dshard.fully_shard(model)
        model.node = node
    model(data(0)).sum().backward()
    for handle in handles if removed else ():
        handle.remove()
    model(data(1)).sum().backward()
    return sorted(calls)


@pytest.mark.parametrize("units", [False, True], ids=["root", "blocks"])
@pytest.mark.parametrize("removed", [False, True], ids=["kept", "removed"])
def test_hooks_from_before_are_called_as_often_as_on_the_plain_model(worlds: WorldPool, removed, units):
    plain = worlds.run(1, called, False, removed, False)[0]
    assert len(plain) == (len(BEFORE) if removed else 2 * len(BEFORE))
    assert worlds.run(2, called, True, removed, units) == [plain] * 2


def ignore(*_: Any) -> None:
    return None


ON_RANK_0: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "after the step": lambda model, optimizer: optimizer.register_step_post_hook(ignore),
    "ahead of the step": lambda model, optimizer: optimizer.register_step_pre_hook(ignore),
    "after all steps": lambda model, optimizer: register_optimizer_step_post_hook(ignore),
    "ahead of all steps": lambda model, optimizer: register_optimizer_step_pre_hook(ignore),
    "tensor": lambda model, optimizer: model[0].weight.register_hook(ignore),
    "accumulated": lambda model, optimizer: model[0].weight.register_post_accumulate_grad_hook(ignore),
    "forward": lambda model, optimizer: model[0].register_forward_hook(ignore),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, 0.01),
    "Muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], 0.01),
}


def trained(hook: str | None, optimizer: str) -> list[Tensor]:
    model = dshard.fully_shard(net())
    stepping = OPTIMIZERS[optimizer](list(model.parameters()))
    handle = ON_RANK_0[hook](model, stepping) if hook is not None and dist.get_rank() == 0 else None
    for step in range(3):
        model(data(step)).square().mean().backward()
        stepping.step()
        stepping.zero_grad()
    if handle is not None:
        handle.remove()
    return [param.full_tensor().detach() for param in model.parameters()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("hook", ON_RANK_0)
def test_a_hook_of_one_rank_changes_nothing(worlds: WorldPool, hook, optimizer):
    expected = worlds.run(2, trained, None, optimizer)[0]
    for found in worlds.run(2, trained, hook, optimizer):
        assert all(map(torch.equal, found, expected))


def a_hook_that_writes() -> str:
    model = dshard.fully_shard(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if dist.get_rank() == 0:
        optimizer.register_step_post_hook(lambda *_: model[0].weight.detach().mul_(2))
    model(data(0)).sum().backward()
    optimizer.step()
    try:
        model(data(1))
    except dshard.DivergenceError as error:
        return str(error)
    return ""


def test_a_hook_of_one_rank_that_writes_is_an_error(worlds: WorldPool):
    assert all("wrote other numbers" in text for text in worlds.run(2, a_hook_that_writes))


def seen_by_hooks() -> list[tuple[int, ...]]:
    """The shapes of the parameters that an optimizer's own hooks see."""
    model, shapes = dshard.fully_shard(net()), list[tuple[int, ...]]()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    see = lambda stepping, *_: shapes.extend(tuple(p.shape) for g in stepping.param_groups for p in g["params"])  # noqa: E731
    optimizer.register_step_pre_hook(see)
    optimizer.register_step_post_hook(see)
    model(data(0)).sum().backward()
    optimizer.step()
    return shapes


def test_hooks_of_an_optimizer_see_sharded_parameters(worlds: WorldPool):
    expected = [tuple(param.shape) for param in net().parameters()] * 2
    assert worlds.run(2, seen_by_hooks) == [expected] * 2
