"""What happens to gradients between backward and step: zeroed, clipped and scaled as those of the plain module."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dshard
from dshard.testing import WorldPool, expect_error
from tests.optimizer.kit import (
    NUM_STEPS,
    TOLERANCE,
    average_gradients,
    build,
    check,
    differences,
    full,
    gradients,
    loss_of,
    make,
    shard,
    weights,
)


def zeroing(set_to_none: bool, by_model: bool) -> list[str]:
    """Accumulate over two backwards, then zero."""
    plain, sharded = build(), build()
    shard(sharded)
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) for m in (plain, sharded)]
    wrong = []
    ranks, rank = range(dist.get_world_size()), dist.get_rank()
    for step in range(NUM_STEPS):
        for model, optimizer in pairs:
            (model if by_model else optimizer).zero_grad(set_to_none=set_to_none)
        zeroed = [p.grad for p in sharded.parameters()]
        if step and any((g is None) is not set_to_none for g in zeroed):
            wrong.append(f"step {step}: after zero_grad {zeroed}")
        if step and not set_to_none:
            wrong += [f"step {step}: {n} is not zero" for n, g in gradients(sharded).items() if g.abs().sum() != 0]
        for micro in range(2):
            loss_of(sharded, 2 * step + micro, rank).backward()
            average_gradients(plain, 2 * step + micro, ranks)
        wrong += [f"step {step}: {w}" for w in differences(gradients(sharded), gradients(plain), 10 * TOLERANCE)]
        for _, optimizer in pairs:
            optimizer.step()
    return wrong + differences(weights(sharded), weights(plain), 10 * TOLERANCE)


@pytest.mark.parametrize("by_model", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_zero_grad_zeroes_or_forgets_and_backwards_add_up(worlds: WorldPool, num_ranks, set_to_none, by_model):
    check(worlds, num_ranks, "zero_grad", zeroing, set_to_none, by_model)


def clipped(norm_type: float, max_norm: float, foreach: bool | None) -> list[str]:
    """Torch's own function and dshard's, beside torch's on the plain module; with a plain parameter among them."""
    wrong = []
    for function in ("torch", "parts") if foreach else ("torch", "parts", "dshard"):
        plain, sharded = build(), build()
        shard(sharded)
        extras = [nn.Parameter(torch.linspace(-1, 1, 5)) for _ in range(2)]
        average_gradients(plain, 0, range(dist.get_world_size()))
        loss_of(sharded, 0, dist.get_rank()).backward()
        for extra in extras:
            extra.square().sum().backward()
        nonempty = [
            [*(p for p in m.parameters() if p.numel()), extra]
            for m, extra in zip((plain, sharded), extras, strict=True)
        ]  # torch itself has no infinity norm of nothing
        expected = nn.utils.clip_grad_norm_(nonempty[0], max_norm, norm_type=norm_type, foreach=foreach)
        with dshard.CommTrace() as trace:
            if function == "torch":
                found = nn.utils.clip_grad_norm_(nonempty[1], max_norm, norm_type=norm_type, foreach=foreach)
            elif function == "dshard":
                found = dshard.clip_grad_norm_([*sharded.parameters(), extras[1]], max_norm, norm_type=norm_type)
            else:
                found = nn.utils.get_total_norm([p.grad for p in nonempty[1]], norm_type, foreach=foreach)
                nn.utils.clip_grads_with_norm_(nonempty[1], max_norm, found, foreach=foreach)
        wrong += [f"{function} norm: {w}" for w in differences(full(found), expected, TOLERANCE)]
        wrong += [f"{function}: {w}" for w in differences(gradients(sharded), gradients(plain), 2 * TOLERANCE)]
        wrong += [f"{function}: {w}" for w in differences(extras[1].grad, extras[0].grad, 2 * TOLERANCE)]
        if trace.calls("all_gather"):
            wrong.append(f"{function}: gathers")
        if function == "dshard" and trace.calls() != (1 if dist.get_world_size() > 1 else trace.calls()):
            wrong.append(f"{function}: {trace.summary()}")
    return wrong


@pytest.mark.parametrize(
    ("norm_type", "max_norm"), [(2.0, 0.1), (2.0, 100.0), (1.0, 0.5), (float("inf"), 0.05), (3.0, 0.1)]
)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_clip_grad_norm_of_torch_and_dshard_gives_the_plain_norm_and_gradients_without_a_gather(
    worlds: WorldPool, num_ranks, norm_type, max_norm
):
    for foreach in (None, True):  # on CPU, None is False
        check(worlds, num_ranks, "clip", clipped, norm_type, max_norm, foreach)


def clipped_by_value(limit: float, foreach: bool | None) -> list[str]:
    plain, sharded = build(), build()
    shard(sharded)
    average_gradients(plain, 0, range(dist.get_world_size()))
    loss_of(sharded, 0, dist.get_rank()).backward()
    before = gradients(plain)
    nn.utils.clip_grad_value_(plain.parameters(), limit, foreach=foreach)
    with dshard.CommTrace() as trace:
        nn.utils.clip_grad_value_(sharded.parameters(), limit, foreach=foreach)
    wrong = differences(gradients(sharded), gradients(plain), 2 * TOLERANCE)
    if not differences(gradients(plain), before, 0.0):
        wrong.append("nothing was clipped")
    return wrong + ([trace.summary()] if trace.records else [])


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_clip_grad_value_clips_shards_and_does_not_communicate(worlds: WorldPool, num_ranks, foreach):
    for limit in (0.05, 0.5):
        check(worlds, num_ranks, "clip", clipped_by_value, limit, foreach)


def not_finite() -> list[str]:
    """An infinite gradient on the last rank: an error where asked for, on every rank alike."""
    wrong = []
    for function, told in ((nn.utils.clip_grad_norm_, "is non-finite"), (dshard.clip_grad_norm_, "must be finite")):
        sharded = build()
        shard(sharded)
        factor = float("inf") if dist.get_rank() == dist.get_world_size() - 1 else 1.0
        (loss_of(sharded, 0, dist.get_rank()) * factor).backward()
        try:
            function([p for p in sharded.parameters() if p.numel()], 1.0, error_if_nonfinite=True)
            wrong.append(f"{function.__module__}: did not raise")
        except RuntimeError as error:
            if told not in str(error):
                wrong.append(f"{function.__module__}: {error}")
    return wrong


def test_clipping_with_error_if_nonfinite_raises_on_every_rank_for_one_ranks_infinity(worlds: WorldPool):
    for num_ranks in (2, 3):
        check(worlds, num_ranks, "clip", not_finite)


def scaled(name: str, mode: dict[str, Any], clips: bool) -> list[str]:
    """Step 1 has an infinity in one gradient row of the last rank alone: every rank skips it and halves the scale.

    A fused optimizer unscales in its own step, unless its gradients are clipped.
    """
    plain, sharded = build(), build()
    shard(sharded)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    runs = []
    for model, is_sharded in ((plain, False), (sharded, True)):
        optimizer = make(name, mode, model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        scales, steps = [], []
        for step in range(NUM_STEPS + 1):
            optimizer.zero_grad()
            before = weights(model)
            for r in [rank] if is_sharded else range(num_ranks):
                loss = loss_of(model, step, r)
                if step == 1:
                    loss = loss + model.first.weight[3, 0] * (float("inf") if r == num_ranks - 1 else 0.0)
                if not is_sharded:
                    loss = loss / num_ranks
                scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(optimizer)
                clip = dshard.clip_grad_norm_ if is_sharded else nn.utils.clip_grad_norm_
                clip(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            steps.append(bool(differences(weights(model), before, 0.0)))
        runs.append((scales, steps, weights(model)))
    wrong = [] if runs[0][1] == [True, False, True, True, True] else [f"the reference stepped {runs[0][1]}"]
    if len(set(runs[0][0])) < 2:
        wrong.append(f"the reference's scales {runs[0][0]}")
    return wrong + differences(runs[1], runs[0], 20 * TOLERANCE)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(
    ("name", "mode"), [("SGD", {}), ("AdamW", {}), ("AdamW", {"foreach": True}), ("AdamW", {"fused": True})]
)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_grad_scaler_skips_a_step_on_all_ranks_for_one_ranks_infinity(
    worlds: WorldPool, num_ranks, name, mode, clips
):
    check(worlds, num_ranks, "scaler", scaled, name, mode, clips)


def have_full_tensors() -> list[bool]:
    """Whether norms of sharded gradients answer as DTensors do, whatever they are of."""
    model = build()
    shard(model)
    loss_of(model, 0, dist.get_rank()).backward()
    grads: list[Any] = [p.grad for p in model.parameters() if p.numel()]
    norms = [
        nn.utils.get_total_norm(grads, 2.0),
        nn.utils.get_total_norm(grads, -1.0),
        *torch._foreach_norm(grads, 2, dtype=torch.float64),
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.numel()], 0.1).sqrt(),
    ]
    return [hasattr(norm, "full_tensor") and type(norm.full_tensor()) is torch.Tensor for norm in norms]


def test_norms_of_sharded_gradients_have_full_tensors(worlds: WorldPool):
    for found in worlds.run(2, have_full_tensors):
        assert len(found) > 3
        assert all(found)


def clip_others(strategy: str) -> None:
    model = dshard.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), strategy=strategy, sync="broadcast")
    model(torch.ones(2, 4)).square().sum().backward()
    dshard.clip_grad_norm_(model[dist.get_rank()].parameters(), 1e-3)


@pytest.mark.parametrize("strategy", ["full", "ddp"])
def test_ranks_that_clip_other_gradients_are_told_so(worlds: WorldPool, strategy):
    for kind, text in expect_error(worlds.get_world(2), clip_others, strategy):
        assert kind == "DivergenceError"
        assert "clip_grad_norm_: all ranks must pass the same gradients, but it is 2 named #" in text
