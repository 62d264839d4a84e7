"""An average of the weights beside the training: by hand, and torch's `AveragedModel`."""

from functools import partial
from pathlib import Path

import pytest
import torch

from dshard.testing import WorldPool
from tests.programs.launch import ALONE, DSHARD, EXACT, FSDP2, apart, differing, run

ema = partial(run, "ema")


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("how", ["by hand", "foreach"])
def test_an_average_that_is_swapped_in_gives_the_bits_of_fsdp2(worlds: WorldPool, tmp_path: Path, how, bf16):
    results, saved = [], []
    for library in (FSDP2, DSHARD):
        results.append(worlds.run(2, ema, library, how=how, bf16=bf16, folder=str(tmp_path)))
        saved.append(torch.load(tmp_path / "best.pt", weights_only=True))
    assert differing(*results) == []
    assert differing(*saved) == []


# FSDP2 refuses the copy that `AveragedModel` makes.
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("how", ["by hand", "foreach", "averaged, ema", "averaged, equally"])
def test_an_average_is_that_of_one_process(worlds: WorldPool, num_ranks, how):
    program = partial(ema, dtype=torch.float64, how=how)
    (expected,) = worlds.run(1, program, ALONE)
    assert apart(worlds.run(num_ranks, program, DSHARD)[0], expected)[0] < EXACT
    if how.startswith("averaged"):
        assert differing(*expected["weights"]) != []
