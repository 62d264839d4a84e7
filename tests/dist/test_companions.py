"""What wrappers and trainers of other libraries ask of a sharded module."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
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
