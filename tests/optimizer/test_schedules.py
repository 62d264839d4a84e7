"""Learning-rate schedules, made ahead of `fully_shard`, go on as for the plain module."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from dshard.testing import WorldPool
from tests.optimizer.kit import (
    NUM_STEPS,
    TOLERANCE,
    build,
    check,
    differences,
    plain_step,
    shard,
    sharded_step,
    weights,
)

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=True),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.3, total_iters=3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.7),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=2),
}


def scheduled(name: str, lr_is_tensor: bool) -> list[str]:
    plain, sharded = build(), build()
    runs = []
    for model, step_function in ((plain, plain_step), (sharded, sharded_step)):
        lr = torch.tensor(0.1) if lr_is_tensor else 0.1
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        schedule = SCHEDULES[name](optimizer)  # made ahead of fully_shard
        if model is sharded:
            shard(model)
        rates = []
        for step in range(NUM_STEPS):
            step_function(model, optimizer, step, needs_closure=False)
            schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append(float(optimizer.param_groups[0]["lr"]))
        runs.append((rates, weights(model)))
    wrong = [] if len(set(runs[0][0])) > 1 else ["the rate did not change"]
    return wrong + differences(runs[1], runs[0], 2 * TOLERANCE)


def test_every_schedule_of_torch_is_in_the_table():
    found = {n for n, c in vars(lr_scheduler).items() if inspect.isclass(c) and issubclass(c, lr_scheduler.LRScheduler)}
    assert found - {"LRScheduler", "_LRScheduler"} == SCHEDULES.keys() - {"SWALR"}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_learning_rate_schedule_trains_as_for_the_plain_module(worlds: WorldPool, name):
    for lr_is_tensor in (False, True):
        check(worlds, 2, "schedules", scheduled, name, lr_is_tensor)
