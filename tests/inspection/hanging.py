"""Trains on ranks of which the last does something else in the fourth step, as its argument says."""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import dshard


def sleep():
    time.sleep(600)


def step(model, optimizer):
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def act(how, model):
    """What the last rank does."""
    if how in ("sleeps", "hybrid"):
        sleep()
    elif how == "raises":
        raise ValueError("bad batch")
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "leaves":
        sys.exit()
    elif how == "branches":
        model[2](torch.randn(2, 8))  # other


def main(how):
    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    for layer in model:
        dshard.fully_shard(layer)
    dshard.fully_shard(model, **({"strategy": "hybrid(2)"} if how == "hybrid" else {}))
    optimizer = torch.optim.AdamW(model.parameters())
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for number in range(6):
        if number == 3 and is_last:
            act(how, model)
        step(model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
