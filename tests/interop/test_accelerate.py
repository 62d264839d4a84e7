"""Accelerate without a trainer: a sharded model, accumulation, clipping, autocast."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import dshard
from dshard.testing import World, expect_error
from tests.interop import models
from tests.interop.launch import launched

TIMEOUT_S = 180.0
MICRO_BATCHES = 2


def micro_batch(step: int, micro: int, num_ranks: int, rank: int | None) -> dict[str, Tensor]:
    """That of one rank, or of all together."""
    number = MICRO_BATCHES * step + micro
    if rank is None:
        return models.together("llama", number, num_ranks)
    return models.batch("llama", number, rank)


def accelerated(*, sharded: bool) -> dict[str, Any]:
    import accelerate

    rank = dist.get_rank() if sharded else None
    num_ranks = dist.get_world_size()
    norms = []
    with launched(alone=not sharded), dshard.CommTrace() as trace:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
        model = models.build("llama")
        if sharded:
            model = dshard.fully_shard(model)
        model = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=models.LEARNING_RATE))
        for step in range(3):
            for micro in range(MICRO_BATCHES):
                with accelerator.accumulate(model):
                    inputs = micro_batch(step, micro, num_ranks, rank)
                    accelerator.backward(models.loss_of("llama", model, inputs))
                    if accelerator.sync_gradients:
                        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                    optimizer.step()
                    optimizer.zero_grad()
    weights = {name: models.full(p).clone() for name, p in model.named_parameters()}
    return {"norms": norms, "weights": weights, "reductions": trace.calls("reduce_scatter")}


def accelerated_both() -> tuple[float, float, int]:
    found, expected = accelerated(sharded=True), accelerated(sharded=False)
    norms = models.difference(torch.tensor(found["norms"]), torch.tensor(expected["norms"]))
    apart = [
        models.difference(found["weights"][name], value, smallest=models.LEARNING_RATE)
        for name, value in expected["weights"].items()
    ]
    return norms, max(apart), found["reductions"]


def test_accumulate_and_clip_of_accelerate_train_a_sharded_model_as_a_plain_one(world: World):
    for norms, weights, num_reductions in world.run(accelerated_both, timeout_s=TIMEOUT_S):
        assert norms <= 1e-5
        assert weights <= 1e-5
        assert num_reductions == 4 * 3  # one per unit and step, not per micro-batch


def under_autocast() -> tuple[str, list[float], list[torch.dtype]]:
    import accelerate

    with launched():
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        model = dshard.fully_shard(models.build("llama").float())
        model = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=models.LEARNING_RATE))
        seen: list[str] = []
        handle = model.model.layers[0].mlp.gate_proj.register_forward_hook(
            lambda m, i, out: seen.append(str(out.dtype))
        )
        losses = []
        for _ in range(4):
            loss = models.loss_of("llama", model, models.batch("llama", 0, dist.get_rank()))
            accelerator.backward(loss)
            dtypes = [model.lm_head.weight.dtype, model.lm_head.weight.grad.dtype]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        handle.remove()
    return seen[0], losses, dtypes


def test_autocast_of_accelerate_computes_in_bfloat16_over_parameters_in_float32(world: World):
    for seen, losses, dtypes in world.run(under_autocast, timeout_s=TIMEOUT_S):
        assert seen == "torch.bfloat16"
        assert losses[-1] < 0.9 * losses[0]
        assert dtypes == [torch.float32] * 2


def prepare_as_for_ddp() -> None:
    import accelerate

    with launched():
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.prepare(dshard.fully_shard(models.build("llama")))


def test_a_sharded_model_is_not_wrapped_in_ddp_unnoticed(world: World):
    for name, message in expect_error(world, prepare_as_for_ddp, timeout_s=TIMEOUT_S, grace_s=10.0):
        assert name == "RuntimeError"
        assert "DistributedDataParallel is not needed" in message
