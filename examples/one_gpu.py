"""Train a model that does not fit on one GPU: python examples/one_gpu.py (docs/guides/one_gpu.md).

    python examples/one_gpu.py --layers 32 --width 4096 --tokens 65536       # 6.7 billion parameters, 100 GiB at home

Parameters, gradients and optimizer states are kept in the CPU's memory and come to the device for their use; the
optimizer steps beside the next forward. Without a GPU a small model trains on the CPU, with nothing to offload.
"""

import argparse
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import dshard

VOCAB = 256  # bytes


class Block(nn.Module):
    """A pre-norm transformer block; (batch, time, width) in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 128)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention, then the MLP, to the residual stream."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """Bytes (batch, time) to logits (batch, time, 256); a block's activations are computed again in backward."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next byte at every position."""
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def sharded(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The model: it never is whole in one place, on the device or off it."""
    with torch.device("meta"):
        model = Model(args.width, args.layers)
    options = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": dshard.CPUOffloadPolicy(),
    }
    for block in model.blocks:
        dshard.fully_shard(block, **options)
    dshard.fully_shard(model, **options)
    model.to_empty(device=device)  # parameters in the CPU's memory, buffers on the device
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    return model


def main() -> None:
    """Train, and say how long a step takes and what it takes of the device's memory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=2048, help="of a step and rank: the more, the less offload costs")
    parser.add_argument("--length", type=int, default=256, help="of a sequence")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)  # torchrun sets them, too
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    model = sharded(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    torch.manual_seed(1 + dist.get_rank())  # each rank has batches of its own
    is_first = dist.get_rank() == 0
    if is_first:
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}")
    begun = time.perf_counter()
    for step in range(args.steps):
        starts = torch.randint(len(data) - args.length, (args.tokens // args.length, 1))
        ids = data[starts + torch.arange(args.length + 1)].long().to(device)
        loss = F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # by norms that the device has computed
        optimizer.step()  # returns at once
        optimizer.zero_grad()
        if step % 5 == 4 and is_first:
            seconds, begun = (time.perf_counter() - begun) / 5, time.perf_counter()
            peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device.type == "cuda" else ""
            rate = args.tokens * dist.get_world_size() / seconds
            print(f"step {step + 1} loss {loss.item():.3f}, {rate:,.0f} tokens/s{peak}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
