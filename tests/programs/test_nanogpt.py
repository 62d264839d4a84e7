"""A loop that was written for DDP runs with `fully_shard` imported under the name of its wrapper."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dshard.testing import WorldPool
from tests.programs.launch import ALONE, DDP, DSHARD, EXACT, apart, differing, run

nanogpt = partial(run, "nanogpt")


def assert_same_but_for_sums_of_norms(found: list[Any], expected: list[Any]) -> None:
    """A norm is added up shard by shard, so that its last bit may differ; no gradient here is above the limit."""
    norms, wanted = ([each.pop("norms") for each in runs] for runs in (found, expected))
    assert differing(found, expected) == []
    assert apart(norms, wanted)[0] < 1e-6
    assert max(wanted[0]) < 1


@pytest.mark.parametrize("bf16", [False, True])
def test_the_loop_gives_the_bits_of_ddp(worlds: WorldPool, bf16):
    expected = worlds.run(2, nanogpt, DDP, bf16=bf16)
    assert expected[0]["evaluations"][-1]["val"] < expected[0]["evaluations"][0]["val"]
    assert_same_but_for_sums_of_norms(worlds.run(2, nanogpt, DSHARD, bf16=bf16), expected)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_loop_gives_what_one_process_gives_also_where_it_clips(worlds: WorldPool, num_ranks):
    options: dict[str, Any] = {"dtype": torch.float64, "grad_clip": 0.25}
    (expected,) = worlds.run(1, nanogpt, ALONE, **options)
    assert min(expected["norms"]) > 0.25
    assert apart(worlds.run(num_ranks, nanogpt, DSHARD, **options)[0], expected)[0] < EXACT


@pytest.mark.parametrize(("writer", "reader"), [(DDP, DSHARD), (DSHARD, DDP), (DSHARD, DSHARD)])
def test_a_best_checkpoint_of_full_tensors_goes_on_in_either(worlds: WorldPool, tmp_path: Path, writer, reader):
    whole = worlds.run(2, nanogpt, writer)[0]
    first = worlds.run(2, nanogpt, writer, folder=str(tmp_path), steps=4)[0]
    assert first["saved"] == [2, 4]
    second = worlds.run(2, nanogpt, reader, folder=str(tmp_path), resume=True)[0]
    joined = {key: first[key] + second[key] for key in ("losses", "norms", "evaluations")}
    weights = second["weights"]
    assert_same_but_for_sums_of_norms(
        [{**joined, "weights": weights}], [{key: whole[key] for key in (*joined, "weights")}]
    )


def test_a_run_that_gets_worse_stops_early_on_all_ranks_at_the_step_of_ddp(worlds: WorldPool, tmp_path: Path):
    options: dict[str, Any] = {"steps": 40, "total": 40, "top": 1.0, "patience": 2, "grad_clip": 0.0}
    expected, found = (worlds.run(2, nanogpt, lib, folder=str(tmp_path), **options) for lib in (DDP, DSHARD))
    assert differing(found, expected) == []
    assert len(found[0]["losses"]) < 40
