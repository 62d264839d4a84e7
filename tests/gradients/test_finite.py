"""`set_check_gradients`: NaN and infinity are told with the rank and the parameter where they came up, on all ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dshard
from dshard.errors import DivergenceError
from dshard.testing import WorldPool, expect_error


def build(strategy: str) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    return dshard.fully_shard(model, strategy=strategy)


def train_on_a_bad_batch(strategy: str, bad: float) -> None:
    model = build(strategy)
    model.set_check_gradients(True)
    model(torch.ones(2, 4)).sum().backward()
    hidden = model[:2](torch.ones(2, 4))
    if dist.get_rank() == 1:
        hidden.register_hook(lambda grad: grad * bad)
    model[2](hidden).sum().backward()


@pytest.mark.parametrize("strategy", ["full", "ddp", "zero1", "hybrid(1)"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_all_ranks_name_the_rank_and_the_parameter_where_a_gradient_was_not_finite_first(
    worlds: WorldPool, strategy, bad
):
    for kind, text in expect_error(worlds.get_world(2), train_on_a_bad_batch, strategy, bad):
        assert kind == "DivergenceError"
        assert "the gradients of every rank must be finite" in text
        assert "on rank 1 that of 1." in text
        assert "rank 0" not in text


def train_again(how: str) -> list[float]:
    model = build("full")
    model.set_check_gradients(True)
    if how == "turned off":
        model.set_check_gradients(False)
    if how == "after an error":
        with pytest.raises(DivergenceError):
            (model(torch.ones(2, 4)).sum() * float("nan")).backward()
        model.zero_grad()
    scale = float("nan") if how == "turned off" else 1.0
    (model(torch.ones(2, 4)).sum() * scale).backward()
    return [p.grad.full_tensor().sum().item() for p in model.parameters()]


def test_it_is_off_unless_asked_for_and_finite_gradients_are_what_they_were(worlds: WorldPool):
    assert all(value != value for values in worlds.run(2, train_again, "turned off") for value in values)
    known = worlds.run(2, train_again, "on")
    assert worlds.run(2, train_again, "after an error") == known
