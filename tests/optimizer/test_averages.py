"""Averages of weights, as by `AveragedModel` or by hand, are those of the plain module."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import swa_utils

import dshard
from dshard.testing import WorldPool
from tests.optimizer.kit import (
    NUM_STEPS,
    TOLERANCE,
    build,
    check,
    differences,
    full,
    loss_of,
    make,
    plain_step,
    shard,
    sharded_step,
    weights,
)

AVERAGES: dict[str, Callable[[nn.Module], swa_utils.AveragedModel]] = {
    "swa": swa_utils.AveragedModel,
    "swa with buffers": lambda m: swa_utils.AveragedModel(m, use_buffers=True),
    "ema": lambda m: swa_utils.AveragedModel(m, avg_fn=swa_utils.get_ema_avg_fn(0.9)),
    "ema multi": lambda m: swa_utils.AveragedModel(m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
    "swa multi": lambda m: swa_utils.AveragedModel(m, multi_avg_fn=swa_utils.get_swa_multi_avg_fn()),
}


def averaged(kind: str) -> list[str]:
    plain, sharded = build(), build()
    shard(sharded)
    runs = []
    wrong = []
    for model, step_function in ((plain, plain_step), (sharded, sharded_step)):
        average = AVERAGES[kind](model)
        optimizer = make("SGD", {"momentum": 0.9}, model.parameters())
        for step in range(NUM_STEPS):
            step_function(model, optimizer, step, needs_closure=False)
            with dshard.CommTrace() as trace:
                average.update_parameters(model)
            if trace.records and kind not in ("swa", "swa with buffers"):  # divide by a plain 0-d tensor
                wrong.append(f"step {step} communicates: {trace.summary()}")
        with torch.no_grad():
            loss = loss_of(average, 99, dist.get_rank())
        if list(average.state_dict()) != list(AVERAGES[kind](build()).state_dict()):
            wrong.append("keys")
        runs.append(({n: full(t) for n, t in average.state_dict().items()}, loss))
        if not differences(weights(average.module), weights(model), 1e-4):
            wrong.append("the average is the model itself")
    return wrong + differences(runs[1], runs[0], 5 * TOLERANCE)


@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_an_averaged_model_is_the_plain_one_and_an_ema_does_not_communicate(worlds: WorldPool, num_ranks, kind):
    check(worlds, num_ranks, "averages", averaged, kind)


def averaged_by_hand() -> list[str]:
    """A copy of each weight that follows it."""
    runs, wrong = [], []
    for model, step_function in ((build(), plain_step), (shard(build()), sharded_step)):
        shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer = make("SGD", {"momentum": 0.9}, model.parameters())
        for step in range(NUM_STEPS):
            step_function(model, optimizer, step, needs_closure=False)
            with dshard.CommTrace() as trace:
                for name, p in model.named_parameters():
                    shadow[name].lerp_(p.detach(), 0.5)
            if trace.records:
                wrong.append(f"step {step} communicates: {trace.summary()}")
        runs.append({n: full(t) for n, t in shadow.items()})
    return wrong + differences(runs[1], runs[0], 5 * TOLERANCE)


def test_shadow_copies_by_hand_follow_the_plain_ones_without_communication(worlds: WorldPool):
    check(worlds, 2, "averages", averaged_by_hand)
