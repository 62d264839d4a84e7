"""Waits and orders taken out of dshard, one by one: the accelerator finds each and names both sides."""

import pytest

from dshard.testing import WorldPool
from dshard.testing.worlds import RemoteRankError
from tests.accelerator import mutants, ranks


def run(name: str, mutated: bool) -> None:
    mutant = mutants.MUTANTS[name]
    ranks.begin(0, "lazy", with_cpu=mutant.is_offloaded)
    mutants.run(name, mutated=mutated)


@pytest.fixture
def worlds_of(accelerators: WorldPool, accelerators_and_cpus: WorldPool):
    return lambda mutant: accelerators_and_cpus if mutant.is_offloaded else accelerators


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_what_is_taken_out_is_missed(worlds_of, name):
    mutant = mutants.MUTANTS[name]
    pool = worlds_of(mutant)
    pool.run(mutant.num_ranks, run, name, False)
    with pytest.raises(RemoteRankError, match="race: ") as raised:
        pool.run(mutant.num_ranks, run, name, True)
    for words in (*mutant.names, "dshard/"):
        assert words in str(raised.value)
