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


def fail(*_):
    raise ValueError("bad batch")


def step(model, optimizer):
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def act(how, model):
    """What the last rank does."""
    if how in ("sleeps", "hybrid"):
        sleep()
    elif how == "raises":
        fail()
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "leaves":
        sys.exit()
    elif how == "branches":
        model[2](torch.randn(2, 8))  # other
    elif how == "caught":
        return model[1].register_forward_pre_hook(fail)
    return None


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
        hook = act(how, model) if number == 3 and is_last else None
        try:
            step(model, optimizer)
        except Exception:  # of this rank, or what the others say of it
            if how != "caught":
                raise
            optimizer.zero_grad()
            if hook is not None:
                hook.remove()
        if how == "caught" and number == 4 and is_last:
            sleep()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
