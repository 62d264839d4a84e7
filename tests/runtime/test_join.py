"""Ranks with fewer batches follow the others: as one process that adds up the gradients of the batches there are."""

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dshard
from dshard.testing import WorldPool, expect_error

COUNTS = {2: (3, 5), 4: (1, 4, 2, 3)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x) * self.scale


def build() -> Any:
    torch.manual_seed(0)
    return Net().double()


def sharded(strategy: str, **options: Any) -> Any:
    model = build()
    for layer in model.layers:
        dshard.fully_shard(layer, strategy=strategy, **options)
    return dshard.fully_shard(model, strategy=strategy, **options)


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + number)).double()


def make(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def clip(model: nn.Module, how: str) -> None:
    if how == "dshard":
        dshard.clip_grad_norm_(model.parameters(), 0.05)
    elif how == "torch":
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def trained(strategy: str, how: str, micro: int, evaluates: bool) -> tuple[dict[str, Tensor], float]:
    model = sharded(strategy)
    optimizer, scheduler = make(model)
    rank = dist.get_rank()
    for epoch in range(2):
        with dshard.join(model):
            for number in range(COUNTS[dist.get_world_size()][rank]):
                for part in range(micro):
                    last = part == micro - 1
                    with nullcontext() if last else dshard.no_sync(model):
                        model(batch(rank, 100 * epoch + 10 * number + part)).sigmoid().pow(2).mean().backward()
                clip(model, how)
                optimizer.step()
                optimizer.zero_grad()
                if evaluates:
                    with torch.no_grad():
                        model(batch(rank, number))
        scheduler.step()
    return {name: p.full_tensor() for name, p in model.named_parameters()}, float(scheduler.get_last_lr()[0])


def plain(num_ranks: int, how: str, micro: int) -> dict[str, Tensor]:
    model = build()
    optimizer, scheduler = make(model)
    counts = COUNTS[num_ranks]
    for epoch in range(2):
        for number in range(max(counts)):
            for rank, count in enumerate(counts):
                for part in range(micro if number < count else 0):
                    loss = model(batch(rank, 100 * epoch + 10 * number + part)).sigmoid().pow(2).mean()
                    (loss / num_ranks).backward()
            clip(model, "torch" if how != "none" else how)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("num_ranks", "strategy", "how", "micro", "evaluates"),
    [
        (2, "full", "none", 1, False),
        (2, "full", "dshard", 2, True),
        (2, "full", "torch", 1, True),
        (2, "ddp", "torch", 2, False),
        (2, "zero1", "dshard", 2, False),
        (2, "zero2", "none", 2, True),
        (2, "keep", "torch", 1, False),
        (2, "split(2)", "dshard", 1, False),
        (4, "full", "torch", 2, False),
        (4, "hybrid(2)", "dshard", 1, True),
        (4, "ddp", "none", 1, False),
    ],
)
def test_the_end_is_that_of_the_batches_there_are(worlds: WorldPool, num_ranks, strategy, how, micro, evaluates):
    expected = plain(num_ranks, how, micro)
    for got, lr in worlds.run(num_ranks, trained, strategy, how, micro, evaluates):
        assert lr == pytest.approx(0.05 * 0.7**2)
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")


class Blocks(nn.Sequential):
    """Checkpointed layers, if it is told to."""

    checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return x


def weights_after(kind: str, *, joins: bool) -> list[Tensor]:
    """Weights after uneven batches; without `join` a rank that has no more of them runs its last one for nothing."""
    torch.manual_seed(0)
    model: Any = Blocks(*[nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3)])
    model.checkpoints = kind == "checkpoint"
    policy = dshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model:
        dshard.fully_shard(layer, mp_policy=policy if kind != "autocast" else None)
    dshard.fully_shard(model, mp_policy=policy if kind != "autocast" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rank, counts = dist.get_rank(), COUNTS[2]
    with dshard.join(model, enable=joins):
        for number in range(counts[rank] if joins else max(counts)):
            x = batch(rank, min(number, counts[rank] - 1)).float()
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                out = model(x).float()
            (out.square().mean() * float(number < counts[rank])).backward()
            dshard.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return [p.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["bf16", "checkpoint", "autocast"])
def test_a_rank_that_follows_does_what_a_batch_that_counts_nothing_does(worlds: WorldPool, kind):
    joined = worlds.run(2, weights_after, kind, joins=True)
    for got, expected in zip(joined, worlds.run(2, weights_after, kind, joins=False), strict=True):
        assert all(map(torch.equal, got, expected))


def buffers_after(count: int) -> tuple[Tensor, Tensor]:
    """Running means after this rank's own batches, and after it has followed the others."""
    model = sharded("full")
    optimizer, _ = make(model)
    with dshard.join(model):
        for number in range(3 if dist.get_rank() else 1):
            model(batch(0, number)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        own = model.norm.running_mean.clone()
    return own, model.norm.running_mean.clone()


def test_buffers_are_those_of_the_ranks_own_batches(worlds: WorldPool):
    for own, after in worlds.run(2, buffers_after, 1):
        assert torch.equal(own, after)


def steps(kind: str) -> None:
    """A loop that cannot be followed."""
    model = sharded("full")
    optimizer, scheduler = make(model)
    rank = dist.get_rank()
    with dshard.join(model, throw_on_early_termination=kind == "throw"):
        for number in range({"no batch": 2 * rank, "no step": 1 + rank}.get(kind, 1 + 2 * rank)):
            model(batch(0, number)).sum().backward()
            if kind == "some":
                dshard.clip_grad_norm_(model.layers.parameters(), 1.0)
            if kind == "no step" and rank == 0:
                continue
            optimizer.step()
            optimizer.zero_grad()
            if kind == "differ" and rank:
                scheduler.step()
    if kind == "differ":
        with dshard.join(model):
            model(batch(0, 0)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("no batch", "StateError", "join: a rank follows the others with its last batch, but one has had none at all"),
        ("throw", "StateError", "join: all ranks were to have as many batches (throw_on_early_termination), but one"),
        ("some", "StateError", "join: gradients are clipped all together, but 6 of 9 were passed. "),
        ("no step", "StateError", "join: a rank follows the others with its own optimizer, but one has had no step"),
    ],
)
def test_what_cannot_be_followed_is_an_error_of_all_ranks(worlds: WorldPool, kind, error, message):
    for raised, text in expect_error(worlds.get_world(2), steps, kind):
        assert raised == error
        assert re.match(re.escape(message), text)


def two_models() -> None:
    with dshard.join(sharded("full")), dshard.join(sharded("full")):
        pass


def test_a_second_model_is_refused_and_the_first_block_ends(worlds: WorldPool):
    for _ in range(2):
        for raised, text in expect_error(worlds.get_world(2), two_models):
            assert raised == "StateError"
            assert text.startswith("join: one model is followed at a time, but a block of another call is open. ")


def test_a_plain_model_is_refused():
    with pytest.raises(dshard.ArgumentError, match="join: module must be a module that fully_shard was called on"):
        dshard.join(nn.Linear(2, 2))
