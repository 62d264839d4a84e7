"""Hugging Face's `Trainer` over a sharded model does what it does over a plain one."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dshard
from dshard.interop import ShardedTrainerMixin
from dshard.testing import World
from tests.interop import models
from tests.interop.launch import launched

TIMEOUT_S = 240.0
STEPS, PER_STEP = 4, 8  # examples of one optimizer step, over all ranks and micro-batches


def examples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, models.VOCAB, (STEPS * PER_STEP, models.LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def run_trainer(folder: str, model: Any, *, sharded: bool, resume: Any = None, **options: Any) -> dict[str, Any]:
    """Train with a trainer, sharded on all ranks or plain in one process; gives what it logged, and the weights."""
    import transformers

    class Sharded(ShardedTrainerMixin, transformers.Trainer):
        pass

    ranks = dist.get_world_size() if sharded else 1
    accumulation = options.get("gradient_accumulation_steps", 1)
    arguments = {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": PER_STEP // ranks // accumulation,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
        **options,
    }
    with launched(alone=not sharded):
        trainer = (Sharded if sharded else transformers.Trainer)(
            model=model,
            args=transformers.TrainingArguments(**arguments),
            train_dataset=examples(),
            eval_dataset=examples()[:8],
        )
        with dshard.CommTrace() as trace:
            trainer.train(resume_from_checkpoint=resume)
        metrics = trainer.evaluate()
        trainer.save_model(f"{folder}/final")
        if dist.get_world_size() > 1:
            dist.barrier()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "losses": [entry["loss"] for entry in logs],
        "norms": [float(entry["grad_norm"]) for entry in logs],
        "eval": metrics["eval_loss"],
        "weights": {name: models.full(p).clone() for name, p in trainer.model.named_parameters()},
        "reductions": trace.calls("reduce_scatter"),
        "model": trainer.model,
    }


def apart(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    as_tensor = lambda run, key: torch.tensor(run[key], dtype=torch.float64)  # noqa: E731
    weights = [
        models.difference(found["weights"][name], value, smallest=1e-2) for name, value in expected["weights"].items()
    ]
    return {
        **{
            key: models.difference(as_tensor(found, key), as_tensor(expected, key))
            for key in ("losses", "norms", "eval")
        },
        "weights": max(weights),
    }


def trainer_and_plain(folder: str, options: dict[str, Any]) -> tuple[dict[str, float], int, float]:
    """How far a sharded trainer lies from a plain one, its reductions, and how far what it saved lies from both."""
    import transformers

    rank = dist.get_rank()
    expected = run_trainer(f"{folder}/plain{rank}", models.build("llama"), sharded=False, **options)
    found = run_trainer(f"{folder}/sharded", models.build("llama"), sharded=True, **options)
    back = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/sharded/final", dtype=torch.float64)
    saved = max(models.difference(p.detach(), expected["weights"][name]) for name, p in back.named_parameters())
    return apart(found, expected), found["reductions"], saved


def test_a_sharded_trainer_trains_clips_evaluates_and_saves_as_a_plain_one(world: World, tmp_path: Path):
    for found, num_reductions, saved in world.run(trainer_and_plain, str(tmp_path), {}, timeout_s=TIMEOUT_S):
        assert max(found.values()) <= 1e-5, found
        assert saved <= 1e-5
        assert num_reductions == 4 * STEPS


def test_accumulated_micro_batches_of_a_trainer_send_their_gradients_once(world: World, tmp_path: Path):
    options = {"gradient_accumulation_steps": 2}
    for found, num_reductions, _ in world.run(trainer_and_plain, str(tmp_path), options, timeout_s=TIMEOUT_S):
        assert max(found.values()) <= 1e-5, found
        assert num_reductions == 4 * STEPS


def compiled(folder: str, by_blocks: bool) -> tuple[dict[str, float], int, int]:
    """How far a compiled sharded trainer lies from a plain eager one, and how many graphs and breaks there were."""
    expected = run_trainer(f"{folder}/plain{dist.get_rank()}", models.build("llama"), sharded=False)
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo's own are no errors
        patch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", str(by_blocks))
        found = run_trainer(f"{folder}/sharded", models.build("llama"), sharded=True, **options)
    return apart(found, expected), counters["stats"]["unique_graphs"], len(counters["graph_break"])


@pytest.mark.parametrize(("by_blocks", "graphs"), [(False, 2), (True, 2 * 5)])
def test_a_trainer_compiles_a_sharded_model_where_it_is(world: World, tmp_path: Path, by_blocks, graphs):
    for found, num_graphs, num_breaks in world.run(compiled, str(tmp_path), by_blocks, timeout_s=TIMEOUT_S):
        assert max(found.values()) <= 1e-5, found
        assert (num_graphs, num_breaks) == (graphs, 0)  # to train and to evaluate


def interrupted_and_not(folder: str) -> dict[str, float]:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    whole = run_trainer(f"{folder}/whole", models.build("llama"), sharded=True, **options)
    again = run_trainer(
        f"{folder}/again", models.build("llama", seed=1), sharded=True, resume=f"{folder}/whole/checkpoint-2", **options
    )
    again["losses"], again["norms"] = (
        whole["losses"][:2] + again["losses"][-2:],
        whole["norms"][:2] + again["norms"][-2:],
    )
    return apart(again, whole)


def test_a_trainer_resumes_from_its_checkpoint_as_without_a_break(world: World, tmp_path: Path):
    for found in world.run(interrupted_and_not, str(tmp_path), timeout_s=TIMEOUT_S):
        assert max(found.values()) <= 1e-12, found
