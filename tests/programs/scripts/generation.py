"""Fine-tuning of a model of `transformers` with a loop of one's own, which generates between the steps."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

VOCAB, BATCH, LENGTH = 48, 8, 10


def build() -> Any:
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
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def batch(step: int, rank: int, world_size: int) -> Tensor:
    start = torch.randint(VOCAB, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return ((start + torch.arange(LENGTH) * 3) % VOCAB).chunk(world_size)[rank]


def generate(model: Any, rank: int, world_size: int) -> Tensor:
    """Continuations on all ranks, together."""
    model.eval()
    prompts = batch(99, rank, world_size)[:, :4]
    tokens = model.generate(prompts, max_new_tokens=5, do_sample=False, pad_token_id=0)
    model.train()
    everyones = [torch.empty_like(tokens) for _ in range(world_size)]
    if world_size > 1:
        dist.all_gather(everyones, tokens)
    return torch.cat(everyones) if world_size > 1 else tokens


def main(steps: int = 6, bf16: bool = False, registered: bool = True) -> dict[str, Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = build()
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if registered:
        register_fsdp_forward_method(model, "generate")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    log: dict[str, Any] = {"losses": [], "tokens": []}
    for step in range(steps):
        tokens = batch(step, rank, world_size)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if world_size > 1:
            dist.all_reduce(total)
        log["losses"].append((total / world_size).item())
        if step % 2:
            log["tokens"].append(generate(model, rank, world_size))
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {**log, "weights": get_model_state_dict(model, options=whole)}
