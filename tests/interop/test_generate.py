"""`generate()` of a sharded model gives what the plain model gives, with nothing registered."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dshard
from dshard.testing import World
from tests.interop import models

TIMEOUT_S = 180.0
WAYS: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": True, "top_k": 20}, {"num_beams": 3}]


def prompt(name: str, seed: int, length: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, models.VOCAB, (2, length), generator=generator)
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 32, generator=generator, dtype=torch.float64)}
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def generated(name: str, model: nn.Module, options: dict[str, Any], seed: int = 0) -> Tensor:
    model.eval()
    torch.manual_seed(7)
    options = {"max_new_tokens": 6, "pad_token_id": 0, **options}
    tokens = model.generate(**prompt(name, seed), **options)
    model.train()
    return tokens


def generate_both(name: str) -> list[tuple[Tensor, Tensor]]:
    """Tokens of the plain model and of the sharded one, for each way of choosing them."""
    plain, sharded = models.build(name), dshard.fully_shard(models.build(name))
    return [(generated(name, plain, options), generated(name, sharded, options)) for options in WAYS]


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "mixtral", "t5", "whisper"])
def test_a_sharded_model_generates_the_tokens_of_the_plain_one(world: World, name):
    for results in world.run(generate_both, name, timeout_s=TIMEOUT_S):
        for way, (plain, sharded) in zip(WAYS, results, strict=True):
            assert torch.equal(sharded, plain), way


def shifted(batches: Any, name: str, first: int, who: int, step: int) -> dict[str, Tensor]:
    return batches(name, first + step, who)


def generate_between_steps(name: str) -> tuple[bool, dict[str, float]]:
    """Generate after each of some steps; compare tokens and weights with a plain model's."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sharded, plain = dshard.fully_shard(models.build(name)), models.build(name)
    same = True
    for first in (0, 10, 20):
        mine = functools.partial(shifted, models.batch, name, first, rank)
        both = functools.partial(shifted, models.together, name, first, num_ranks)
        found = models.train(name, sharded, mine, 1)
        expected = models.train(name, plain, both, 1)
        same &= torch.equal(generated(name, sharded, {}), generated(name, plain, {}))
    return same, models.worst(found, expected)


def test_generating_in_the_middle_of_training_changes_nothing(world: World):
    for same, apart in world.run(generate_between_steps, "llama", timeout_s=TIMEOUT_S):
        assert same
        assert max(apart.values()) <= 1e-5, apart


def generate_until_the_end(name: str) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Each rank has a prompt of its own and stops when its own sequences have ended; then training goes on."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sharded, plain = dshard.fully_shard(models.build(name)), models.build(name)
    free = generated(name, plain, {"max_new_tokens": 8}, seed=0)
    options = {"max_new_tokens": 8, "eos_token_id": [int(t) for t in set(free[:, 5].tolist())]}
    both = generated(name, sharded, options, seed=rank), generated(name, plain, options, seed=rank)
    found = models.train(name, sharded, lambda step: models.batch(name, step, rank), 1)
    expected = models.train(name, plain, lambda step: models.together(name, step, num_ranks), 1)
    return *both, models.worst(found, expected)


def test_ranks_whose_sequences_end_at_different_lengths_stay_in_step(world: World):
    results = world.run(generate_until_the_end, "llama", timeout_s=TIMEOUT_S)
    assert len({plain.shape for _, plain, _ in results}) == 2, "both ranks stopped at the same length"
    for sharded, plain, apart in results:
        assert torch.equal(sharded, plain)
        assert max(apart.values()) <= 1e-5, apart
