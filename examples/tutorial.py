"""The program that docs/tutorial.md comes to: sharded, in bf16, accumulated, clipped, evaluated, saved and resumed.

    torchrun --nproc-per-node 2 examples/tutorial.py --folder run --steps 20
    torchrun --nproc-per-node 1 examples/tutorial.py --folder run --steps 40

The second command goes on from the newest checkpoint of the first, on one rank.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import dshard

MICRO_BATCHES = 2


def build() -> nn.Module:
    """A small language model without attention masks: a row is predicted from itself, shifted."""
    layers = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(3)]
    return nn.Sequential(nn.Embedding(64, 32), *layers, nn.Linear(32, 64))


def batch(step: int, rank: int, ranks: int) -> Tensor:
    """This rank's part of the 16 rows of a step, which count upwards from random starts."""
    start = torch.randint(0, 48, (16, 1), generator=torch.Generator().manual_seed(step))
    return (start + torch.arange(17)).chunk(ranks)[rank]


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """The mean loss of predicting each row's next element."""
    return F.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())


def mean(value: Tensor) -> float:
    """The mean over all ranks."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> Tensor:
    """One step in micro-batches, of which the last one reduces the gradients."""
    total = torch.zeros(())
    parts = rows.chunk(MICRO_BATCHES)
    for number, part in enumerate(parts):
        model.set_requires_gradient_sync(number == len(parts) - 1)
        loss = loss_of(model, part) / len(parts)
        loss.backward()
        total += loss.detach().cpu()
    dshard.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


@torch.no_grad()
def evaluate(model: nn.Module, rank: int, ranks: int) -> float:
    """The mean loss on rows that no step has."""
    model.eval()
    loss = mean(loss_of(model, batch(1_000_000, rank, ranks)))
    model.train()
    return loss


def main() -> None:
    """Go on where the folder's newest checkpoint ends, or begin."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = dshard.fully_shard(build(), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if any(args.folder.glob("step-*")):
        first = dshard.checkpoint.load(args.folder, model, optimizer)["step"]
        if rank == 0:
            print(f"goes on at step {first} on {ranks} ranks")
    for step in range(first, args.steps):
        loss = mean(train_step(model, optimizer, batch(step, rank, ranks)))
        if (step + 1) % 10 == 0:
            held_out = evaluate(model, rank, ranks)
            path = args.folder / f"step-{step + 1:06}"
            dshard.checkpoint.save(path, model, optimizer, step=step + 1, extra={"step": step + 1}, keep=2)
            if rank == 0:
                print(f"step {step + 1} loss {loss:.3f}, evaluated {held_out:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
