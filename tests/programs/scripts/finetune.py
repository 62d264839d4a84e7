"""A `Trainer` fine-tunes LoRA's adapters in bf16, with gradient checkpointing and a cosine; it evaluates and saves."""

from typing import Any

import torch
from torch import Tensor

VOCAB, LENGTH, ROWS = 48, 10, 48


def base(bf16: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16 if bf16 else torch.get_default_dtype())


def with_adapters(bf16: bool, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    model = base(bf16)
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def rows() -> list[dict[str, Tensor]]:
    start = torch.randint(VOCAB, (ROWS, 1), generator=torch.Generator().manual_seed(2))
    tokens = (start + torch.arange(LENGTH) * 3) % VOCAB
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer_class(sharded: bool) -> Any:
    from transformers import Trainer

    if not sharded:
        return Trainer
    from dshard.interop import ShardedTrainerMixin

    return type("ShardedTrainer", (ShardedTrainerMixin, Trainer), {})


def main(
    folder: str,
    world_size: int,
    sharded: bool = False,
    bf16: bool = True,
    seed: int = 1,
    resume: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    from transformers import TrainingArguments

    arguments = {
        "output_dir": folder,
        "max_steps": 6,
        "per_device_train_batch_size": 4 // world_size,
        "per_device_eval_batch_size": 4 // world_size,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "bf16": bf16,
        "learning_rate": 2e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
        **options,
    }
    data = rows()
    trainer = trainer_class(sharded)(
        model=with_adapters(bf16, seed),
        args=TrainingArguments(**arguments),
        train_dataset=data[8:],
        eval_dataset=data[:8],
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/adapters")
    history = trainer.state.log_history
    return {
        "losses": [each["loss"] for each in history if "loss" in each],
        "norms": [float(each["grad_norm"]) for each in history if "grad_norm" in each],
        "rates": [each["learning_rate"] for each in history if "learning_rate" in each],
        "evaluations": [each["eval_loss"] for each in history if "eval_loss" in each],
    }
