"""A plain model and a sharded one with the same weights, and how they are compared.

Values must be the plain one's, gradients the mean over the ranks of the plain ones'.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dshard
from dshard import ShardedTensor
from tests.models import ROWS, TokenNet


def shard_root(model: nn.Module) -> None:
    dshard.fully_shard(model)


def shard_blocks(model: Any) -> None:
    """A unit per module."""
    for module in (model.tokens, *model.trunk, model.norm, model.head):
        dshard.fully_shard(module)
    dshard.fully_shard(model)


def shard_children(model: nn.Module) -> None:
    """A unit per child that has parameters."""
    for child in model.children():
        if next(child.parameters(), None) is not None:
            dshard.fully_shard(child)
    dshard.fully_shard(model)


SHARD = {"root": shard_root, "blocks": shard_blocks}


def twins(make: Callable[[], Any] = TokenNet, shard: Callable[[Any], None] = shard_root) -> tuple[Any, Any]:
    """A plain model and a sharded one with the same weights."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    shard(models[1])
    return models[0], models[1]


def data(*shape: int, seed: int = 0, rank: int | None = None) -> Tensor:
    """Numbers of this rank, or of another."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * seed + rank))


def ids(count: int = 4) -> Tensor:
    return (torch.arange(2 * count).view(2, count) + 3 * dist.get_rank()) % ROWS


def full(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor().detach() if isinstance(tensor, ShardedTensor) else tensor


def mean(tensor: Tensor | None) -> Tensor | None:
    """The mean over the ranks, by torch's own collective."""
    if tensor is None:
        return None
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def close(found: Any, expected: Any, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6, msg=lambda text: f"{what}: {text}")


def same_grads(plain: nn.Module, sharded: nn.Module) -> None:
    """Gradients are the mean of the plain twins'; at least one is there."""
    pairs = zip(plain.named_parameters(), sharded.parameters(), strict=True)
    seen = 0
    for (name, p), q in pairs:
        expected, found = mean(p.grad), full(q.grad)
        assert (expected is None) == (found is None), f"{name}: {expected} {found}"
        if expected is not None:
            close(found, expected, name)
            seen += bool(expected.any())
    assert seen


def same_weights(plain: nn.Module, sharded: nn.Module) -> None:
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        close(full(q), p.detach(), name)


def average_grads(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = mean(p.grad)


def train(model: nn.Module, num_steps: int = 2, **options: Any) -> None:
    """Steps of AdamW; a plain model averages its gradients by hand."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    for step in range(num_steps):
        optimizer.zero_grad()
        model(data(3, 6, seed=step)).square().mean().backward()
        if not isinstance(model, dshard.FSDPModule):
            average_grads(model)
        optimizer.step()


def quietly(fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` without the warnings that torch gives of its own use of itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fn(*args)
