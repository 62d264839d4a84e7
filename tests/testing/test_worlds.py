"""The kit's own tests: a persistent world reports, survives and bounds what its ranks do."""

import os
import time
import warnings
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import dshard
from dshard.testing import RemoteRankError, World, WorldPool, expect_error
from dshard.testing.strategies import TensorCase, tensor_cases


def rank_and_args(*args, **kwargs):
    return dist.get_rank(), args, kwargs


def process_id():
    return os.getpid()


def num_threads():
    return torch.get_num_threads()


def sum_of_ranks(scale):
    value = torch.full((3,), float(dist.get_rank() + 1)) * scale
    dist.all_reduce(value)
    return value


def full_sum(case):
    return case.full().double().sum() if case.dtype != torch.complex64 else case.full().sum()


def fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"wrong on purpose: {rank}")
    return rank


def fail_while_peers_wait(rank):
    if dist.get_rank() == rank:
        raise ValueError("left the others alone")
    dist.barrier()


def fail_everywhere(message, issued_by=-1):
    if dist.get_rank() == issued_by:
        dist.all_reduce(torch.ones(4), async_op=True)
    raise KeyError(message)


def hang_on(rank):
    while dist.get_rank() == rank:
        time.sleep(0.05)


def die_on(rank):
    if dist.get_rank() == rank:
        os._exit(7)
    return rank


def warn():
    warnings.warn("look out", UserWarning, stacklevel=2)


def unpicklable():
    return lambda: None


def negative_sum(numbers):
    assert sum(numbers) < 100


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_results_come_back_in_rank_order(worlds: WorldPool, num_ranks):
    results = worlds.run(num_ranks, rank_and_args, 1, "two", key=3)
    assert results == [(rank, (1, "two"), {"key": 3}) for rank in range(num_ranks)]


def test_ranks_are_joined_by_a_process_group(worlds: WorldPool):
    for value in worlds.run(3, sum_of_ranks, 2.0):
        assert torch.equal(value, torch.full((3,), 12.0))


def test_ranks_persist_and_have_one_thread(worlds: WorldPool):
    first = worlds.run(2, process_id)
    assert worlds.run(2, process_id) == first
    assert len({*first, os.getpid()}) == 3
    assert worlds.run(2, num_threads) == [1, 1]


def test_a_failure_names_rank_type_text_and_place(worlds: WorldPool):
    with pytest.raises(RemoteRankError, match=r"fail_on: rank 1 of 2 raised ValueError: wrong on purpose: 1") as info:
        worlds.run(2, fail_on, 1)
    assert info.value.rank == 1
    assert info.value.type_name == "ValueError"
    assert "test_worlds.py" in info.value.remote_traceback
    assert isinstance(info.value, AssertionError)


def test_the_world_is_new_after_a_failure(worlds: WorldPool):
    before = worlds.run(2, process_id)
    with pytest.raises(RemoteRankError):
        worlds.run(2, fail_on, 0)
    assert not worlds.get_world(2).is_running
    assert not set(worlds.run(2, process_id)) & set(before)


def test_peers_that_wait_for_a_failed_rank_are_reported_with_their_stacks(worlds: WorldPool):
    with pytest.raises(RemoteRankError, match="left the others alone") as info:
        worlds.run(2, fail_while_peers_wait, 1)
    assert info.value.rank == 1
    assert "also rank 0 of 2 did not answer within 1 s of the first failure" in str(info.value)
    assert "fail_while_peers_wait" in str(info.value).split("also rank 0")[1]


def test_a_hang_is_bounded_and_says_where(worlds: WorldPool):
    worlds.run(2, rank_and_args)  # imports what it needs, which may take longer than the bound below
    with pytest.raises(RemoteRankError, match=r"hang_on: rank 1 of 2 did not answer within 1 s") as info:
        worlds.run(2, hang_on, 1, timeout_s=1.0)
    assert "in hang_on" in info.value.remote_traceback
    assert worlds.run(2, rank_and_args) == [(0, (), {}), (1, (), {})]


def test_a_dead_rank_is_reported_with_its_exit_code(worlds: WorldPool):
    with pytest.raises(RemoteRankError, match="rank 0 of 2 died with exit code 7"):
        worlds.run(2, die_on, 0)
    assert worlds.run(2, sum_of_ranks, 1.0)[0][0] == 3


def test_a_rank_that_died_between_calls_is_reported(worlds: WorldPool):
    pid = worlds.run(2, process_id)[1]
    os.kill(pid, 9)
    with pytest.raises(RemoteRankError, match="rank 1 of 2 died with exit code -9"):
        worlds.run(2, process_id)


class Failing(nn.Module):
    def forward(self, x):
        raise ValueError("wrong on purpose")


def catch_on(rank):
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    model = dshard.fully_shard(nn.Sequential(Failing(), nn.Linear(2, 2)), mesh=mesh)
    if dist.get_rank() == rank:
        with suppress(ValueError):
            model(torch.ones(2, 2))
    return os.getpid()


def test_ranks_are_new_after_one_alone_has_caught_an_exception_in_any_process_group(worlds: WorldPool):
    before = worlds.run(2, catch_on, 1)
    assert not set(worlds.run(2, process_id)) & set(before)


def test_what_cannot_be_sent_is_a_type_error(worlds: WorldPool):
    with pytest.raises(TypeError, match="must be a module-level function"):
        worlds.run(2, lambda: None)


def test_a_result_that_cannot_be_sent_is_reported(worlds: WorldPool):
    with pytest.raises(RemoteRankError, match="unpicklable"):
        worlds.run(1, unpicklable)


def test_warnings_are_errors_on_the_ranks_if_they_are_here(worlds: WorldPool):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert expect_error(worlds.get_world(2), warn) == [("UserWarning", "look out")] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert worlds.run(2, warn) == [None, None]


def test_expect_error_keeps_a_world_whose_ranks_are_in_step(worlds: WorldPool):
    before = worlds.run(2, process_id)
    assert expect_error(worlds.get_world(2), fail_everywhere, "gone") == [("KeyError", "'gone'")] * 2
    assert worlds.run(2, process_id) == before


def test_expect_error_restarts_a_world_that_is_out_of_step(worlds: WorldPool):
    before = worlds.run(2, process_id)
    assert expect_error(worlds.get_world(2), fail_everywhere, "gone", issued_by=0) == [("KeyError", "'gone'")] * 2
    assert not set(worlds.run(2, process_id)) & set(before)


def test_expect_error_wants_an_error_on_every_rank(worlds: WorldPool):
    with pytest.raises(AssertionError, match=r"fail_on: every rank must raise, but ranks \[0\] returned. rank 1 of 2"):
        expect_error(worlds.get_world(2), fail_on, 1)


def test_a_world_is_a_context_and_can_start_again():
    with World(1) as world:
        first = world.run(process_id)
    assert not world.is_running
    try:
        assert world.run(process_id) != first
    finally:
        world.close()


def test_a_world_needs_a_rank():
    with pytest.raises(ValueError, match="num_ranks must be an integer of at least 1, but it is 0"):
        World(0)


@given(case=tensor_cases(max_ranks=3))
def test_all_ranks_get_the_same_example(worlds: WorldPool, case: TensorCase):
    full = case.full()
    assert full.shape == case.shape
    assert full.dtype == case.dtype
    assert full.is_contiguous() or not case.contiguous
    for value in worlds.run(case.num_ranks, full_sum, case):
        assert torch.equal(value, full_sum(case))


def test_a_failure_on_a_rank_shrinks(worlds: WorldPool):
    @settings(phases=(Phase.generate, Phase.shrink))
    @given(st.lists(st.sampled_from((0, 50)), max_size=3))  # few, for each that fails takes a new world
    def fails(numbers):
        smallest.append(numbers)
        worlds.run(1, negative_sum, numbers)

    smallest: list[list[int]] = []
    with pytest.raises(RemoteRankError):
        fails()
    assert smallest[-1] == [50, 50]
