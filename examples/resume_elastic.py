"""Train, save, and go on with another number of ranks.

    torchrun --nproc-per-node 2 examples/resume_elastic.py --folder run --steps 10
    torchrun --nproc-per-node 3 examples/resume_elastic.py --folder run --steps 20

The second command finds the checkpoint of the first. However many ranks train, a step is on the same 12 examples, so
the loss goes on as it would have without the break.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import dshard

BATCH = 12  # of all ranks together: divisible by 1, 2, 3, 4 and 6


def batch(step: int) -> torch.Tensor:
    """This rank's part of the examples of a step."""
    examples = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))
    return examples.chunk(dist.get_world_size())[dist.get_rank()]


def main() -> None:
    """Go on where the folder's checkpoint ends, or begin."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 50), nn.GELU(), nn.Linear(50, 50), nn.GELU(), nn.Linear(50, 4))
    dshard.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    path, first = args.folder / "checkpoint", 0
    if path.exists():
        first = dshard.checkpoint.load(path, model, optimizer)["step"]
        if dist.get_rank() == 0:
            print(f"resumed at step {first} on {dist.get_world_size()} ranks")
    for step in range(first, args.steps):
        x = batch(step).to(next(model.parameters()).device)
        loss = F.mse_loss(model(x), x[:, :4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean.item() / dist.get_world_size():.6f}")
    dshard.checkpoint.save(path, model, optimizer, extra={"step": args.steps})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
