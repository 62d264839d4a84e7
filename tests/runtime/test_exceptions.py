"""An exception that all ranks have in the middle of a step."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dshard.testing import WorldPool
from tests.models import mlp
from tests.twins import data, same_weights, shard_children, train, twins


class BoomError(Exception):
    """A failure in the middle of a step."""


def boom(*_: Any) -> Any:
    raise BoomError


def failing(where: str, model: Any) -> Iterator[None]:
    """Arms a failure; goes on after it."""
    if where == "forward":
        hook = model[2].register_forward_hook(boom)
    elif where == "forward of the last":
        hook = model[4].register_forward_pre_hook(boom)
    elif where == "backward":
        hook = model[2].weight.register_hook(boom)
    elif where == "first gradient":
        hook = model[4].bias.register_hook(boom)
    else:
        hook = model[0].register_full_backward_hook(boom)
    yield
    hook.remove()


def after_an_exception(where: str, reset: bool) -> int:
    plain, sharded = twins(mlp, shard_children)
    for m in (plain, sharded):
        train(m, 1)
        if where == "optimizer":
            optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
            optimizer.register_step_pre_hook(boom)
            m(data(3, 6)).sum().backward()
            with pytest.raises(BoomError):
                optimizer.step()
        else:
            armed = failing(where, m)
            next(armed)
            with pytest.raises(BoomError):
                m(data(3, 6).requires_grad_()).square().sum().backward()
            with contextlib.suppress(StopIteration):
                next(armed)
        if reset and m is sharded:
            m.reset_iter_state()
        m.zero_grad()
        train(m, 2)
    gathered: int = sharded._context().gathered_bytes
    same_weights(plain, sharded)
    return gathered


EXCEPTIONS = ["forward", "forward of the last", "backward", "first gradient", "module hook", "optimizer"]


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("where", EXCEPTIONS)
def test_a_step_after_an_exception_in_the_middle_of_one_is_a_normal_step(worlds: WorldPool, where, reset):
    gathered = worlds.run(2, after_an_exception, where, reset)
    assert gathered == [0, 0]
