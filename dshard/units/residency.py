"""What of a unit's full values is on a rank, what may follow what, and how its gathers lie in a device's streams."""

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dshard.autograd import in_backward
from dshard.collectives import SideStream
from dshard.errors import StateError
from dshard.units.buckets import Bucket

if TYPE_CHECKING:
    from dshard.units.unit import Unit


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


def refuse_meta(names: Sequence[str]) -> None:
    """Raise, for there are parameters that have no memory yet."""
    raise StateError(
        f"{names[0]}: a parameter needs memory before it is used, but this one and {len(names) - 1} more "
        "are on the meta device. Call to_empty(device=...) on the model and initialize it, or load a "
        "state_dict with assign=True."
    )


class Beside:
    """What the gathers of one unit have to do with other work of its device, which has streams.

    A gather is started behind all that the current stream was given, for it may have written the shards. In the
    backward of the forward that gathered them last, they are what they were: then it starts in a stream of its own.

    Args:
        unit: Whose parameters.
    """

    __slots__ = ("_known", "_unit")

    def __init__(self, unit: "Unit") -> None:
        self._unit = unit
        self._known: tuple[int, Any] = -1, None  # the phase of the last gather behind all else, and what it gathered

    def begin(self, shards: Sequence[Tensor], wait: Callable[[], None]) -> SideStream | None:
        """A gather is to start; gives the stream for it, if not the current one.

        Args:
            shards: That are gathered.
            wait: Ends the gather; called ahead of writes to the shards.
        """
        storages = [param.shard_storage for param in self._unit.params]
        for storage in storages:
            storage.before_write = wait
        found = [(id(s), s._version, each.signature) for s, each in zip(shards, storages, strict=True)]
        serial = self._unit.model.schedule.serial
        if in_backward() and self._known == (serial - 1, found):
            return self._side()
        self._known = serial, found
        return None

    def end(self) -> None:
        """It has ended, and its memory is used no more but for the full values."""
        self._side().mark()
        for param in self._unit.params:
            param.shard_storage.before_write = None

    def _side(self) -> SideStream:
        assert self._unit.device is not None
        return self._unit.model.side_stream(self._unit.device)


@contextmanager
def opened(side: SideStream, bucket: Bucket) -> Iterator[bool]:
    """Have a gather of a bucket start in a stream, if no full values stay in its memory; gives whether it does."""
    if bucket.plan.is_in_rows or bucket.group.num_ranks == 1:
        yield False
        return
    with side.open():
        yield True
