"""Between `save_pretrained` and `from_pretrained` of transformers, and dshard's files."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dshard
from dshard.interop import full_state_dict
from dshard.testing import World, expect_error
from tests.interop import models

TIMEOUT_S = 180.0


def back_and_forth(name: str, folder: str) -> tuple[list[str], float, float]:
    """Sharded to files to transformers, and to files to sharded."""
    model = dshard.fully_shard(models.build(name))
    dshard.save_safetensors(model, folder)
    if dist.get_rank() == 0:
        model.config.save_pretrained(folder)
    dist.barrier()
    original = type(model).__bases__[1]
    plain, info = original.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    weights = dict(plain.named_parameters())
    read = max(models.difference(weights[key].detach(), models.full(p)) for key, p in model.named_parameters())
    if dist.get_rank() == 0:
        plain.save_pretrained(f"{folder}/hf")
    dist.barrier()
    fresh = dshard.fully_shard(models.build(name, seed=1))
    dshard.load_safetensors(fresh, f"{folder}/hf")
    loaded = max(models.difference(models.full(p), weights[key].detach()) for key, p in fresh.named_parameters())
    return [key for key, value in info.items() if value], read, loaded


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mixtral", "t5", "clip"])
def test_a_model_goes_to_from_pretrained_and_back_unchanged(world: World, tmp_path: Path, name):
    for complaints, read, loaded in world.run(back_and_forth, name, str(tmp_path), timeout_s=TIMEOUT_S):
        assert complaints == []
        assert (read, loaded) == (0, 0)


def save_full_values(name: str, folder: str) -> tuple[list[str], float]:
    """`save_pretrained` with full values; what it writes of a plain model is the other folder."""
    import safetensors

    model = dshard.fully_shard(models.build(name))
    state = full_state_dict(model, only_rank0=True)
    if dist.get_rank() == 0:
        model.save_pretrained(f"{folder}/sharded", state_dict=state)
        models.build(name).save_pretrained(f"{folder}/plain")
    dist.barrier()
    files = [safetensors.safe_open(f"{folder}/{kind}/model.safetensors", "pt") for kind in ("sharded", "plain")]
    keys = [sorted(file.keys()) for file in files]
    same = all(torch.equal(files[0].get_tensor(key), files[1].get_tensor(key)) for key in keys[1])
    return keys[0] if keys[0] == keys[1] else [], 0.0 if same else 1.0


@pytest.mark.parametrize("name", ["llama_tied", "mixtral"])
def test_save_pretrained_of_full_values_writes_what_it_writes_of_the_plain_model(world: World, tmp_path: Path, name):
    for keys, apart in world.run(save_full_values, name, str(tmp_path), timeout_s=TIMEOUT_S):
        assert keys
        assert apart == 0
        assert any("experts.0.w1" in key for key in keys) == (name == "mixtral")


def load_other_names(folder: str) -> None:
    if dist.get_rank() == 0:
        models.build("mixtral").save_pretrained(folder)
    dist.barrier()
    dshard.load_safetensors(dshard.fully_shard(models.build("mixtral")), folder)


def test_files_with_an_architectures_older_names_raise_and_name_both(world: World, tmp_path: Path):
    for name, message in expect_error(world, load_other_names, str(tmp_path), timeout_s=TIMEOUT_S, grace_s=10.0):
        assert name == "CheckpointError"
        assert "experts.gate_up_proj" in message
        assert "experts.0.w1.weight" in message


def resize_and_train(name: str) -> tuple[set[str], dict[str, float]]:
    """Train, give the vocabulary more tokens, and train on; the same seed on all ranks for what is new."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model, plain = dshard.fully_shard(models.build(name)), models.build(name)
    for _ in range(2):
        found = models.train(name, model, lambda step: models.batch(name, step, rank), 2)
        expected = models.train(name, plain, lambda step: models.together(name, step, num_ranks), 2)
        for each in (model, plain):
            torch.manual_seed(3)
            each.resize_token_embeddings(models.VOCAB + 7)
    return {type(p).__name__ for p in model.parameters()}, models.worst(found, expected)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "t5"])
def test_a_vocabulary_that_is_resized_after_sharding_trains_on_as_in_one_process(world: World, name):
    for kinds, apart in world.run(resize_and_train, name, timeout_s=TIMEOUT_S):
        assert kinds == {"ShardedTensor"}
        assert max(apart.values()) <= 1e-5, apart
