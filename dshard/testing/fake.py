"""A process group that communicates nothing: one process plays one rank of a world of any size."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from dshard import arguments


def _create_group(common_options: Any, backend_options: Any) -> Any:
    group_type: Any = FakeProcessGroup  # its stub lacks the third parameter
    return group_type._create_internal(common_options.group_rank, common_options.group_size, backend_options)


def _register_backend() -> None:
    """Make the backend name "fake" known to torch, which knows the class but does not register it outside its tests."""
    if "FAKE" not in dist.Backend._plugins:
        dist.Backend.register_backend("fake", _create_group, extended_api=True, devices=["cpu", "cuda"])


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[dist.ProcessGroup]:
    """Make torch's fake process group the default one inside the block.

    Shapes, placements, byte counts and the order of collectives are those of the real world; the *values* that come out
    of a collective are not.

    Args:
        rank: The rank that this process plays, in `[0, world_size)`.
        world_size: Number of ranks.

    Yields:
        The default process group.

    Raises:
        ValueError: `rank` is not a rank of the world.
        RuntimeError: This process has a default process group already.

    Communicates:
        Nothing.

    Example:
        >>> import torch.distributed as dist
        >>> with fake_world(rank=3, world_size=8):
        ...     dist.get_rank(), dist.get_world_size()
        (3, 8)
        >>> dist.is_initialized()
        False
    """
    rank = arguments.count("fake_world", "rank", rank, least=0)
    world_size = arguments.count("fake_world", "world_size", world_size)
    if rank >= world_size:
        raise ValueError(f"fake_world: rank must be in [0, {world_size}), but it is {rank}. Pass a rank of the world.")
    if dist.is_initialized():
        raise RuntimeError(
            f"fake_world: the process must have no default process group, but it has one ({dist.get_backend()}, "
            f"{dist.get_world_size()} ranks). Call torch.distributed.destroy_process_group() first."
        )
    _register_backend()
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
    try:
        yield dist.group.WORLD  # type: ignore[misc]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
