"""Ranks of a persistent world, as torchrun would have started them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def launched(alone: bool = False) -> Iterator[None]:
    """The environment that torchrun sets, by which Accelerate knows the world; or that of one process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    values = dict(zip(names, (rank, rank, size, size, "127.0.0.1", "1"), strict=True))
    states = (AcceleratorState, GradientState, PartialState)
    always = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in (*names, *always)}
    try:
        os.environ.update(always if alone else {**values, **always})
        for state in states:
            state._reset_state()
        yield
    finally:
        for state in states:
            state._reset_state()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
