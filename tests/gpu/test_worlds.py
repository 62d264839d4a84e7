"""Worlds of NCCL ranks, on one device or several; the same bodies run over gloo where there is none.

Each is held against something that is right without it: FSDP2, a world that waits after each call, what was saved.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch

from dshard.testing import RemoteRankError, World, expect_error
from tests.crossings import oracle, program
from tests.crossings.comparing import differences
from tests.crossings.covering import Row, covering_array
from tests.crossings.factors import CONSTRAINTS, FACTORS, NUM_MAIN, default_row, name_of, num_ranks_of
from tests.gpu import ranks, trainings
from tests.pools import RestedPool

DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.slow)]
Run = Callable[..., list[Any]]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pool() -> Iterator[RestedPool]:
    with RestedPool() as pool:
        yield pool


@pytest.fixture
def run(pool: RestedPool, device: str) -> Run:
    """Runs a function on ranks of the device: (number of ranks, function, further arguments)."""
    return lambda num, fn, *args: pool.run(num, ranks.call, device, fn, *args, timeout_s=120.0)


@pytest.mark.parametrize("name", trainings.SETTINGS)
def test_losses_are_those_of_fsdp2(run: Run, device: str, name: str):
    if name == "offloaded" and device == "cpu":
        pytest.skip("FSDP2 offloads to the CPU from another device")
    expected = run(2, trainings.losses, "FSDP2", name)
    for own, other in zip(run(2, trainings.losses, "dshard", name), expected, strict=True):
        assert own == pytest.approx(other, rel=trainings.SETTINGS[name].rel)


def test_losses_of_a_model_of_transformers_are_those_of_fsdp2(run: Run):
    pytest.importorskip("transformers")
    expected = run(2, trainings.hf_llama, "FSDP2")
    for own, other in zip(run(2, trainings.hf_llama, "dshard"), expected, strict=True):
        assert own == pytest.approx(other, rel=1e-3)


def test_states_of_8_bits_are_those_of_plain_parameters(run: Run):
    run(2, trainings.states_of_8_bits)


@pytest.mark.parametrize("switches", [False, True])
def test_strategies_give_the_same_bits(run: Run, switches: bool):
    for weights in run(2, partial(trainings.strategies, switches=switches)):
        for name, own in weights.items():
            assert all(map(torch.equal, own, weights["full"])), name


@pytest.mark.parametrize(("saving", "loading"), [(1, 2), (2, 4), (4, 1)])
def test_a_checkpoint_loads_on_another_number_of_ranks(run: Run, tmp_path, saving: int, loading: int):
    expected = run(saving, trainings.save, tmp_path / "saved")[0]
    assert len(expected) > 10
    for found in run(loading, trainings.load, tmp_path / "saved"):
        assert all(map(torch.equal, found, expected))


def test_a_host_that_runs_ahead_trains_as_one_that_waits(run: Run):
    expected = run(2, partial(trainings.stressed, num_steps=200, synchronizes=True))
    for own, other in zip(
        run(2, partial(trainings.stressed, num_steps=200, synchronizes=False)), expected, strict=True
    ):
        assert all(map(torch.equal, own, other))


def test_a_forward_in_a_stream_of_the_programs_own_gives_the_same_bits(run: Run):
    expected = run(2, partial(trainings.in_two_streams, beside=False))
    for own, other in zip(run(2, partial(trainings.in_two_streams, beside=True)), expected, strict=True):
        assert all(map(torch.equal, own, other))


@pytest.mark.parametrize("method", trainings.MEMORIES)
def test_buffers_in_memory_that_a_backend_knows_change_no_bit(run: Run, device: str, method: str):
    expected = run(2, partial(trainings.in_memory, method=""))
    for (own, told), (other, _) in zip(run(2, partial(trainings.in_memory, method=method)), expected, strict=True):
        assert all(map(torch.equal, own, other))
        if device == "cuda" and told:
            pytest.skip(told[0])  # this machine has no such memory: nothing was shown
        assert [f"{method}: has no effect" in text for text in told] == [True] * (device == "cpu")


def test_ranks_that_run_blocks_in_another_order_all_raise_and_name_both(device: str):
    with World(2, group_timeout_s=ranks.TIMEOUT_S, grace_s=60.0) as world:
        told = expect_error(world, ranks.call, device, trainings.other_order, timeout_s=120.0)
    assert [name for name, _ in told] == ["DivergenceError"] * 2
    for _, text in told:
        assert "blocks.0" in text
        assert "blocks.1" in text


def test_ranks_of_which_one_runs_a_block_alone_all_raise(device: str):
    with World(2, group_timeout_s=ranks.TIMEOUT_S, grace_s=60.0) as world:
        told = expect_error(world, ranks.call, device, trainings.forward_of_one_block, timeout_s=120.0)
    assert [name for name, _ in told] == ["DivergenceError"] * 2
    for rank, (_, text) in enumerate(told):
        assert f"rank {1 - rank} is at '{'20'[rank]}'" in text


def test_who_waits_for_a_rank_that_was_killed_names_it(device: str):
    with World(2, group_timeout_s=ranks.TIMEOUT_S, grace_s=60.0) as world, pytest.raises(RemoteRankError) as told:
        world.run(ranks.call, device, trainings.ends_in_the_middle, timeout_s=120.0)
    assert "RankLostError" in str(told.value)
    assert "rank 1 (pid" in str(told.value)


def test_who_waits_for_a_rank_that_sleeps_names_it_and_where_it_is(device: str):
    with World(2, group_timeout_s=ranks.TIMEOUT_S, grace_s=60.0) as world:
        heard, none = world.run(ranks.call, device, trainings.sleeps_in_the_middle, timeout_s=120.0)
    assert not none
    assert any("rank 0 has waited for" in text and "for rank 1." in text for text in heard), heard
    assert all("(since " in text for text in heard)
    assert any("trainings.py:" in text for text in heard)


@cache
def rows() -> list[Row]:
    """All pairs of the main factors of tests/crossings."""
    factors = {f: levels if i < NUM_MAIN else levels[:1] for i, (f, levels) in enumerate(FACTORS.items())}
    return covering_array(factors, 0, list(CONSTRAINTS.values()))


def crossing(device: str, row: Row) -> oracle.Result:
    return program.run({**row, "device": device})


@pytest.mark.gpu  # over gloo they are part of tests/crossings
@pytest.mark.parametrize("row", rows(), ids=name_of)
def test_a_crossing_trains_as_one_process(pool: RestedPool, row: Row):
    assert row.keys() == default_row().keys()
    found = pool.run(num_ranks_of(row), ranks.call, "cuda", crossing, row, timeout_s=120.0)
    expected = oracle.train(row)
    for rank, result in enumerate(found):
        assert differences({**row, "device": "cuda"}, rank, result, expected) == [], f"rank {rank} of {name_of(row)}"
