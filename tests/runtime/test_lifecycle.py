"""What was frozen, written or broken off between a forward and its backward; sequences of calls: test_stateful.py."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dshard
from dshard.testing import WorldPool


def data_in_inference_mode() -> list[Tensor]:
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight.fill_(2.0)
        layer.bias.zero_()
    dshard.fully_shard(layer)
    with torch.inference_mode():
        layer.weight.data = layer.weight.data * 0.5
        layer.bias.data = torch.ones(3)
    out = layer(torch.ones(1, 3))
    out.sum().backward()
    return [out.detach(), layer.weight.grad.full_tensor()]  # type: ignore[union-attr]


def test_data_that_is_set_in_inference_mode_can_be_read_and_trained(worlds: WorldPool):
    for out, grad in worlds.run(2, data_in_inference_mode):
        assert torch.equal(out, torch.full((1, 3), 4.0))
        assert torch.equal(grad, torch.ones(3, 3))


def frozen_in_between() -> list[bool]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    dshard.fully_shard(model, sync="broadcast")
    loss = model(torch.ones(1, 3)).sum()
    model[0].weight.requires_grad_(False)
    loss.backward()
    return [p.grad is None for p in model.parameters()]


def test_a_parameter_that_is_frozen_between_forward_and_backward_gets_no_gradient(worlds: WorldPool):
    assert worlds.run(2, frozen_in_between) == [[True, False, False, False]] * 2


def backward_that_raises(then: str) -> list[Any]:
    """A hook raises in the middle of a backward; then the model changes, and trains on."""
    model: Any = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)]).double()
    for layer in model:
        dshard.fully_shard(layer, sync="broadcast")
    dshard.fully_shard(model)
    model[0].weight.requires_grad_(False)

    def boom(grad: Tensor) -> None:
        raise KeyError("mine")

    handle = model[1].bias.register_hook(boom)
    with pytest.raises(KeyError, match="mine"):
        model(torch.ones(1, 3).double()).sum().backward()
    handle.remove()
    model.zero_grad()
    if then == "cast":
        model.float()
    elif then == "thaw":
        model[0].weight.requires_grad_(True)
    x = torch.ones(1, 3, dtype=model[0].weight.dtype)
    model(x).sum().backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    return [all(g.dtype == x.dtype for g in grads), len(grads), model._context().gathered_bytes]


@pytest.mark.parametrize(("then", "num_grads"), [("cast", 5), ("thaw", 6), ("nothing", 5)])
def test_a_backward_that_raised_leaves_nothing_to_the_next_one(worlds: WorldPool, then, num_grads):
    assert worlds.run(2, backward_that_raises, then) == [[True, num_grads, 0]] * 2


class Held(torch.autograd.Function):
    """Saves an object beside the activations; its backward raises if it is told to."""

    @staticmethod
    def forward(ctx, x, held, raises):
        ctx.held, ctx.raises = held, raises
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.raises:
            raise MemoryError
        return grad, None, None


class Activation:
    pass


def graphs_left_by_a_failed_backward(strategy: str, *, checkpoints: bool, nested: bool) -> int:
    """How many of three nodes of a graph are alive after a backward that raised in the middle."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    for layer in model:
        dshard.fully_shard(layer, strategy=strategy)
    dshard.fully_shard(model, strategy=strategy)
    alive = []

    def run(layer: nn.Module, x: Tensor, place: int) -> Tensor:
        held = Activation()
        alive.append(weakref.ref(held))
        return Held.apply(layer(x), held, place == 1)

    def fail() -> None:
        x = torch.ones(2, 4)
        for place, layer in enumerate(model):
            x = checkpoint(run, layer, x, place, use_reentrant=False) if checkpoints else run(layer, x, place)
        if nested:
            (grad,) = torch.autograd.grad(model[0](torch.ones(2, 4)).sum(), model[0].weight, create_graph=True)
            x = x.sum() + grad.sum()
        x.sum().backward()

    with pytest.raises(MemoryError):
        fail()
    return sum(held() is not None for held in alive)


@pytest.mark.parametrize(("strategy", "nested"), [("full", False), ("full", True), ("ddp", True), ("split(2)", False)])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_backward_that_raised_frees_its_graph_at_once(worlds: WorldPool, strategy, checkpoints, nested):
    left = worlds.run(2, graphs_left_by_a_failed_backward, strategy, checkpoints=checkpoints, nested=nested)
    assert left == [0, 0]
