"""State dicts of optimizers go on in a new model and optimizer."""

import copy
import inspect
import io
from typing import Any

import pytest
import torch

from dshard.testing import WorldPool
from tests.optimizer.kit import KINDS, build, check, differences, make, plain_step, shard, sharded_step, weights


def round_trip(name: str, mode: dict[str, Any], saved_by: str) -> list[str]:
    """Two steps, a state dict into a new model and optimizer, two steps: as four steps without a break."""
    kind = KINDS[name]
    needs_closure = name == "LBFGS"
    plain = build(kind.model)
    reference = make(name, mode, plain.parameters())
    sharded = shard(build(kind.model))
    optimizer = make(name, mode, sharded.parameters())
    for step in range(2):
        plain_step(plain, reference, step, needs_closure=needs_closure)
        sharded_step(sharded, optimizer, step, needs_closure=needs_closure)
    if saved_by == "plain":
        states = copy.deepcopy(plain.state_dict()), copy.deepcopy(reference.state_dict())
    elif saved_by == "deepcopy":
        states = copy.deepcopy(sharded.state_dict()), copy.deepcopy(optimizer.state_dict())
    else:
        buffer = io.BytesIO()
        torch.save((sharded.state_dict(), optimizer.state_dict()), buffer)
        buffer.seek(0)
        states = torch.load(buffer, weights_only=False)
    again = shard(build(kind.model))
    resumed = make(name, mode, again.parameters())
    again.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    for step in range(2, 4):
        plain_step(plain, reference, step, needs_closure=needs_closure)
        sent = sharded_step(again, resumed, step, needs_closure=needs_closure)
        if kind.is_elementwise and sent:
            return [f"step {step} communicates: {sent}"]
    return differences(weights(again), weights(plain), kind.tolerance)


@pytest.mark.parametrize("saved_by", ["plain", "deepcopy", "torch.save"])
@pytest.mark.parametrize("name", KINDS)
def test_an_optimizers_state_dict_continues_in_a_new_model_as_without_a_break(worlds: WorldPool, name, saved_by):
    known = inspect.signature(getattr(torch.optim, name)).parameters
    options = () if saved_by == "deepcopy" else ("foreach", "fused")
    for mode in [{}, *({option: True} for option in options if option in known)]:
        check(worlds, 2, "state dicts", round_trip, name, mode, saved_by)
    check(worlds, 3, "state dicts", round_trip, name, {}, saved_by)
