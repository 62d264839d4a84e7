"""Why a rank has left a step, for the messages of its peers: written on its board."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from dshard.collectives import _c10d
from dshard.collectives._c10d import ProcessGroup
from dshard.collectives.board import STORE_S, ends_within
from dshard.collectives.lost import Verdict, board, last_verdict

_MAX_LENGTH = 500


class Why(NamedTuple):
    """Why a rank has left a step.

    Args:
        text: In the words of an exception; empty where it is unknown.
        differs: Whether the ranks were found to mean different things.
        lost: Whom it found to be lost.
    """

    text: str
    differs: bool = False
    lost: Verdict | None = None


def tell_why(why: Why, numbers: Mapping[str, int]) -> None:
    """Write down why this rank leaves steps; by the name of a group the number of the step in it."""
    lost = last_verdict()
    facts = {"why": why.text[:_MAX_LENGTH], "differs": why.differs, "numbers": dict(numbers)}
    if lost is not None:
        facts["lost"] = [list(lost.ranks), lost.text[:_MAX_LENGTH]]
    ends_within(STORE_S, lambda: board().post("left", facts))


def told_by(rank: int, group: ProcessGroup, number: int) -> tuple[int, Why]:
    """The number in the world of rank `rank` of a group, and why it has left a step."""
    world_rank = dist.get_global_rank(group, rank)
    told: dict[int, Any] = ends_within(STORE_S, lambda: board().read("left", [world_rank])) or {}
    facts = told.get(world_rank)
    if facts is None or facts["numbers"].get(_c10d.name_of(group)) != number:
        return world_rank, Why("")
    ranks, text = facts.get("lost", ((), ""))
    text += "" if text.endswith(" found)") else f" (as rank {world_rank} found)"
    lost = Verdict(tuple(ranks), text) if ranks else None
    return world_rank, Why(facts["why"], facts["differs"], lost)
