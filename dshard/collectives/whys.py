"""Why a rank has left a step, for the messages of its peers: written on its board."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from dshard.collectives import _c10d
from dshard.collectives._c10d import ProcessGroup
from dshard.collectives.board import ends_within
from dshard.collectives.lost import board

__all__ = ["tell_why", "told_by"]

_MAX_LENGTH = 300
_LIMIT_S = 1.5  # for the store to answer at all


def tell_why(text: str, numbers: Mapping[str, int]) -> None:
    """Write down why this rank leaves steps; by the name of a group the number of the step in it."""
    facts = {"why": text[:_MAX_LENGTH], "numbers": dict(numbers)}
    ends_within(_LIMIT_S, lambda: board().post("left", facts))


def told_by(rank: int, group: ProcessGroup, number: int) -> tuple[int, str]:
    """The number in the world of rank `rank` of a group, and why it has left a step; empty where it is unknown."""
    world_rank = dist.get_global_rank(group, rank)
    told: dict[int, Any] = ends_within(_LIMIT_S, lambda: board().read("left", [world_rank])) or {}
    facts = told.get(world_rank, {"why": "", "numbers": {}})
    return world_rank, facts["why"] if facts["numbers"].get(_c10d.name_of(group)) == number else ""
