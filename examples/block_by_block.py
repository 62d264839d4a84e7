"""Shard a model block by block, as with FSDP2: torchrun --nproc-per-node 2 examples/block_by_block.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dshard


class Block(nn.Module):
    """Two linear layers beside a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, width) to the same."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main() -> None:
    """Train for a few steps and say what went over the wire."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), *[Block(64) for _ in range(4)], nn.Linear(64, 4))
    for block in model[1:-1]:
        dshard.fully_shard(block)
    dshard.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    generator = torch.Generator().manual_seed(rank)
    for step in range(10):
        x = torch.randn(32, 16, generator=generator)
        with dshard.CommTrace() as trace:
            loss = F.mse_loss(model(x), x[:, :4])
            optimizer.zero_grad()
            loss.backward()
            norm = dshard.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if rank == 0 and step % 3 == 0:
            print(f"step {step}: loss {loss.item():.4f}, gradient norm {norm.item():.3f}")
    if rank == 0:
        print(trace.summary())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
