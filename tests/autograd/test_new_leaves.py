"""Leaves that no `fully_shard` made, used where autograd does not record their gather: their gradients are reduced."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dshard
from dshard.testing import WorldPool


class Multiply(torch.autograd.Function):
    """`x * w`; the forward of a Function runs with gradients off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad * ctx.saved_tensors[0]


def loaded(weight: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def switched_on(weight: Tensor) -> Tensor:
    """A copy whose `requires_grad` is set by torch, not by its class."""
    return torch.Tensor.requires_grad_(weight.detach().clone())


LEAVES: dict[str, Callable[[Tensor], Tensor]] = {
    "the parameter": lambda w: w,
    "a new parameter": lambda w: nn.Parameter(w.detach().clone()),
    "a copy switched on": switched_on,
    "a loaded one": loaded,
    "an empty one": lambda w: torch.empty_like(w, requires_grad=True),
}
USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "in a function": lambda x, w: Multiply.apply(x, w),
    "by full_tensor": lambda x, w: x * w.full_tensor(),  # type: ignore[attr-defined]
}


def gradients(use: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = dshard.fully_shard(nn.Linear(4, 4))
    found = {}
    for name, make in LEAVES.items():
        leaf: Any = make(model.weight)
        leaf.data.fill_(1.0)
        USES[use](torch.full((4, 4), dist.get_rank() + 1.0), leaf).sum().backward()
        is_sharded = isinstance(leaf.grad, dshard.ShardedTensor)
        found[name] = leaf.grad.full_tensor()[0, 0].item() if is_sharded else "not reduced"
        leaf.grad = None
    return found


@pytest.mark.parametrize("use", USES)
def test_the_gradient_of_a_leaf_is_reduced_however_it_was_made_and_is_used(worlds: WorldPool, use):
    assert worlds.run(2, gradients, use) == [dict.fromkeys(LEAVES, 1.5)] * 2


def train_after_converting_a_child(is_used_before: bool) -> tuple[list[str], int]:
    """Names of gradients that are not those of the plain model, and the gathers of two units, of which one stays."""
    torch.manual_seed(0)
    plain, model = (nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    dshard.fully_shard(model)
    x = torch.ones(2, 4)
    if is_used_before:
        model(x).sum().backward()
        model.zero_grad()
    for module in (plain, model):
        module[1].double()
        module[1].weight.register_hook(lambda grad: 2 * grad)
        for _ in range(2):
            with dshard.CommTrace() as trace:
                module[1](torch.tanh(module[0](x)).double()).sum().backward()
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    wrong = [name for (name, p), q in pairs if not torch.allclose(p.grad.full_tensor(), q.grad)]
    return wrong, trace.calls("all_gather")


@pytest.mark.parametrize("is_used_before", [False, True])
def test_a_plain_child_of_a_sharded_module_is_converted_in_place_and_trains(worlds: WorldPool, is_used_before):
    assert worlds.run(2, train_after_converting_a_child, is_used_before) == [([], 2)] * 2
