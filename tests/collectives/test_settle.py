"""The check of backends with collectives of their own: whom it asks, when, what it keeps, and what an error leaves."""

import contextlib
import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import dshard
from dshard import collectives
from dshard.collectives import ShardGroup, _c10d, ledger
from dshard.collectives.divergence import Kind
from dshard.testing import RemoteRankError, World, WorldPool, expect_error
from tests.collectives.test_native_backends import native


def linear(size: int, group: Any = None) -> Any:
    torch.manual_seed(0)
    return dshard.fully_shard(nn.Linear(size, size), mesh=DeviceMesh.from_group(group or dist.group.WORLD, "cpu"))


def gradient_beside_a_model_of_two_ranks() -> list[float]:
    """All ranks run a forward, two of them a step of another model, and all the backward."""
    with native():
        pair = dist.new_group([0, 1])
        model = linear(4)
        other = linear(6, pair) if dist.get_rank() < 2 else None
        loss = model(torch.ones(1, 4)).sum()
        if other is not None:
            other(torch.ones(1, 6)).sum().backward()
        loss.backward()
        return model.weight.grad.full_tensor()[0].tolist()


def test_a_backward_asks_only_the_ranks_of_its_own_model(worlds: WorldPool):
    assert worlds.run(3, gradient_beside_a_model_of_two_ranks) == [[1.0] * 4] * 3


def gradient_after_a_silent_backward() -> tuple[int, list[float]]:
    """The first rank alone runs a backward that communicates nothing: collectives in it, and the next gradient."""
    with native():
        torch.manual_seed(0)
        model: Any = dshard.fully_shard(nn.Linear(4, 4), reshard_after_forward=False)
        model.set_reshard_after_backward(False)
        loss = model(torch.ones(1, 4)).sum()
        model.set_requires_gradient_sync(False)
        with dshard.CommTrace() as trace:
            if dist.get_rank() == 0:
                loss.backward()
        model.set_requires_gradient_sync(True)
        model(torch.ones(1, 4)).sum().backward()
        return trace.calls(), model.weight.grad.full_tensor()[0].tolist()


def test_a_backward_that_communicated_nothing_asks_nobody(worlds: WorldPool):
    assert worlds.run(2, gradient_after_a_silent_backward) == [(0, [1.5] * 4)] * 2


def settle_of_two_groups() -> tuple[str, list[int]]:
    """The ranks of the first group differ; gives what is said, and what is still to be compared."""
    with native():
        pair = dist.new_group([0, 1])
        members = [group for group in (pair, dist.group.WORLD) if dist.get_rank(group) >= 0]
        groups = [ShardGroup(group, torch.device("cpu")) for group in members]
        for group in groups:
            ledger.note(group, Kind.GATHER, "both", 0)
        ledger.note(groups[0], Kind.GATHER, f"rank {min(dist.get_rank(), 1)}" if len(groups) == 2 else "all", 0)
        if len(groups) == 2:
            ledger.note(groups[1], Kind.GATHER, "all", 0)
        try:
            collectives.settle(groups)
            error = ""
        except dshard.DivergenceError as caught:
            error = str(caught)
        return error.partition(":")[0], [collectives.num_noted(group) for group in groups]


def test_ranks_that_are_apart_in_one_group_answer_those_of_the_next_before_they_raise(worlds: WorldPool):
    assert worlds.run(3, settle_of_two_groups) == [("'rank 0'", [0, 0]), ("'rank 1'", [0, 0]), ("", [0])]


def copies_after_an_error() -> tuple[str, int]:
    """What a forward says after a write on one rank, and the bytes of copies it leaves; a frozen bias keeps them."""
    with native():
        model = linear(4)
        model.bias.requires_grad_(False)
        if dist.get_rank() == 1:
            with torch.no_grad():
                model.weight.mul_(2.0)
        try:
            model(torch.ones(1, 4))
        except dshard.DivergenceError as error:
            return str(error).partition(",")[0], model._context().gathered_bytes
        return "", -1


def test_an_error_at_the_end_of_a_forward_leaves_nothing_gathered(worlds: WorldPool):
    error = "'Linear': all ranks must write the same to a sharded tensor"
    assert worlds.run(2, copies_after_an_error) == [(error, 0)] * 2


class Gather:
    """As torch's `AllGather` objects are."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        return _c10d.all_gather_flat(output_tensor, input_tensor, group)


def backwards_in_other_orders(how: str) -> str:
    """What is said where the ranks run the backwards of two frozen layers, which only gather, in different orders."""
    with native() if how == "few" else contextlib.nullcontext():
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}).requires_grad_(False)
        for layer in model.values():
            dshard.fully_shard(layer, reshard_after_forward=2 if how == "few" else True)
        dshard.fully_shard(model)
        if how == "custom":
            for layer in model.values():
                layer.set_custom_all_gather(Gather())
        x = torch.ones(1, 4, requires_grad=True)
        losses = {name: layer(x).sum() for name, layer in model.items()}
        try:
            for name in sorted(losses, reverse=dist.get_rank() % 2 == 1):
                losses[name].backward()
        except dshard.DivergenceError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(("how", "num_ranks"), [("custom", 2), ("few", 4)])
def test_gathers_among_few_and_those_of_the_users_own_are_compared_too(worlds: WorldPool, how, num_ranks):
    errors = worlds.get_world(num_ranks).run(backwards_in_other_orders, how)
    assert all("all ranks must communicate about the same thing" in error for error in errors)
    assert all("rank 1 is at 'b" in error for error in errors[::2])
    assert all("rank 0 is at 'a" in error for error in errors[1::2])


def group_after_its_model() -> tuple[bool, list[float]]:
    """Whether a process group that was destroyed is gone, and a gradient in the next group."""
    with native():
        group = dist.new_group([0, 1])
        model = linear(4, group)
        with torch.no_grad():
            model(torch.ones(1, 4))
        known = weakref.ref(group)
        dist.destroy_process_group(group)
        del model, group
        gc.collect()
        is_gone = known() is None
        model = linear(4)
        model(torch.ones(1, 4)).sum().backward()
        return is_gone, model.weight.grad.full_tensor()[0].tolist()


def test_what_was_noted_of_a_group_does_not_keep_it_alive(worlds: WorldPool):
    assert worlds.run(2, group_after_its_model) == [(True, [1.0] * 4)] * 2


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def step_under_another_default_device(is_native: bool, diverges: bool) -> list[float]:
    with native() if is_native else contextlib.nullcontext():
        model = linear(4)
        x = torch.ones(1, 4)
        with default_device("meta"):
            if diverges and dist.get_rank() == 1:
                with torch.no_grad():
                    model.bias.mul_(2.0)
            model.unshard()
            collectives.settle([model.weight.shard_group])
            model(x).sum().backward()
        return model.weight.grad.full_tensor()[0].tolist()


@pytest.mark.parametrize("is_native", [False, True])
def test_a_step_and_its_check_run_under_another_default_device(worlds: WorldPool, is_native):
    assert worlds.run(2, step_under_another_default_device, is_native, False) == [[1.0] * 4] * 2
    errors = expect_error(worlds.get_world(2), step_under_another_default_device, is_native, True)
    assert all(kind == "DivergenceError" and "must write the same to a sharded tensor" in text for kind, text in errors)


def entries_of_a_long_evaluation(at: int) -> list[int]:
    """Entries before and after a settlement of 20,000 collectives, of which the one at `at` differs between ranks."""
    with native():
        group = ShardGroup(dist.group.WORLD, torch.device("cpu"))
        for i in range(20_000):
            ledger.note(group, Kind.GATHER, "unit", dist.get_rank() << 8 if i == at else 0)
        before = collectives.num_noted(group)
        collectives.settle([group])
        return [before, collectives.num_noted(group)]


def test_a_group_that_nobody_settles_keeps_a_bounded_number_of_entries(worlds: WorldPool):
    assert worlds.run(2, entries_of_a_long_evaluation, -1) == [[20_000 - (1 << 14) + 1, 0]] * 2


@pytest.mark.parametrize(
    ("at", "text"), [(5, "something ahead of it"), (19_000, "'unit': all ranks must write the same")]
)
def test_what_differs_among_entries_is_found_whether_they_were_folded_or_not(worlds: WorldPool, at, text):
    errors = expect_error(worlds.get_world(2), entries_of_a_long_evaluation, at)
    assert all(kind == "DivergenceError" and text in message for kind, message in errors)


def host_that_waits_for_a_device() -> None:
    with native():
        model = linear(4)
        model(torch.ones(1, 4)).sum().backward()
        ledger.note(model.weight.shard_group, Kind.GATHER, f"blocks.{dist.get_rank()}", 0)
        time.sleep(60)  # as in `loss.item()`


def world_that_waits_for_devices() -> None:
    """The ranks have begun to gather different units, and their hosts wait for what never comes."""
    with World(2, grace_s=15.0) as world, pytest.raises(RemoteRankError, match="died with exit code 1"):
        world.run(host_that_waits_for_a_device)


@pytest.mark.slow
def test_a_process_whose_device_waits_for_ever_ends_and_names_both():
    code = f"from {__name__} import world_that_waits_for_devices as run; run()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    for rank in range(2):
        line = next(line for line in done.stderr.splitlines() if line.startswith(f"'blocks.{rank}': all ranks must"))
        assert f"rank {1 - rank} is at 'blocks.{1 - rank}'" in line
        assert line.count("test_settle.py:") == 2


def settle_after_the_end_of_a_rank() -> None:
    """Rank 1 has ended its program well where rank 0 still compares: the device has nothing to say of that."""
    with native():
        group = ShardGroup(dist.group.WORLD, torch.device("cpu"))
        for number in range(2):
            if number and dist.get_rank() == 1:
                os._exit(0)
            ledger.note(group, Kind.GATHER, f"unit {number}", 0)
            collectives.settle([group])


def test_who_waits_for_the_host_of_a_rank_that_has_ended_names_it():
    with World(2, grace_s=20.0) as world, pytest.raises(RemoteRankError) as told:
        world.run(settle_after_the_end_of_a_rank)
    assert "RankLostError: the comparison of what ranks did up to 'unit 1'" in str(told.value)
    assert "rank 1 (pid" in str(told.value)
