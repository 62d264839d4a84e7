"""What autograd does with a plain model it does with a sharded one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dshard
from dshard import ShardedTensor
from dshard.testing import WorldPool
from tests.models import mlp
from tests.twins import close, data, full, ids, mean, quietly, same_grads, shard_blocks, shard_children, twins


def grad_of_loss(subset: bool) -> None:
    plain, sharded = twins(mlp, shard_children)
    results = []
    for m in (plain, sharded):
        params = [m[2].weight] if subset else list(m.parameters())
        results.append(torch.autograd.grad(m(data(3, 6)).square().sum(), params))
        assert all(p.grad is None for p in m.parameters())
    for p, q in zip(*results, strict=True):
        assert isinstance(q, ShardedTensor)
        close(full(q), mean(p), "gradient")


@pytest.mark.parametrize("subset", [False, True])
def test_autograd_grad_gives_reduced_gradients_and_leaves_grad_alone(worlds: WorldPool, subset):
    worlds.run(2, grad_of_loss, subset)


def hooks_fire() -> None:
    plain, sharded = twins(mlp, shard_children)
    seen: list[list[Tensor]] = [[], []]
    events: list[list[str]] = [[], []]
    for index, m in enumerate((plain, sharded)):
        note, log = seen[index].append, events[index].append

        def on_grad(g: Tensor, note: Any = note, log: Any = log) -> None:
            log("tensor")
            note(full(g))

        def accumulated(p: Tensor, note: Any = note, log: Any = log) -> None:
            log("accumulated")
            note(full(p.grad))

        m[2].weight.register_hook(on_grad)
        m[2].bias.register_hook(lambda g: g * 2)
        m[0].weight.register_post_accumulate_grad_hook(accumulated)
        m[4].register_full_backward_hook(lambda module, gi, go, log=log: log("module"))
        m[4].register_full_backward_pre_hook(lambda module, go: (go[0] * 3,))
        removed = m[0].bias.register_hook(lambda g: g * 0)
        removed.remove()
        m(data(3, 6).requires_grad_()).square().sum().backward()
    same_grads(plain, sharded)
    assert events[0] == events[1] == ["module", "tensor", "accumulated"]
    for p, q in zip(*seen, strict=True):
        close(q, mean(p), "what a hook saw")


def test_hooks_fire_in_the_plain_order_with_reduced_gradients(worlds: WorldPool):
    worlds.run(2, hooks_fire)


def hooks_of_before() -> None:
    plain, _ = twins(mlp, lambda m: None)
    model, _ = twins(mlp, lambda m: None)
    calls: list[str] = []
    model[0].weight.register_hook(lambda g: calls.append("tensor"))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    dshard.fully_shard(model)
    for m in (plain, model):
        m(data(3, 6)).sum().backward()
    assert calls == ["tensor", "accumulated"]
    same_grads(plain, model)


def test_hooks_that_were_registered_before_fully_shard_fire(worlds: WorldPool):
    worlds.run(2, hooks_of_before)


def backward_twice() -> None:
    plain, sharded = twins(mlp, shard_children)
    for m in (plain, sharded):
        loss = m(data(3, 6)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        torch.autograd.grad(loss, list(m.parameters()))
    same_grads(plain, sharded)


def test_retained_graphs_can_be_run_again(worlds: WorldPool):
    worlds.run(2, backward_twice)


def several_forwards(reverse: bool) -> None:
    plain, sharded = twins(mlp, shard_children)
    for m in (plain, sharded):
        outs = [m(data(3, 6, seed=seed)) for seed in range(3)]
        m.eval()
        with torch.no_grad():
            m(data(2, 6))
        m.train()
        if reverse:  # one backward each, last first
            for out in outs[::-1]:
                out.square().sum().backward()
        else:
            (outs[0] * outs[1] + outs[2]).sum().backward()
    same_grads(plain, sharded)


@pytest.mark.parametrize("reverse", [False, True])
def test_several_forwards_before_one_backward_or_several(worlds: WorldPool, reverse):
    worlds.run(2, several_forwards, reverse)


def second_order(kind: str) -> None:
    """Where the reduced gradient enters the loss, the reference is one process with the mean of the ranks' losses."""
    plain, sharded = twins(mlp, shard_children)
    ranks = range(dist.get_world_size())
    penalties = []
    for m in (plain, sharded):
        own = [dist.get_rank()] if m is sharded else ranks
        inputs = [data(3, 6, rank=r).requires_grad_() for r in own]
        loss = sum(m(x).square().sum() for x in inputs) / len(inputs)
        params = list(m.parameters())
        if kind == "input penalty":
            slopes = torch.autograd.grad(loss, inputs, create_graph=True)  # type: ignore[arg-type]
            penalty = sum(((s * len(inputs)).norm(2, 1) - 1).square().sum() for s in slopes) / len(inputs)
            (loss + penalty).backward()  # type: ignore[union-attr]
        elif kind == "parameter penalty":
            slopes = torch.autograd.grad(loss, params, create_graph=True)  # type: ignore[arg-type]
            penalty = sum(s.square().sum() for s in slopes)
            penalties.append(float(penalty))
            (loss + penalty).backward()  # type: ignore[operator]
        elif kind == "backward":
            loss.backward(create_graph=True)  # type: ignore[union-attr]
            penalty = sum(p.grad.square().sum() for p in params)  # type: ignore[union-attr]
            curved = torch.autograd.grad(penalty, params)  # type: ignore[arg-type]
            for p, g in zip(params, curved, strict=True):
                p.grad = g
        else:
            slopes = torch.autograd.grad(loss, params, create_graph=True)  # type: ignore[arg-type]
            vectors = [data(*p.shape, seed=5, rank=0) for p in params]
            product = sum((s * v).sum() for s, v in zip(slopes, vectors, strict=True))
            for p, g in zip(params, torch.autograd.grad(product, params), strict=True):  # type: ignore[arg-type]
                p.grad = g
    assert len(penalties) < 2 or abs(penalties[0] - penalties[1]) < 1e-4 * penalties[0]
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(full(q.grad), p.grad, rtol=1e-4, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}")


@pytest.mark.parametrize("kind", ["input penalty", "parameter penalty", "hessian-vector product", "backward"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gradients_of_gradients_are_those_of_one_process(worlds: WorldPool, num_ranks, kind):
    worlds.run(num_ranks, quietly, second_order, kind)  # torch warns of `backward(create_graph=True)`


def checkpointed(use_reentrant: bool, accumulate: bool) -> None:
    plain, sharded = twins(shard=shard_blocks)
    for m in (plain, sharded):
        for micro in range(2 if accumulate else 1):
            if m is sharded:
                m.set_requires_gradient_sync(micro == accumulate)
            x = m.tokens(ids())
            for layer in (*m.trunk, m.trunk[0]):  # the first one twice
                x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=use_reentrant)
            (F.linear(m.norm(x), m.head.weight).square().sum() + m.trunk[1].weight.norm()).backward()
    same_grads(plain, sharded)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_both_kinds_of_checkpointing_give_the_plain_gradients(worlds: WorldPool, use_reentrant, accumulate):
    worlds.run(2, checkpointed, use_reentrant, accumulate)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda m: m[2].weight.mul_(2),
    "row": lambda m: m[2].weight[0].zero_(),
    "copy_": lambda m: m[2].weight.copy_(torch.ones(5, 8)),
    "foreach": lambda m: torch._foreach_mul_([m[2].weight], 2.0),
    "init": lambda m: nn.init.zeros_(m[2].weight),
    "state dict": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "index": lambda m: m[2].weight.index_fill_(0, torch.tensor([1]), 0.0),
    "step": lambda m: optimizer_of(m).step(),
}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)


def change_in_between(change: str) -> None:
    for m in twins(mlp, shard_children):
        loss = m(data(3, 6).requires_grad_()).square().sum()
        with torch.no_grad():
            CHANGES[change](m)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        m.zero_grad()
        m(data(3, 6)).square().sum().backward()  # and goes on
        assert all(p.grad is not None for p in m.parameters())


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_place_between_forward_and_backward_raises_as_in_plain_torch(worlds: WorldPool, change):
    worlds.run(2, change_in_between, change)
