"""Models of `transformers` train on two ranks as in one process on both batches, with `fully_shard(model)` alone."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import dshard
from dshard.testing import World
from tests.interop import models

TOLERANCE = 1e-5
TIMEOUT_S = 180.0


def by_layer(model: nn.Module) -> nn.Module:
    """As one would with FSDP2."""
    for layer in model.model.layers:
        dshard.fully_shard(layer)
    dshard.fully_shard(model.model.embed_tokens)
    dshard.fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
    return dshard.fully_shard(model)


def train_sharded(name: str, how: str = "root", checkpointing: bool | None = None) -> dict[str, float]:
    """Train on a rank's own batches, and compare with one process on all of them."""
    model = models.build(name)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    model = by_layer(model) if how == "by layer" else dshard.fully_shard(model)
    rank = dist.get_rank()
    found = models.train(name, model, lambda step: models.batch(name, step, rank))
    return models.worst(found, models.plain_run(name, dist.get_world_size()))


def assert_close(results: list[dict[str, float]], tolerance: float = TOLERANCE) -> None:
    for result in results:
        assert max(result.values()) <= tolerance, result


@pytest.mark.parametrize("name", list(models.MODELS))
def test_a_model_trains_with_fully_shard_on_the_root_alone_as_in_one_process(world: World, name):
    assert_close(world.run(train_sharded, name, timeout_s=TIMEOUT_S))


def test_a_llama_trains_with_units_made_by_hand_as_in_one_process(world: World):
    assert_close(world.run(train_sharded, "llama", "by layer", timeout_s=TIMEOUT_S))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "mixtral", "t5"])
def test_gradient_checkpointing_changes_nothing(world: World, name, use_reentrant):
    assert_close(world.run(train_sharded, name, "root", use_reentrant, timeout_s=TIMEOUT_S))


def bf16_losses(shard: Any, name: str, how: str, kwargs: dict[str, Any] | None) -> list[float]:
    model: Any = models.build(name).float()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers if how == "by layer" else ():
        shard(layer, mp_policy=policy)
    shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=models.LEARNING_RATE)
    losses = []
    for step in range(3):
        batch = {
            k: v.float() if v.is_floating_point() else v for k, v in models.batch(name, step, dist.get_rank()).items()
        }
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def beside_fsdp2(name: str, how: str, kwargs: dict[str, Any] | None) -> tuple[list[float], list[float]]:
    return bf16_losses(torch_fully_shard, name, how, kwargs), bf16_losses(dshard.fully_shard, name, how, kwargs)


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}, {"use_reentrant": False}], ids=str)
@pytest.mark.parametrize(
    ("name", "how"),
    [("llama", "root"), ("llama", "by layer"), ("qwen3", "by layer"), ("mixtral", "root"), ("t5", "root")],
)
def test_gradient_checkpointing_in_bf16_gives_the_losses_of_fsdp2(world: World, name, how, kwargs):
    for expected, found in world.run(beside_fsdp2, name, how, kwargs, timeout_s=TIMEOUT_S):
        assert found == expected


def experts_of_ranks(implementation: str) -> dict[str, Any]:
    """Train a Mixtral in fp32, and note which experts of the first layer this rank's first batch uses."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    used: set[int] = set()
    build = functools.partial(models.build, "mixtral", experts_implementation=implementation)
    model = build().float()
    router = model.model.layers[0].mlp.gate
    handle = router.register_forward_hook(lambda module, args, output: used.update(output[2].flatten().tolist()))
    dshard.fully_shard(model)
    model(**models.batch("mixtral", 0, rank))
    handle.remove()
    train = functools.partial(models.train, "mixtral", num_steps=3, make=torch.optim.SGD)
    found = train(model, lambda step: models.batch("mixtral", step, rank))
    expected = train(build().float(), lambda step: models.together("mixtral", step, num_ranks))
    return {"used": used, **models.worst(found, expected)}


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_ranks_that_use_different_experts_train_them_as_one_process_does(world: World, implementation):
    first, second = world.run(experts_of_ranks, implementation, timeout_s=TIMEOUT_S)
    assert first.pop("used") != second.pop("used")
    assert_close([first, second])


def elements_held(name: str) -> list[tuple[int, int]]:
    """Elements on this rank and in full, of every parameter."""
    model = dshard.fully_shard(models.build(name))
    return [(p.to_local().numel(), p.numel()) for p in model.parameters()]


def test_each_rank_holds_half_of_a_llama(world: World):
    for numels in world.run(elements_held, "llama", timeout_s=TIMEOUT_S):
        assert sum(local for local, _ in numels) * 2 == sum(numel for _, numel in numels)
