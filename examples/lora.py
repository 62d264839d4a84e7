"""Train LoRA adapters of PEFT on a sharded model: torchrun --nproc-per-node 2 examples/lora.py."""

import tempfile

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import dshard
from dshard.interop import full_state_dict


def base() -> nn.Module:
    """The model to adapt: tiny, random, the same on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, bos_token_id=None, eos_token_id=None, **sizes))


def main() -> None:
    """Adapters first, then fully_shard: frozen weights are sharded too, and send no gradients."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = dshard.fully_shard(get_peft_model(base(), config))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    for step in range(20):
        tokens = ((torch.randint(0, 60, (8, 1), generator=generator) + torch.arange(16)) % 64).to(model.device)
        with dshard.CommTrace() as trace:
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0 and step % 10 == 9:
            sent = sum(record.payload_bytes for record in trace.select("reduce_scatter"))
            print(f"step {step + 1}: loss {loss.item():.3f}, {sent:,} bytes of gradients sent")

    folder = tempfile.mkdtemp()
    adapters = full_state_dict(model, select=lambda name: "lora_" in name, only_rank0=True)
    if rank == 0:
        model.save_pretrained(folder, state_dict=adapters)
    expected = model(input_ids=tokens).logits
    if rank == 0:
        loaded = PeftModel.from_pretrained(base(), folder).to(tokens.device)
        same = torch.allclose(loaded(input_ids=tokens).logits, expected, atol=1e-5)
        print(f"adapters as loaded give the same logits: {same}")
    merged = model.merge_and_unload()  # into the shards
    same = torch.allclose(merged(input_ids=tokens).logits, expected, atol=1e-5)
    if rank == 0:
        print(f"merged into the sharded model: {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
