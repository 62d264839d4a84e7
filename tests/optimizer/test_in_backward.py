"""Optimizers that step inside of backward."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dshard
from dshard.testing import WorldPool
from tests.optimizer.kit import (
    KINDS,
    NUM_STEPS,
    Report,
    build,
    check,
    differences,
    gradients,
    loss_of,
    make,
    plain_step,
    shard,
    weights,
)


def in_backward(name: str, when: str) -> Report:
    """An optimizer for each parameter, stepped by a hook as soon as its gradient is there."""
    report = Report(num_cases=1)
    plain, sharded = build(KINDS[name].model), build(KINDS[name].model)
    reference = make(name, {}, plain.parameters())
    if when == "after":
        shard(sharded)
    optimizers: dict[str, torch.optim.Optimizer] = {}
    fired: Counter[str] = Counter()

    def attach(label: str, param: Tensor) -> None:
        optimizers[label] = make(name, {}, [param])

        def hook(p: Tensor) -> None:
            fired[label] += 1
            if not isinstance(p.grad, dshard.ShardedTensor):
                report.wrong.append(f"{label}: the gradient is {type(p.grad).__name__}")
            optimizers[label].step()
            optimizers[label].zero_grad()

        param.register_post_accumulate_grad_hook(hook)

    for label, param in sharded.named_parameters():
        attach(label, param)
    if when == "before":
        shard(sharded)
    for step in range(NUM_STEPS):
        plain_step(plain, reference, step, needs_closure=False)
        loss_of(sharded, step, dist.get_rank()).backward()
        report.wrong += [f"{n} kept a gradient" for n, g in gradients(sharded).items() if g is not None]
    if set(fired.values()) != {NUM_STEPS} or fired.keys() != dict(plain.named_parameters()).keys():
        report.wrong.append(f"hooks fired {fired}")
    report.wrong += differences(weights(sharded), weights(plain), KINDS[name].tolerance)
    return report


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor", "Rprop"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_an_optimizer_in_backward_trains_as_one_after_it(worlds: WorldPool, num_ranks, name, when):
    check(worlds, num_ranks, "in backward", in_backward, name, when)


def step_alone(optimizer: torch.optim.Optimizer, param: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


def in_backward_of_blocks(strategy: str) -> None:
    """Where full tensors stay until backward, a step of one parameter is no write to what autograd still uses."""
    models = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)])
        models.append(model)
        if is_sharded:
            for block in model:
                dshard.fully_shard(block, strategy=strategy)
            dshard.fully_shard(model, strategy=strategy)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(partial(step_alone, torch.optim.SGD([param], lr=0.05)))
        for _ in range(3):
            model(torch.ones(4, 8)).square().mean().backward()
    plain, sharded = models
    assert differences(weights(sharded), weights(plain), 1e-6) == []
    loss = sharded(torch.ones(4, 8)).square().mean()
    with torch.no_grad():
        sharded[1][2].weight.mul_(2)  # which its own gradient is computed with, and that of the layer before
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("strategy", ["full", "zero2", "ddp", "keep"])
def test_an_optimizer_in_backward_steps_blocks_that_stay_gathered(worlds: WorldPool, strategy):
    worlds.run(2, in_backward_of_blocks, strategy)
