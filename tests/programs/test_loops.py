"""Loops around a model: rounds of reinforcement learning, and experts that some ranks never call."""

from functools import partial

import pytest
import torch

from dshard.testing import WorldPool
from tests.programs.launch import ALONE, DSHARD, EXACT, FSDP2, apart, differing, run


def test_a_policy_whose_weights_go_to_a_plain_copy_gives_the_bits_of_fsdp2(worlds: WorldPool):
    expected, found = (worlds.run(2, run, "policy_gradient", library) for library in (FSDP2, DSHARD))
    assert differing(found, expected) == []


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_policy_samples_and_learns_as_in_one_process(worlds: WorldPool, num_ranks):
    program = partial(run, "policy_gradient", dtype=torch.float64)
    (expected,) = worlds.run(1, program, ALONE)
    for found in worlds.run(num_ranks, program, DSHARD):
        assert all(torch.equal(a, b) for a, b in zip(found.pop("tokens"), expected["tokens"], strict=True))
        expected_numbers = {key: value for key, value in expected.items() if key != "tokens"}
        if found["weights"]:
            assert apart(found, expected_numbers)[0] < EXACT


# Under FSDP2 ranks that call different experts reduce different gradients, and hang or mix them.
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_experts_that_a_rank_does_not_call_are_trained_as_in_one_process(worlds: WorldPool, num_ranks):
    program = partial(run, "experts", dtype=torch.float64)
    (expected,) = worlds.run(1, program, ALONE)
    found = worlds.run(num_ranks, program, DSHARD)
    by_step = list(zip(*(each.pop("called") for each in found), strict=True))
    assert all(called[0] != called[-1] for called in by_step)
    assert [sorted({use for called in step for use in called}) for step in by_step] == expected.pop("called")
    assert apart(found[0], expected)[0] < EXACT


@pytest.mark.parametrize("how", ["in backward", "orthogonal"])
def test_optimizers_of_ones_own_give_the_bits_of_fsdp2_and_what_one_process_gives(worlds: WorldPool, how):
    expected, found = (worlds.run(2, run, "optimizers", library, how=how) for library in (FSDP2, DSHARD))
    assert differing(found, expected) == []
    program = partial(run, "optimizers", dtype=torch.float64, how=how)
    (expected,) = worlds.run(1, program, ALONE)
    for num_ranks in (2, 4):
        assert apart(worlds.run(num_ranks, program, DSHARD)[0], expected)[0] < EXACT
