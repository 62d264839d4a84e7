"""What of a unit's full values is on a rank, and what may follow what."""

import enum


class Residency(enum.Enum):
    """What of a unit's full values is on this rank, besides the shards."""

    SHARDED = "sharded"  # nothing
    IN_FLIGHT = "in flight"  # messages are under way
    GATHERED = "gathered"  # all, fresh or stale
    IN_PARTS = "in parts"  # what as few neighbours as `reshard_after_forward` says need from each other

    __hash__ = object.__hash__  # Enum's own is a function of Python


TRANSITIONS: dict[Residency, frozenset[Residency]] = {
    Residency.SHARDED: frozenset({Residency.IN_FLIGHT}),
    Residency.IN_FLIGHT: frozenset({Residency.GATHERED, Residency.SHARDED}),
    Residency.GATHERED: frozenset({Residency.SHARDED, Residency.IN_PARTS}),
    Residency.IN_PARTS: frozenset({Residency.IN_FLIGHT, Residency.SHARDED}),
}
