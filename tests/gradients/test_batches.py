"""Gradients of batches that are not alike on all ranks, or come in several backwards."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dshard
from dshard.testing import WorldPool
from tests.models import mlp
from tests.twins import close, data, full, same_grads, shard_children, twins


def token_mean(reduction: str) -> None:
    """Ranks with 2, 5, ... tokens: the gradient of the mean over all tokens, as one process gets it."""
    counts = [2 + 3 * r for r in range(dist.get_world_size())]
    plain, _ = twins(mlp, lambda m: None)
    batches = [data(count, 6, rank=r) for r, count in enumerate(counts)]
    plain(torch.cat(batches)).square().mean().backward()
    model = twins(mlp, lambda m: dshard.fully_shard(m, grad_reduce=reduction))[1]
    share = 1 / sum(counts) if reduction == "sum" else dist.get_world_size() / sum(counts)
    (model(batches[dist.get_rank()]).square().sum() * share).backward()
    for (name, p), q in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        close(full(q[1].grad), p.grad, name)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_token_weighted_loss_over_unequal_ranks_equals_one_process(worlds: WorldPool, num_ranks, reduction):
    worlds.run(num_ranks, token_mean, reduction)


def accumulated(scope: str) -> list[int]:
    plain, sharded = twins(mlp, shard_children)
    calls = []
    for m in (plain, sharded):
        for micro in range(4):
            is_last = micro == 3
            quiet: Any = contextlib.nullcontext()
            if m is sharded and scope == "no_sync" and not is_last:
                quiet = dshard.no_sync(m)
            elif m is sharded and scope == "switch":
                m.set_requires_gradient_sync(is_last)
            with dshard.CommTrace() as trace, quiet:
                (m(data(3, 6, seed=micro)).square().sum() / 4).backward()
            if m is sharded:
                calls.append(trace.calls("reduce_scatter"))
            if micro == 1 and scope == "read":
                for p in m.parameters():
                    p.grad.norm().item()  # type: ignore[union-attr]
    same_grads(plain, sharded)
    return calls


@pytest.mark.parametrize(("scope", "calls"), [("no_sync", [0, 0, 0, 3]), ("switch", [0, 0, 0, 3]), ("read", [3] * 4)])
def test_gradient_accumulation_gives_the_plain_gradients_and_sends_when_told(worlds: WorldPool, scope, calls):
    assert worlds.run(2, accumulated, scope) == [calls] * 2


def no_sync_gradient(by_scope: bool) -> Tensor:
    torch.manual_seed(0)
    net = dshard.fully_shard(nn.Linear(3, 2, bias=False))
    x = torch.full((1, 3), dist.get_rank() + 1.0)
    with dshard.CommTrace() as trace:
        if by_scope:
            with dshard.no_sync(net):
                net(x).sum().backward()
        else:
            net(x).sum().backward()
        sent = trace.calls("reduce_scatter")
        net(x).sum().backward()
    assert sent == (0 if by_scope else 1)
    return net.weight.grad.full_tensor()


def test_no_sync_defers_the_reduction_to_the_next_backward(worlds: WorldPool):
    for by_scope in (True, False):
        assert all(torch.equal(g, torch.full((2, 3), 3.0)) for g in worlds.run(2, no_sync_gradient, by_scope))
