"""Shards that a backend with collectives of its own sends from one row: moved only where nobody loses sight of them."""

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import dshard
from dshard.testing import WorldPool
from dshard.units.unit import Unit
from tests.collectives.test_native_backends import native


def values_of_copies_after_the_move() -> list[float]:
    """Of a clone and a cast of a weight, after each of some writes to its shard that follow a move."""
    with native(), torch.no_grad():
        model: Any = dshard.fully_shard(nn.Linear(4, 4))
        model.weight.fill_(1.0)
        model.weight.fill_(2.0)
        copies = [model.weight.detach().clone(), model.weight.detach().double()]
        model(torch.ones(1, 4))
        found = []
        for value in (3.0, 4.0, 5.0):
            model.weight.to_local().fill_(value)
            found += [copy.full_tensor()[0, 0].item() for copy in copies]
        return found


def test_copies_from_before_the_move_keep_their_values(worlds: WorldPool):
    assert worlds.run(2, values_of_copies_after_the_move) == [[2.0] * 6] * 2


def other_memory() -> list[list[float]]:
    """What is sent, and then what a write gives, after a shard in its row was given other memory."""
    with native(), torch.no_grad():
        model: Any = dshard.fully_shard(nn.Linear(4, 4))
        model(torch.ones(1, 4))
        model.weight.to_local().data = torch.full((2, 4), 7.0)
        found = [model.weight.full_tensor()[:, 0].tolist()]
        model.weight.mul_(2.0)
        return [*found, model.weight.full_tensor()[:, 0].tolist()]


def test_a_local_shard_that_is_given_other_memory_is_sent_from_there(worlds: WorldPool):
    assert worlds.run(2, other_memory) == [[[7.0] * 4, [14.0] * 4]] * 2


HOLDERS: dict[str, Callable[[torch.Tensor], object]] = {
    "nobody": lambda t: None,
    "a tensor": lambda t: t,
    "a view": lambda t: t[0],
    "a storage": lambda t: t.untyped_storage(),
    "numpy": lambda t: t.numpy(),
    "dlpack": torch.from_dlpack,
    "a buffer": lambda t: memoryview(t.numpy()),
}


def moved(again: bool) -> list[str]:
    """Who held a shard and saw it move away: from where it was made, or `again` from the row that it lay in."""
    found = []
    for name, hold in HOLDERS.items():
        with native(), torch.no_grad():
            model: Any = dshard.fully_shard(nn.Linear(4, 4))
            if again:
                model(torch.ones(1, 4))
                model.bias.data = torch.zeros(4)
            held = hold(model.weight.to_local())
            address = model.weight.to_local().data_ptr()
            for _ in range(25):  # what a gather cannot move, the next one tries again
                model(torch.ones(1, 4))
                model.reshard()  # or the next step would take these copies, without a gather
                time.sleep(0.01)  # gloo's threads let go of what they sent a moment after `wait()`
            if model.weight.to_local().data_ptr() != address:
                found.append(name)
            del held
    return found


@pytest.mark.parametrize("again", [False, True])
def test_a_shard_is_moved_only_if_nobody_holds_its_memory(worlds: WorldPool, again):
    assert worlds.run(2, moved, again) == [["nobody"]] * 2


def unit_of(*layers: nn.Module) -> Unit:
    dshard.fully_shard(list(layers))
    layers[0](torch.ones(1, 8))
    unit: Unit = layers[0].weight.gather_source  # type: ignore[assignment]
    return unit


def num_storages(unit: Unit) -> int:
    return len({p.shard_storage.resolve().untyped_storage().data_ptr() for p in unit.params})


def after_moves(
    steps: Callable[[], object], storage: StorageWeakRef, unit: Unit, num_wanted: int, bound_s: float = 30.0
) -> tuple[bool, int]:
    """Whether nobody holds a storage any more, and in how many the shards lie, once gathers could move what they want.

    gloo's threads let go of what they sent a moment after `wait()`, and what they still hold is not moved: the next
    gather tries again. So `steps` must end with nothing gathered. All ranks take the same number of steps, for they
    agree on whether to go on.
    """
    deadline = time.monotonic() + bound_s
    while True:
        steps()
        time.sleep(0.01)
        is_done = storage.expired() and num_storages(unit) == num_wanted
        goes_on = torch.tensor(int(not is_done and time.monotonic() < deadline))
        torch.distributed.all_reduce(goes_on, torch.distributed.ReduceOp.MAX)
        if not goes_on:
            return storage.expired(), num_storages(unit)


def rows_after_double(num_converted: int) -> tuple[bool, int]:
    """Whether the old row is gone, and in how many the shards lie, once some of two layers have another dtype."""
    with native(), torch.no_grad():
        layers = nn.Linear(8, 8), nn.LayerNorm(8)
        unit = unit_of(*layers)
        ((_, row),) = unit.copies._rows._known.values()
        old = StorageWeakRef(row.row.untyped_storage())
        del row
        for layer in layers[2 - num_converted :]:
            layer.double()
        x = torch.ones(1, 8, dtype=layers[0].weight.dtype)

        def step() -> None:
            layers[0](x)
            unit.reshard()  # one of two layers has run: the next step would take these copies, without a gather

        return after_moves(step, old, unit, 3 - num_converted)


@pytest.mark.parametrize("num_converted", [1, 2])
def test_after_a_change_of_dtype_the_old_row_is_gone_and_each_bucket_has_one(worlds: WorldPool, num_converted):
    assert worlds.run(2, rows_after_double, num_converted) == [(True, 3 - num_converted)] * 2


def rows_after_a_child_was_converted(takes_gradients: bool) -> tuple[bool, int]:
    """The same, for a plain module below a sharded one: torch swaps its parameters for converted ones."""
    with native():
        model: Any = dshard.fully_shard(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))).requires_grad_(
            takes_gradients
        )
        model(torch.ones(1, 32))
        unit: Unit = model[0].weight.gather_source
        ((_, row),) = unit.copies._rows._known.values()
        old = StorageWeakRef(row.row.untyped_storage())
        del row
        model[1].double()

        def step() -> None:
            model[1](model[0](torch.ones(1, 32)).double())
            model.reshard()
            gc.collect()  # the converted parameters were units of their own for a moment

        step()
        return after_moves(step, old, unit, 2)


@pytest.mark.parametrize("takes_gradients", [False, True])
def test_the_old_row_goes_too_when_a_child_was_converted_alone(worlds: WorldPool, takes_gradients):
    assert worlds.run(2, rows_after_a_child_was_converted, takes_gradients) == [(True, 2)] * 2


def rows_beside_frozen_ones() -> list[tuple[int, int]]:
    """Rows and storages of a unit with a frozen parameter, after each of some steps."""
    with native():
        layers = nn.Linear(8, 8), nn.Linear(8, 8)
        layers[0].bias.requires_grad_(False)
        unit = unit_of(*layers)
        found = []
        for _ in range(3):
            layers[1](layers[0](torch.ones(1, 8))).sum().backward()
            found.append((len(unit.copies._rows._known), num_storages(unit)))
        return found


def test_a_frozen_parameter_leaves_the_row_in_use(worlds: WorldPool):
    torch.manual_seed(0)
    assert worlds.run(2, rows_beside_frozen_ones) == [[(1, 1)] * 3] * 2
