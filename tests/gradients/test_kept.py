"""Gradients that somebody keeps as they arrive: autograd then makes `.grad` a copy, which must be sharded as well."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dshard
from dshard.tensor import ShardedTensor
from dshard.testing import WorldPool

NUM_STEPS, NUM_MICRO = 2, 3


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 4, bias=False))


def keep(param: Any, how: str, kept: list[Any]) -> Any:
    """Have the gradients of a parameter kept; what is given must live as long."""
    if how == "hook of the tensor":
        return param.register_hook(lambda grad: kept.append(grad))
    node = param.view_as(param).grad_fn.next_functions[0][0]
    node.register_prehook(lambda grads: kept.append(grads[0]))
    return node


def train_and_keep(how: str, syncs_always: bool, strategy: str) -> list[str]:
    """What is not as for the plain model."""
    plain, model, wrong = net(), net(), []
    dshard.fully_shard(model, strategy=strategy)
    kept: list[Any] = []
    keepers = [keep(param, how, kept) for param in model.parameters()]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(NUM_STEPS):
        for micro in range(NUM_MICRO):
            model.set_requires_gradient_sync(syncs_always or micro == NUM_MICRO - 1)
            x = torch.randn(4, 8)  # the same on all ranks
            for each in (plain, model):
                each(x).square().sum().backward()
        for (name, expected), param in zip(plain.named_parameters(), model.parameters(), strict=True):
            grad: Any = param.grad
            assert expected.grad is not None
            if type(grad) is not ShardedTensor:
                wrong.append(f"{step} {name}: .grad is a {type(grad).__name__}")
            elif grad.to_local().numel() > -(-expected.shape[0] // 2) * expected[0].numel() and strategy == "full":
                wrong.append(f"{step} {name}: this rank has {grad.to_local().shape}")
            if not torch.allclose(full_of(grad), expected.grad, rtol=1e-4, atol=1e-5):
                wrong.append(f"{step} {name}: {full_of(grad)} is not {expected.grad}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(kept) == NUM_STEPS * NUM_MICRO * len(keepers)
    return wrong


def full_of(grad: Any) -> Tensor:
    full: Tensor = grad.full_tensor() if isinstance(grad, ShardedTensor) else grad
    return full


@pytest.mark.parametrize("strategy", ["full", "zero1", "ddp"])
@pytest.mark.parametrize("syncs_always", [True, False])
@pytest.mark.parametrize("how", ["hook of the tensor", "hook of its node"])
def test_a_gradient_that_somebody_keeps_leaves_a_sharded_one_of_the_same_value(
    worlds: WorldPool, how, syncs_always, strategy
):
    assert worlds.run(2, train_and_keep, how, syncs_always, strategy) == [[], []]


class Alike(torch.autograd.Function):
    """Asks its weight for memory of its own size in backward, as autograd does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, out: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = weight.new_empty_strided(weight.shape, weight.stride())
        assert type(grad) is Tensor
        return out @ weight, grad.copy_(out.t() @ x)


def use_alike() -> bool:
    plain, model = net(), net()
    dshard.fully_shard(model)
    for each in (plain, model):
        Alike.apply(torch.ones(2, 8), each[0].weight).sum().backward()
    return torch.equal(model[0].weight.grad.full_tensor(), plain[0].weight.grad)


def test_a_backward_function_that_asks_for_such_memory_gets_plain_memory(worlds: WorldPool):
    assert worlds.run(2, use_alike) == [True, True]
