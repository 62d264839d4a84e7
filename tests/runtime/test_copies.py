"""Copies of a sharded model."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import dshard
from dshard import ShardedTensor
from dshard.testing import WorldPool
from tests.models import mlp
from tests.twins import same_weights, shard_children, train, twins


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "torch.save": through_a_file,
}


def copied(kind: str, after: str) -> None:
    plain, sharded = twins(mlp, shard_children)
    pair = []
    for m in (plain, sharded):
        if after == "a step":
            train(m)
        m.zero_grad()
        copied_model = COPIES[kind](m)
        assert not {id(p) for p in copied_model.parameters()} & {id(p) for p in m.parameters()}
        assert list(copied_model.state_dict()) == list(m.state_dict())
        with torch.no_grad():
            for p in m.parameters():
                p.mul_(2)  # of the original alone
        train(copied_model)
        pair.append(copied_model)
    assert isinstance(pair[1], dshard.FSDPModule)
    assert all(isinstance(p, ShardedTensor) for p in pair[1].parameters())
    same_weights(*pair)
    same_weights(plain, sharded)


@pytest.mark.parametrize("after", ["sharding", "a step"])
@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_of_a_model_is_independent_and_trains_as_the_copy_of_a_plain_one(worlds: WorldPool, kind, after):
    worlds.run(2, copied, kind, after)
