"""The options of the API and what programs do around them, on an accelerator whose streams run when they like.

Each row is held against the plain model in one process, as in tests/crossings; and no use of memory may be unordered.
"""

from functools import cache

import pytest

from dshard.testing import WorldPool
from tests.accelerator import ranks
from tests.accelerator.device import MODES
from tests.crossings import oracle, program
from tests.crossings.comparing import differences
from tests.crossings.covering import Constraint, Row, covering_array
from tests.crossings.factors import CONSTRAINTS, FACTORS, name_of, num_ranks_of

OFFLOADED = Constraint({"strategy": "split(2)", "offload": "CPUOffloadPolicy"}, "it is offloaded")
AWAY = [  # `DTensor.from_local` puts a state on the mesh's device, gradients are in the CPU's memory: as under FSDP2
    Constraint({"optimizer": "DTensor states", "offload": level}, "at least two devices")
    for level in FACTORS["offload"]
    if level != "none"
]
LEFT_OUT = {
    "compile": ("blocks", "step"),  # torch.compile has rules for each kind of device, and none for this one
    "strategy": ("zero1", "reshard=False", "plan"),  # which gather and reduce as "zero2", "keep" and "mixed" do
}


@cache
def rows() -> list[Row]:
    """All pairs of what the accelerator can be asked for."""
    factors = {f: tuple(x for x in levels if x not in LEFT_OUT.get(f, ())) for f, levels in FACTORS.items()}
    return covering_array(factors, 0, [*CONSTRAINTS.values(), OFFLOADED, *AWAY])


def run(row: Row, seed: int, mode: str) -> oracle.Result:
    ranks.begin(seed, mode, with_cpu=row["offload"] != "none")
    return program.run({**row, "device": "sim"})


@pytest.mark.parametrize("row", rows(), ids=name_of)
def test_a_crossing_trains_as_one_process_and_nothing_is_unordered(
    accelerators: WorldPool, accelerators_and_cpus: WorldPool, row
):
    worlds = accelerators if row["offload"] == "none" else accelerators_and_cpus
    expected, seed = oracle.train(row), rows().index(row)
    mode = MODES[seed % len(MODES)]
    for rank, result in enumerate(worlds.run(num_ranks_of(row), run, row, seed, mode)):
        wrong = differences({**row, "device": "sim"}, rank, result, expected)
        assert wrong == [], f"rank {rank} of {name_of(row)}, {mode}, seed {seed}"
