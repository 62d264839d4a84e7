"""Optimizers that step inside of backward."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

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
