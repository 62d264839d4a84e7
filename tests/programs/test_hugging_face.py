"""Programs of transformers, PEFT and Accelerate: fine-tuning by a trainer, loops, generation between steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dshard.testing import World
from tests.interop.launch import launched
from tests.programs.launch import ALONE, DSHARD, EXACT, FSDP2, apart, differing, run
from tests.programs.scripts import accelerated, finetune

TIMEOUT_S = 240.0


def adapters(folder: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    if dist.get_world_size() > 1:
        dist.barrier()
    return load_file(f"{folder}/adapters/adapter_model.safetensors")


def finetuned(folder: str, how: str, **options: Any) -> dict[str, Any]:
    """By a trainer on both ranks, sharded or under DDP, or in one process (on each rank)."""
    alone = how == "alone"
    folder = f"{folder}/{how}{dist.get_rank() if alone else ''}"
    with launched(alone=alone):
        world_size = 1 if alone else dist.get_world_size()
        log = finetune.main(folder, world_size, sharded=how == "dshard", **options)
    return {**log, "adapters": adapters(folder)}


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing_kwargs": {"use_reentrant": False}}], ids=str)
def test_a_trainer_finetunes_adapters_in_bf16_to_the_bits_of_ddp(world: World, tmp_path: Path, options):
    expected, found = (
        world.run(finetuned, str(tmp_path), how, timeout_s=TIMEOUT_S, **options) for how in ("ddp", "dshard")
    )
    norms, wanted = ([each.pop("norms") for each in runs] for runs in (found, expected))
    assert differing(found, expected) == []
    assert apart(norms, wanted)[0] < 1e-6
    assert found[0]["evaluations"][-1] < found[0]["evaluations"][0]


def test_a_trainer_finetunes_adapters_as_in_one_process(world: World, tmp_path: Path):
    options: dict[str, Any] = {"timeout_s": TIMEOUT_S, "bf16": False}
    (expected, _), (found, _) = (world.run(finetuned, str(tmp_path), how, **options) for how in ("alone", "dshard"))
    assert apart(found, expected)[0] < 1e-4
    assert apart(found["losses"], expected["losses"])[0] < 1e-5


BEST = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}


def best_of(folder: str, how: str) -> Any:
    """A learning rate that spoils the model after the first steps, so that the best is not the last."""
    return finetuned(folder, how, **BEST, learning_rate=0.3, warmup_steps=0, lr_scheduler_type="constant")


def test_a_trainer_that_loads_the_best_model_at_the_end_saves_that_of_ddp(world: World, tmp_path: Path):
    (expected, _), (found, _) = (
        world.run(best_of, str(tmp_path), how, timeout_s=TIMEOUT_S) for how in ("ddp", "dshard")
    )
    assert differing(found["evaluations"], expected["evaluations"]) == []
    # Norms are added up in another order, so what is clipped by them has DDP's last bits on some CPUs alone.
    assert apart(found["adapters"], expected["adapters"])[0] < 1e-5


def broken_off(folder: str) -> list[Any]:
    """A sharded run, and one that goes on from its checkpoint in a model of other adapters."""
    whole = finetuned(folder, "dshard", save_strategy="steps", save_steps=2)
    again = finetuned(f"{folder}/again", "dshard", seed=2, resume=f"{folder}/dshard/checkpoint-4")
    return [whole, again]


def test_a_trainer_goes_on_with_adapters_in_bf16_as_without_a_break(world: World, tmp_path: Path):
    (whole, again), _ = world.run(broken_off, str(tmp_path), timeout_s=TIMEOUT_S)
    assert differing(again, whole) == []  # its history is in the checkpoint, too


def loop(how: str, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    alone = how == "alone"
    torch.set_default_dtype(dtype)
    try:
        with launched(alone=alone):
            return accelerated.main(1 if alone else dist.get_world_size(), sharded=how == "dshard", **options)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_loop_of_accelerate_gives_the_bits_of_ddp(world: World, bf16):
    expected, found = (world.run(loop, how, bf16=bf16, timeout_s=TIMEOUT_S) for how in ("ddp", "dshard"))
    norms, wanted = ([each.pop("norms") for each in runs] for runs in (found, expected))
    assert differing(found, expected) == []
    assert apart(norms, wanted)[0] < 1e-6


def test_a_loop_of_accelerate_gives_what_one_process_gives(world: World):
    (expected, _), (found, _) = (
        world.run(loop, how, torch.float64, timeout_s=TIMEOUT_S) for how in ("alone", "dshard")
    )
    assert apart(found, expected)[0] < EXACT


def generation(library: str, **options: Any) -> dict[str, Any]:
    with launched(alone=library == ALONE):
        return run("generation", library, **options)


@pytest.mark.parametrize("bf16", [False, True])
def test_generating_between_steps_gives_the_bits_of_fsdp2(world: World, bf16):
    options: dict[str, Any] = {"bf16": bf16, "timeout_s": TIMEOUT_S}
    expected, found = (world.run(generation, library, **options) for library in (FSDP2, DSHARD))
    assert differing(found, expected) == []


@pytest.mark.parametrize("registered", [True, False])  # FSDP2 needs `register_fsdp_forward_method`
def test_generating_between_steps_is_as_in_one_process(world: World, registered):
    options: dict[str, Any] = {"dtype": torch.float64, "timeout_s": TIMEOUT_S}
    (expected, _), (found, _) = (
        world.run(generation, ALONE, **options),
        world.run(generation, DSHARD, registered=registered, **options),
    )
    tokens, wanted = found.pop("tokens"), expected.pop("tokens")
    assert all(torch.equal(a, b) for a, b in zip(tokens, wanted, strict=True))
    assert apart(found, expected)[0] < 1e-6  # transformers computes norms and losses in fp32, whatever the dtype


def dpo(library: str, **options: Any) -> dict[str, Any]:
    with launched(alone=library == ALONE):
        return run("dpo_lora", library, **options)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_policy_that_is_its_own_reference_gives_the_bits_of_fsdp2(world: World, bf16):
    options: dict[str, Any] = {"bf16": bf16, "timeout_s": TIMEOUT_S}
    # FSDP2 reads off the first forward what trains: without adapters, nothing, and its first bf16 gradient fails.
    expected, found = (world.run(dpo, library, reference_first=False, **options) for library in (FSDP2, DSHARD))
    assert differing(found, expected) == []
    assert differing(world.run(dpo, DSHARD, **options), expected) == []


def test_a_policy_that_is_its_own_reference_learns_as_in_one_process(world: World):
    options: dict[str, Any] = {"dtype": torch.float64, "timeout_s": TIMEOUT_S}
    (expected, _), (found, _) = (world.run(dpo, library, **options) for library in (ALONE, DSHARD))
    assert apart(found, expected)[0] < 1e-6  # norms in fp32, as above
    assert expected["losses"][-1] < expected["losses"][0]
