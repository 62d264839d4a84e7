"""DPO over adapters: the reference is the policy with its adapters off."""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

VOCAB, LENGTH, PROMPT, PAIRS = 48, 10, 4, 8


def build() -> Any:
    from peft import LoraConfig, get_peft_model
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
    adapters = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    return get_peft_model(LlamaForCausalLM(config), adapters)


def pairs(step: int, rank: int, world_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    chosen = torch.randint(VOCAB, (PAIRS, LENGTH), generator=generator)
    rejected = torch.cat([chosen[:, :PROMPT], chosen[:, PROMPT:] // 2], 1)
    return torch.cat([chosen.chunk(world_size)[rank], rejected.chunk(world_size)[rank]])


def log_probs(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    each = logits.to(torch.get_default_dtype()).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return each[:, PROMPT - 1 :].sum(-1)


def main(steps: int = 5, bf16: bool = False, reference_first: bool = True) -> dict[str, Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = build()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=2e-2, weight_decay=0.0)
    log: dict[str, Any] = {"losses": [], "margins": []}
    for step in range(steps):
        tokens = pairs(step, rank, world_size)
        learned = None if reference_first else log_probs(model, tokens)
        with torch.no_grad(), model.disable_adapter():
            reference = log_probs(model, tokens)
        learned = log_probs(model, tokens) if learned is None else learned
        chosen, rejected = (learned - reference).chunk(2)
        loss = -F.logsigmoid(0.5 * (chosen - rejected)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        both = torch.stack([loss.detach(), (chosen - rejected).detach().mean()])
        if world_size > 1:
            dist.all_reduce(both)
        for key, value in zip(log, (both / world_size).tolist(), strict=True):
            log[key].append(value)
    whole = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in trained.items()}
    return {**log, "adapters": whole}
