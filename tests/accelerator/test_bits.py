"""Losses on the simulated accelerator are FSDP2's, bit for bit: the order of arithmetic is the same."""

import pytest

from dshard.testing import WorldPool
from tests.accelerator import ranks
from tests.gpu import trainings

LEFT_OUT = {"compiled", "offloaded"}  # not done on this device; FSDP2 needs pinned memory


def losses(library: str, name: str) -> list[float]:
    ranks.begin(0, "random", with_cpu=True)
    return trainings.hf_llama("sim", library) if name == "HF Llama" else trainings.losses("sim", library, name)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", [*sorted(set(trainings.SETTINGS) - LEFT_OUT), "HF Llama"])
def test_losses_are_fsdp2s_bit_for_bit(accelerators_and_cpus: WorldPool, name, num_ranks):
    if name == "HF Llama":
        pytest.importorskip("transformers")
    theirs, ours = (accelerators_and_cpus.run(num_ranks, losses, library, name) for library in ("FSDP2", "dshard"))
    assert ours == theirs


def states_of_8_bits() -> None:
    ranks.begin(0, "random", with_cpu=True)
    trainings.states_of_8_bits("sim")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_states_of_8_bits_are_those_of_plain_parameters(accelerators_and_cpus: WorldPool, num_ranks):
    accelerators_and_cpus.run(num_ranks, states_of_8_bits)
