"""State dicts of sharded modules, as they are saved and loaded by hand."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dshard
from dshard.testing import WorldPool
from tests.models import COLUMNS, ROWS, mlp
from tests.twins import same_weights, shard_children, twins


def load_everything() -> None:
    plain, sharded = twins()
    state = {name: torch.full_like(p, 0.5).add_(i) for i, (name, p) in enumerate(plain.state_dict().items())}
    for m in (plain, sharded):
        assert not m.load_state_dict(state).missing_keys
    same_weights(plain, sharded)
    with pytest.raises(RuntimeError, match="Missing key"):
        sharded.load_state_dict({"head.weight": state["head.weight"]})
    kept = list(sharded.parameters())
    sharded.load_state_dict({name: p * 2 for name, p in state.items()}, assign=True)
    plain.load_state_dict({name: p * 2 for name, p in state.items()})
    assert all(p is q for p, q in zip(kept, sharded.parameters(), strict=True))
    same_weights(plain, sharded)
    with torch.no_grad():  # the merge of a low-rank adapter
        for m in (plain, sharded):
            up, down = torch.ones(COLUMNS, 2), torch.ones(2, COLUMNS)
            m.trunk[0].weight += up @ down
            m.trunk[1].weight.data += (up @ down) * 0.5
            m.head.weight.copy_(torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS))
    same_weights(plain, sharded)


def test_full_state_dicts_merges_and_copies_are_taken_as_by_a_plain_module(worlds: WorldPool):
    worlds.run(2, load_everything)


def saved_state(kind: str) -> None:
    plain, sharded = twins(mlp, shard_children)
    assert list(plain.state_dict()) == list(sharded.state_dict())
    file = io.BytesIO()
    if kind == "sharded":  # each rank's own shards
        torch.save(sharded.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    elif kind == "full":  # loads anywhere
        torch.save({name: t.full_tensor() for name, t in sharded.state_dict().items()}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        plain.load_state_dict(loaded)
    else:
        loaded = {name: copy.deepcopy(t) for name, t in sharded.state_dict().items()}
    with torch.no_grad():
        for p in sharded.parameters():
            p.zero_()
    sharded.load_state_dict(loaded)
    same_weights(plain, sharded)


@pytest.mark.parametrize("kind", ["sharded", "full", "deepcopy"])
def test_a_state_dict_is_saved_and_loaded_sharded_and_full(worlds: WorldPool, kind):
    worlds.run(2, saved_state, kind)


def read_what_another_wrote(path: Any) -> None:
    model = dshard.fully_shard(nn.Linear(4, 4), sync="broadcast")
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    if dist.get_rank() == 0:
        model.load_state_dict(torch.load(path))
        return
    with pytest.raises(dshard.StateError, match=r"weight: .* but rank 0 of 2 did, and this is rank 1 of 2"):
        torch.load(path)


def test_a_pickled_shard_is_read_by_its_rank_alone(worlds: WorldPool, tmp_path):
    worlds.run(2, read_what_another_wrote, tmp_path / "state.pt")
