"""Layers of `transformers` that keep less for backward train as in one process."""

from typing import Any

import pytest
import torch.distributed as dist

import dshard
from dshard.autograd import MODES, apply_checkpointing
from dshard.errors import StateError
from dshard.testing import World
from tests.interop import models
from tests.interop.test_training import TIMEOUT_S, TOLERANCE


def lists_of(model: Any) -> list[Any]:
    return [each for name, each in model.named_modules() if name.rpartition(".")[2] in ("layers", "block")]


def differences(name: str) -> dict[str, float]:
    """By mode, the largest difference from one process on all batches."""
    found = {}
    for mode in MODES:
        model = models.build(name)
        for module in model.modules():
            if hasattr(module, "config"):
                module.config.use_cache = False
        for layers in lists_of(model):
            apply_checkpointing([layers], mode, root=model)
        dshard.fully_shard(model)
        trained = models.train(name, model, lambda step: models.batch(name, step, dist.get_rank()))
        found[mode] = max(models.worst(trained, models.plain_run(name, dist.get_world_size())).values())
    return found


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mixtral", "t5"])
def test_models_train_as_in_one_process_whatever_their_layers_keep(world: World, name):
    for found in world.run(differences, name, timeout_s=TIMEOUT_S):
        assert list(found) == list(MODES)
        assert max(found.values()) <= TOLERANCE, found


def refused() -> list[str]:
    """A cache, and layers that transformers checkpoints."""
    told = []
    for checkpoints in (False, True):
        model = models.build("llama")
        with pytest.raises(StateError) as caught:  # noqa: PT012 - the one or the other raises
            if checkpoints:
                model.gradient_checkpointing_enable()
            apply_checkpointing(model.model.layers, "full", root=model)
            model(**models.batch("llama", 0, 0))
        told.append(str(caught.value))
    return told


def test_caches_and_layers_that_are_checkpointed_are_refused(world: World):
    for cache, checkpointed in world.run(refused, timeout_s=TIMEOUT_S):
        assert "Pass use_cache=False to the model" in cache
        assert checkpointed.startswith("model: a module is checkpointed once, but this one is already, by gradient_c")
