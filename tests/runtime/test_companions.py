"""What wrappers and trainers of other libraries ask of a sharded module."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.nn.parallel import DistributedDataParallel

import dshard
from dshard.testing import WorldPool, expect_error


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()


def wrap_what_is_sharded() -> None:
    DistributedDataParallel(dshard.fully_shard(model()))


def test_ddp_around_a_sharded_model_finds_nothing_to_do_and_raises(worlds: WorldPool):
    for name, message in expect_error(worlds.get_world(2), wrap_what_is_sharded):
        assert name == "RuntimeError"
        assert "not needed" in message


def wrap_what_is_partly_sharded() -> float:
    """Gradients of a model of which dshard has the first layer and DDP the second."""
    plain, both = model(), model()
    dshard.fully_shard(both, ignored_params=set(both[1].parameters()))
    wrapped = DistributedDataParallel(both)
    inputs = [torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    wrapped(inputs[dist.get_rank()]).square().sum().backward()
    torch.stack([plain(x).square().sum() for x in inputs]).mean().backward()
    grads = [p.grad.full_tensor() if isinstance(p, dshard.ShardedTensor) else p.grad for p in both.parameters()]
    return max((g - p.grad).abs().max().item() for g, p in zip(grads, plain.parameters(), strict=True))


def test_ddp_reduces_what_was_left_plain_and_dshard_the_rest(worlds: WorldPool):
    assert max(worlds.run(2, wrap_what_is_partly_sharded)) <= 1e-12


def replicated_around(wrap: Callable[[nn.Module], Any], copies: Callable[[nn.Module], Any]) -> tuple[list[float], str]:
    """Losses where torch replicates a model of which dshard has a child, or a copy of one."""
    child = dshard.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double())
    both = nn.Sequential(nn.Linear(4, 4).double(), copies(child))
    wrap(both)
    optimizer, losses = torch.optim.SGD(both.parameters(), lr=0.1), []
    for step in range(3):
        x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = both(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, type(both[1][0].weight).__name__


def compare_replicated(kind: str, how: str) -> bool:
    copies = {"itself": lambda m: m, "deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}[how]
    torch.manual_seed(0)
    expected, _ = replicated_around(dshard.fully_shard, copies)
    torch.manual_seed(0)
    found, kept = replicated_around({"ddp": replicate, "fsdp2": replicate_with_fsdp}[kind], copies)
    return found == expected and kept == "ShardedTensor"


@pytest.mark.parametrize("how", ["itself", "deepcopy", "pickle"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_torchs_replicate_around_a_sharded_child_leaves_it_alone(worlds: WorldPool, kind, how):
    assert worlds.run(2, compare_replicated, kind, how) == [True, True]


def accumulate(*, by_method: bool) -> tuple[list[int], float]:
    """Reductions per micro-batch, and the distance from the sum of the gradients."""
    plain = model()
    sharded = dshard.fully_shard(copy.deepcopy(plain))
    calls = []
    for micro in range(2):
        x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(micro))
        plain(x).square().sum().backward()
        with dshard.CommTrace() as trace:
            if micro == 0:
                with sharded.no_sync() if by_method else dshard.no_sync(sharded):
                    sharded(x).square().sum().backward()
            else:
                sharded(x).square().sum().backward()
        calls.append(trace.calls("reduce_scatter"))
    pairs = zip(sharded.parameters(), plain.parameters(), strict=True)
    return calls, max((p.grad.full_tensor() - q.grad).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("by_method", [True, False])
def test_no_sync_is_a_method_as_of_ddp_and_a_function(worlds: WorldPool, by_method):
    for calls, apart in worlds.run(2, accumulate, by_method=by_method):
        assert calls[0] == 0 < calls[1]
        assert apart <= 1e-12
