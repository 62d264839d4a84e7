"""Train and sample a Llama of transformers, sharded: torchrun --nproc-per-node 2 examples/llama_hf.py."""

import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import dshard


def batch(step: int, rank: int) -> torch.Tensor:
    """Sequences that count upwards from a random start."""
    start = torch.randint(0, 60, (8, 1), generator=torch.Generator().manual_seed(1000 * step + rank))
    return (start + torch.arange(16)) % 64


def main() -> None:
    """The model is tiny and starts at random; with from_pretrained it would start from a checkpoint."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = dshard.fully_shard(LlamaForCausalLM(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(30):
        tokens = batch(step, rank).to(model.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        dshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    prompt = torch.arange(10, 14)[None].to(model.device)
    tokens = model.generate(input_ids=prompt, max_new_tokens=6, do_sample=False)  # nothing to register
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dshard.save_safetensors(model, folder[0])
    if rank == 0:
        config.save_pretrained(folder[0])
        plain = LlamaForCausalLM.from_pretrained(folder[0])
        again = plain.generate(input_ids=prompt.cpu(), max_new_tokens=6, do_sample=False)
        print(f"sharded: {tokens[0].tolist()}\nfrom_pretrained: {again[0].tolist()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
