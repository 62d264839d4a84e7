"""Worlds of ranks that tests share, and what keeps them from slowing one another down."""

import os
from contextlib import suppress
from typing import Any, ClassVar

import torch.distributed as dist

from dshard.testing import RemoteRankError, World, WorldPool
from tests.gloo_threads import have_gloo_stand_back

_MAX_GROUPS = 12  # of a rank that goes on with the next file


class RestedWorld(World):
    """A world whose ranks are not kept from running by gloo's threads."""

    def start(self) -> None:
        if not self.is_running:
            super().start()
            self.run(have_gloo_stand_back)


class MessagingWorld(RestedWorld):
    """A world whose ranks exchange messages, as those of several hosts do."""

    def start(self) -> None:
        if not self.is_running:
            super().start()
            self.run(_exchange_messages)


def _exchange_messages() -> None:
    os.environ["DSHARD_TRANSPORT"] = "messages"


def _num_groups() -> int:
    c10d: Any = dist.distributed_c10d  # type: ignore[attr-defined]
    return len(c10d._world.pg_map)


class RestedPool(WorldPool):
    """Such worlds by size; those that have made many process groups end with the file of tests.

    For each group gloo has a thread that wakes a hundred times a second, as long as the group is there: the hundreds
    that a session makes took a sixth of two cores.
    """

    open: ClassVar[list["RestedPool"]] = []

    def __init__(self, kind: type[World] = RestedWorld) -> None:
        super().__init__()
        self._kind = kind
        self.open.append(self)

    def get_world(self, num_ranks: int) -> World:
        return self._worlds.setdefault(num_ranks, self._kind(num_ranks))

    def rest(self) -> None:
        """End the ranks that have many groups; the next call starts others."""
        for world in self._worlds.values():
            with suppress(RemoteRankError):
                if world.is_running and max(world.run(_num_groups)) > _MAX_GROUPS:
                    world.close()

    def close(self) -> None:
        super().close()
        if self in self.open:
            self.open.remove(self)
