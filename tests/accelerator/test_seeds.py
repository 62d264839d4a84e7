"""The same program under many orders of the streams. `SEEDS=200` draws as many; a failure names the one to repeat."""

import os

import pytest
import torch.distributed as dist

from dshard.testing import WorldPool
from tests.accelerator import ranks
from tests.accelerator.device import MODES
from tests.crossings import oracle, program
from tests.crossings.comparing import differences
from tests.crossings.factors import default_row

NUM_SEEDS = int(os.environ.get("SEEDS", "8"))
ROWS = {
    "prefetch": {"units": "blocks", "setting": "prefetch 2", "checkpoint": "inside", "clip": "dshard"},
    "budget": {"units": "blocks", "strategy": "budget", "accumulation": "no_sync", "precision": "bf16"},
    "offload": {"units": "blocks", "offload": "CPUOffloadPolicy", "optimizer": "foreach", "clip": "torch"},
    "slices": {"units": "blocks", "strategy": "split(2)", "setting": "2 buffers"},
}


def run(row: dict[str, str], expected: oracle.Result, num_seeds: int) -> list[str]:
    for seed in range(num_seeds):
        ranks.begin(seed, MODES[seed % len(MODES)], with_cpu=True)
        wrong = differences(row, dist.get_rank(), program.run(row), expected)
        if wrong:
            return [f"seed {seed}: {each}" for each in wrong]
    return []


@pytest.mark.parametrize("name", ROWS)
def test_no_order_of_the_streams_changes_what_comes_out(accelerators_and_cpus: WorldPool, name):
    row = {**default_row(), **ROWS[name], "device": "sim"}
    wrong = accelerators_and_cpus.run(2, run, row, oracle.train(row), NUM_SEEDS, timeout_s=40 + 6 * NUM_SEEDS)
    assert wrong == [[], []]
