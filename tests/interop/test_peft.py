"""LoRA of PEFT on a sharded model: adapters alone train and travel, and are saved and merged."""

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dshard
from dshard.interop import full_state_dict
from dshard.testing import World, expect_error
from tests.interop import models

TIMEOUT_S = 180.0


def with_adapters(seed: int = 0) -> nn.Module:
    import peft

    model = models.build("llama", seed=seed)
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
    return peft.get_peft_model(model, config).double()


def train_adapters() -> dict[str, Any]:
    """Train adapters, and count what a step sends."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = dshard.fully_shard(with_adapters())
    found = models.train("llama", model, lambda step: models.batch("llama", step, rank), 4)
    expected = models.train("llama", with_adapters(), lambda step: models.together("llama", step, num_ranks), 4)
    with dshard.CommTrace() as trace:
        models.loss_of("llama", model, models.batch("llama", 0, rank)).backward()
    reductions = trace.select("reduce_scatter")
    return {
        "apart": models.worst(found, expected),
        "trainable_bytes": sum(8 * p.numel() for p in model.parameters() if p.requires_grad),
        "sent_bytes": sum(r.payload_bytes for r in reductions),
        "labels": {r.label for r in reductions},
        "with_grad": {name for name, p in model.named_parameters() if p.grad is not None},
        "adapters": {name for name, p in model.named_parameters() if "lora_" in name},
        "frozen_moved": max(
            models.difference(models.full(p), q)
            for (name, p), q in zip(model.named_parameters(), with_adapters().parameters(), strict=True)
            if "lora_" not in name
        ),
    }


def test_only_adapters_take_and_send_gradients_and_train_as_in_one_process(world: World):
    for result in world.run(train_adapters, timeout_s=TIMEOUT_S):
        assert max(result["apart"].values()) <= 1e-5, result["apart"]
        assert result["with_grad"] == result["adapters"]
        assert result["frozen_moved"] == 0
        assert result["sent_bytes"] == result["trainable_bytes"] // 2  # (N - 1) / N of them
        assert len(result["labels"]) == 2  # the layers; embedding, norm and head are frozen and send nothing


def save_and_load_adapters(folder: str) -> tuple[list[str], float, int]:
    import peft

    model = dshard.fully_shard(with_adapters())
    models.train("llama", model, lambda step: models.batch("llama", step, dist.get_rank()), 1)
    adapters = full_state_dict(model, select=lambda name: "lora_" in name, only_rank0=True)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=adapters)
    dist.barrier()
    back = peft.PeftModel.from_pretrained(models.build("llama"), folder).double()
    values = dict(back.named_parameters())
    apart = max(models.difference(values[name], models.full(p)) for name, p in model.named_parameters())
    return sorted(path.name for path in Path(folder).iterdir()), apart, len(adapters)


def test_saved_adapters_are_those_that_from_pretrained_reads(world: World, tmp_path: Path):
    first, second = world.run(save_and_load_adapters, str(tmp_path), timeout_s=TIMEOUT_S)
    assert "adapter_model.safetensors" in first[0]
    assert first[1] == second[1] == 0
    assert (first[2], second[2]) == (8, 0)


def save_sharded_values(folder: str) -> None:
    dshard.fully_shard(with_adapters()).save_pretrained(f"{folder}/{dist.get_rank()}")


def test_saving_adapters_without_full_values_raises_and_says_what_to_call(world: World, tmp_path: Path):
    for name, message in expect_error(world, save_sharded_values, str(tmp_path), timeout_s=TIMEOUT_S, grace_s=10.0):
        assert name == "StateError"
        assert "lora_A" in message
        assert "full_state_dict" in message


def merge() -> tuple[float, float, list[str], dict[str, float]]:
    """Merge adapters into the sharded weights, and train what comes out in full."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    inputs = models.batch("llama", 50, 0)
    model, plain = dshard.fully_shard(with_adapters()), with_adapters()
    before = models.logits_of("llama", model, inputs)
    merged, expected = model.merge_and_unload(), plain.merge_and_unload()
    after = models.logits_of("llama", merged, inputs)
    weights = dict(expected.named_parameters())
    apart = max(models.difference(models.full(p), weights[name].detach()) for name, p in merged.named_parameters())
    for parameter in [*merged.parameters(), *expected.parameters()]:
        parameter.requires_grad_(True)
    mine, both = functools.partial(models.batch, "llama"), functools.partial(models.together, "llama")
    found = models.train("llama", merged, lambda step: mine(step, rank), 3)
    wanted = models.train("llama", expected, lambda step: both(step, num_ranks), 3)
    kinds = sorted({type(p).__name__ for p in merged.parameters()})
    return models.difference(after, before), apart, kinds, models.worst(found, wanted)


def test_merged_adapters_leave_a_sharded_model_that_trains_on(world: World):
    for logits, weights, kinds, apart in world.run(merge, timeout_s=TIMEOUT_S):
        assert logits <= 1e-12
        assert weights <= 1e-12
        assert kinds == ["ShardedTensor"]
        assert max(apart.values()) <= 1e-5, apart
