"""Which process this is, which device it uses, and the process group of all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dshard.cli.usage import UsageError

_TIMEOUT = timedelta(minutes=5)
# gloo's worker threads free the tensors of the last collective after its `wait` has returned, and need the GIL for it.
# An interpreter that closes meanwhile aborts the process ("terminate called without an active exception").
_GLOO_GRACE_S = 0.2


@dataclass(frozen=True, slots=True)
class World:
    """This process among all of them, as torchrun's environment says; one process where it says nothing."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def backend(self) -> str:
        """The process group's backend for this device."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes reports."""
        return self.rank == 0


def _read_int(environ: Mapping[str, str], name: str, *, minimum: int, limit: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        raise UsageError(f"WORLD_SIZE in the environment needs {name} too, but it is not set. Start with torchrun.")
    span = f"an integer of at least {minimum}" if limit is None else f"an integer from {minimum} to {limit - 1}"
    try:
        value = int(text)
    except ValueError:
        value = minimum - 1
    if value < minimum or (limit is not None and value >= limit):
        raise UsageError(f"{name} in the environment must be {span}, but it is {text!r}. Start with torchrun.")
    return value


def _pick_device(name: str, local_rank: int) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= num_devices:
        raise UsageError(
            f"every local rank needs a CUDA device of its own, but local rank {local_rank} finds {num_devices}. Start "
            "fewer processes per machine, or pass --device cpu."
        )
    return torch.device("cuda", local_rank)


def read_world(environ: Mapping[str, str], device_name: str) -> World:
    """Reads rank, world size and local rank from torchrun's variables and picks the device.

    Args:
        environ: the environment; without WORLD_SIZE the world is this one process.
        device_name: "auto", "cpu" or "cuda".

    Raises:
        UsageError: a variable is missing, no integer or out of range, or there is no CUDA device for this rank.

    Communicates: nothing.
    """
    if "WORLD_SIZE" not in environ:
        return World(rank=0, size=1, local_rank=0, device=_pick_device(device_name, 0))
    size = _read_int(environ, "WORLD_SIZE", minimum=1)
    rank = _read_int(environ, "RANK", minimum=0, limit=size)
    local_rank = _read_int(environ, "LOCAL_RANK", minimum=0, limit=size) if "LOCAL_RANK" in environ else rank
    if size > 1:
        _read_int(environ, "MASTER_PORT", minimum=0, limit=65536)
        if not environ.get("MASTER_ADDR"):
            raise UsageError("WORLD_SIZE above 1 needs MASTER_ADDR, but it is not set. Start with torchrun.")
    return World(rank=rank, size=size, local_rank=local_rank, device=_pick_device(device_name, local_rank))


@contextmanager
def process_group(world: World) -> Iterator[None]:
    """The default process group for the length of a ``with`` block.

    Communicates: joins all ranks (a world of one needs no network).
    """
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    device_id = world.device if world.device.type == "cuda" else None
    if world.size == 1:
        store = dist.HashStore()
        dist.init_process_group(world.backend, store=store, rank=0, world_size=1, device_id=device_id, timeout=_TIMEOUT)
    else:
        dist.init_process_group(
            world.backend, rank=world.rank, world_size=world.size, device_id=device_id, timeout=_TIMEOUT
        )
    try:
        yield
    finally:
        if world.backend == "gloo":
            time.sleep(_GLOO_GRACE_S)
        dist.destroy_process_group()


def check_agreement(facts: Mapping[str, object]) -> None:
    """Checks that all ranks were started with the same facts.

    Raises:
        UsageError: alike on every rank, naming the first fact that differs, both values and both ranks.

    Communicates: one small all-gather of the facts.
    """
    gathered: list[dict[str, object]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, dict(facts))
    for name in facts:
        for rank, other in enumerate(gathered):
            if other.get(name) != gathered[0][name]:
                raise UsageError(
                    f"all ranks need the same {name}, but rank 0 has {gathered[0][name]} and rank {rank} has "
                    f"{other.get(name)}. Start every machine with the same command and files."
                )


def first_of(value: str | None) -> str | None:
    """The text of the first rank that has one, on every rank.

    Communicates: one small all-gather of them.
    """
    gathered: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return next((each for each in gathered if each is not None), None)


def gather_ints(value: int) -> list[int]:
    """A number of every rank, in rank order.

    Communicates: one small all-gather.
    """
    gathered = [0] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def mean_over_ranks(value: torch.Tensor) -> float:
    """The mean of a 0-d tensor over all ranks, equal on every rank.

    Communicates: one all-reduce of one number.
    """
    total = value.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
