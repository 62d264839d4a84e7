"""Programs of two models: a GAN, DPO with a frozen reference, distillation."""

from functools import partial
from typing import Any

import pytest
import torch

from dshard.testing import WorldPool
from tests.programs.launch import ALONE, DSHARD, EXACT, FSDP2, apart, differing, run

PROGRAMS = ["gan", "dpo", "distill"]


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_the_bits_of_fsdp2(worlds: WorldPool, name, bf16):
    expected, found = (worlds.run(2, run, name, library, bf16=bf16) for library in (FSDP2, DSHARD))
    assert differing(found, expected) == []


# What FSDP2 does not do: second derivatives, and copies of a sharded model.
ONLY_HERE: list[tuple[str, dict[str, Any]]] = [("gan", {"penalty": 1.0}), ("dpo", {"copy_sharded": True})]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in PROGRAMS), *ONLY_HERE], ids=str)
def test_a_program_gives_what_one_process_gives(worlds: WorldPool, num_ranks, name, options):
    program = partial(run, name, dtype=torch.float64, bf16=False, **options)
    (expected,) = worlds.run(1, program, ALONE)
    assert apart(worlds.run(num_ranks, program, DSHARD)[0], expected)[0] < EXACT
    first, *_, last = expected["losses"]
    assert last != first
