"""Memory of gradients: others write to it after autograd handed it over; it goes when nobody needs it."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dshard
from dshard.gradients.reducer import Reducer
from dshard.testing import WorldPool

pytestmark = pytest.mark.slow


class ScaleIntoBuffer(torch.autograd.Function):
    """`x * w`, whose backward writes the weight's gradient into one buffer for all calls."""

    buffer = torch.empty(8)

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        torch.sum(grad * x, 0, out=ScaleIntoBuffer.buffer)
        return grad * w, ScaleIntoBuffer.buffer


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.full((8,), v + 1.0)) for v in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for w in self.weights:
            x = ScaleIntoBuffer.apply(x, w)
        return x


def enlarge(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(100.0)


class SharedSum(nn.Module):
    """Both terms of the sum get one gradient tensor; one of them is not sharded, and a hook changes its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.delta = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.zeros(8, 8))
        self.delta.register_post_accumulate_grad_hook(enlarge)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.base + self.delta) + x @ (self.delta + self.base)


def gradients(kind: type[nn.Module], sharded: bool) -> list[list[float]]:
    model = kind()
    ignored = {model.delta} if isinstance(model, SharedSum) else None
    if sharded:
        dshard.fully_shard(model, ignored_params=ignored)
    x = torch.arange(16.0).view(2, 8)
    (model(x) * torch.tensor([[1.0], [3.0]])).pow(2).sum().backward()
    params = [p for p in model.parameters() if p.grad is not None]
    return [
        (p.grad.full_tensor() if isinstance(p, dshard.ShardedTensor) else p.grad).flatten().tolist() for p in params
    ]


@pytest.mark.parametrize("kind", [Buffered, SharedSum])
def test_gradients_that_share_memory_are_those_of_the_plain_model(worlds: WorldPool, kind):
    assert worlds.run(2, gradients, kind, True) == [gradients(kind, False)] * 2


def memory_of_dropped_gradients() -> list[bool]:
    """Whether the buffers of gradients that never leave go with what refers to them, without the garbage collector."""
    model: Any = dshard.fully_shard(nn.Linear(4, 4))
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 4)).sum().backward()
    buffers = [weakref.ref(reduction._bucket._memory.memory) for reduction in model._context().get(Reducer).open]
    gc.disable()
    try:
        model.zero_grad()
        model.reset_iter_state()
        return [buffer() is None for buffer in buffers]
    finally:
        gc.enable()


def test_gradients_that_are_dropped_before_they_leave_free_their_memory_at_once(worlds: WorldPool):
    assert worlds.run(2, memory_of_dropped_gradients) == [[True]] * 2


def drop(strategy: str, state: str) -> list[str]:
    """Which of a model, its parameters and their gradients are alive when nobody refers to them any more."""
    model: Any = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    for layer in (model[0], model[2]):
        dshard.fully_shard(layer, strategy=strategy)
    dshard.fully_shard(model, strategy=strategy)
    if state == "unreduced":
        with dshard.no_sync(model):
            model(torch.ones(3, 6)).sum().backward()
    else:
        for _ in range(2):
            model(torch.ones(3, 6)).sum().backward()
    if state == "stepped":
        torch.optim.AdamW(model.parameters()).step()
    named: dict[str, Any] = {"model": model, **dict(model.named_parameters())}
    found = {name: weakref.ref(value) for name, value in named.items()}
    del model, layer, named
    gc.collect()
    return [name for name, value in found.items() if value() is not None]


@pytest.mark.parametrize("state", ["reduced", "unreduced", "stepped"])
@pytest.mark.parametrize("strategy", ["full", "keep", "zero1", "ddp", "hybrid(2)", "split(2)", "split(2, hybrid(2))"])
def test_a_model_that_is_dropped_with_its_gradients_is_freed(worlds: WorldPool, strategy, state):
    num_ranks = 4 if "hybrid" in strategy else 2
    assert worlds.run(num_ranks, drop, strategy, state) == [[]] * num_ranks
