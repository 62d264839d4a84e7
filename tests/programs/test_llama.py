"""A Llama is pretrained as under FSDP2 and as in one process, saved, and resumed at another number of ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dshard.testing import WorldPool
from tests.programs.launch import ALONE, DSHARD, EXACT, FSDP2, apart, differing, run

DOUBLE = torch.float64
llama = partial(run, "llama")


@pytest.mark.parametrize(("num_ranks", "replicas"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("bf16", [True, False])
def test_pretraining_is_that_of_fsdp2_bit_for_bit(worlds: WorldPool, num_ranks, replicas, bf16):
    options: dict[str, Any] = {"replicas": replicas, "bf16": bf16}
    expected = worlds.run(num_ranks, llama, FSDP2, **options)
    assert differing(worlds.run(num_ranks, llama, DSHARD, **options), expected) == []
    assert expected[0]["losses"][-1] < 0.95 * expected[0]["losses"][0]


def test_micro_batches_that_are_reduced_within_replicas_give_the_bits_of_fsdp2(worlds: WorldPool):
    options: dict[str, Any] = {"replicas": 2, "every_micro_batch_reduces": True}
    expected, found = (worlds.run(4, llama, library, **options) for library in (FSDP2, DSHARD))
    assert differing(found, expected) == []


def test_keeping_a_part_of_the_weights_gives_the_bits_of_fsdp2(worlds: WorldPool):
    options: dict[str, Any] = {"reshard": 2, "accumulation": 1}
    expected, found = (worlds.run(4, llama, library, **options) for library in (FSDP2, DSHARD))
    norms, wanted = ([each.pop("norms") for each in runs] for runs in (found, expected))
    assert apart(norms, wanted)[0] < 1e-6  # four ranks' parts are added in pairs here, and one by one there
    assert max(wanted[0]) < 1  # so that nothing is clipped
    assert differing(found, expected) == []


@pytest.mark.parametrize("from_seed_checkpoint", [True, False])  # FSDP2's own init draws other numbers on each rank
@pytest.mark.parametrize(("num_ranks", "replicas"), [(2, 1), (4, 2)])
def test_pretraining_is_that_of_one_process(worlds: WorldPool, num_ranks, replicas, from_seed_checkpoint):
    options: dict[str, Any] = {"bf16": False, "dtype": DOUBLE, "from_seed_checkpoint": from_seed_checkpoint}
    expected = worlds.run(1, llama, ALONE, **options)
    found = worlds.run(num_ranks, llama, DSHARD, replicas=replicas, **options)
    assert apart(found[0], expected[0])[0] < EXACT
    assert [each["losses"] for each in found] == [found[0]["losses"]] * num_ranks


def test_losses_in_bf16_are_near_those_of_one_process_in_fp32(worlds: WorldPool):
    (expected,) = worlds.run(1, llama, ALONE, bf16=False)
    (single,) = worlds.run(2, llama, DSHARD, bf16=False)[:1]
    half = worlds.run(2, llama, DSHARD)[0]
    assert apart(single["losses"], expected["losses"])[0] < 1e-5
    assert 1e-5 < apart(half["losses"], expected["losses"])[0] < 2**-8  # bf16 rounds to 2^-9


def test_a_run_goes_on_at_any_number_of_ranks_as_without_a_break(worlds: WorldPool, tmp_path: Path):
    options: dict[str, Any] = {"bf16": False, "dtype": DOUBLE}
    (whole,) = worlds.run(1, llama, ALONE, **options)
    load: dict[str, Any] = {}
    parts: dict[str, list[float]] = {"losses": [], "norms": [], "rates": []}
    for num_ranks, steps, replicas in [(2, 2, 1), (4, 3, 1), (4, 4, 2), (2, 5, 1), (1, 6, 1)]:
        save = str(tmp_path / f"{steps}")
        run = worlds.run(num_ranks, llama, DSHARD, steps=steps, replicas=replicas, save=save, **load, **options)[0]
        load = {"load": save}
        for key, values in parts.items():
            values += run[key]
    assert apart({**parts, "weights": run["weights"]}, whole)[0] < EXACT


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize(("writer", "reader"), [(FSDP2, DSHARD), (DSHARD, FSDP2), (DSHARD, DSHARD)])
def test_a_run_of_one_library_goes_on_in_the_other_bit_for_bit(worlds: WorldPool, tmp_path: Path, writer, reader, bf16):
    save = str(tmp_path / "3")
    whole = worlds.run(2, llama, writer, bf16=bf16)
    first = worlds.run(2, llama, writer, steps=3, save=save, bf16=bf16)
    second = worlds.run(2, llama, reader, load=save, bf16=bf16)
    for key in ("losses", "norms", "rates"):
        assert first[0][key] + second[0][key] == whole[0][key]
    assert differing(second[0]["weights"], whole[0]["weights"]) == []


@pytest.mark.parametrize("library", [FSDP2, DSHARD])
def test_a_run_goes_on_from_what_was_saved_while_it_went_on(worlds: WorldPool, tmp_path: Path, library):
    whole = worlds.run(2, llama, library, save=str(tmp_path), asynchronous=True)
    assert differing(whole, worlds.run(2, llama, library)) == []
    second = worlds.run(2, llama, DSHARD, load=str(tmp_path / "2"))
    assert second[0]["losses"] == whole[0]["losses"][2:]
    assert differing(second[0]["weights"], whole[0]["weights"]) == []
