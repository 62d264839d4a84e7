"""Tensor and data parallelism together, on CPU: torchrun --nproc-per-node 4 examples/tp_2d.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import dshard

VOCAB, WIDTH, HEAD_WIDTH = 64, 32, 8


class Attention(nn.Module):
    """Causal attention with as many heads as its projections give on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, length, width) to the same."""
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, -1, HEAD_WIDTH).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """Attention and two linear layers, each beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, length, width) to the same."""
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def parallelize(model: nn.Sequential, tp: DeviceMesh) -> None:
    """Between blocks each rank holds a part of the sequence; within them, a part of the heads and hidden units."""
    embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    norm, last = str(len(model) - 2), str(len(model) - 1)
    parallelize_module(model, tp, {"0": embed, norm: SequenceParallel(), last: head})
    for block in model[1:-2]:
        plan = {
            "norm1": SequenceParallel(),
            "attn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            **{f"attn.{name}": ColwiseParallel() for name in "qkv"},
            "attn.o": RowwiseParallel(output_layouts=Shard(1)),
            "norm2": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, tp, plan)


def main() -> None:
    """Learn to count upwards for a few steps, and say where the parameters lie."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH), head)
    parallelize(model, mesh["tp"])
    for block in model[1:-2]:
        dshard.fully_shard(block, mesh=mesh["dp"])
    dshard.fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))  # alike on all ranks of a tp group
    for step in range(20):
        start = torch.randint(0, VOCAB, (8, 1), generator=generator)
        ids = (start + torch.arange(17)) % VOCAB
        with loss_parallel():
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
        dshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.to_local().item():.3f}")
    if dist.get_rank() == 0:
        for name, param in list(model[1].named_parameters())[:3]:
            print(f"{name}: {tuple(param.shape)} lies as {param.placements}, here {tuple(param.to_local().shape)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
