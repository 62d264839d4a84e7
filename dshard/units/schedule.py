"""In which order units are touched, as the last step showed it: what to gather ahead, and what to keep."""

import enum
import math
import time
from collections.abc import Callable, Container, Sequence
from typing import Generic, TypeVar

U = TypeVar("U")

_MAX_PASSED = 4  # units that nothing has to be done for, between one and the next that is foretold


class Phase(enum.Enum):
    """What a model does; each has a record of its own."""

    FORWARD = enum.auto()
    EVAL = enum.auto()  # a forward without gradients
    BACKWARD = enum.auto()


class Schedule(Generic[U]):
    """Records first touches, phase by phase, and foretells the next ones from the last phase of the same kind.

    What it foretells is a guess: a touch that comes in another order moves the guess to where that unit stands in the
    record, or ends it, and the record that is being written is right the next time. All ranks that touch units in one
    order guess alike.

    Args:
        depth: How many touches to foretell.
        is_free: Whether nothing has to be done for a unit ahead of its use. Such units are passed over as long as they
            are smaller, together, than the one that is foretold: what is further off would be gathered too early.
        size_of: Bytes of a unit.
    """

    def __init__(
        self,
        depth: int = 1,
        is_free: Callable[[U], bool] = lambda _: False,
        size_of: Callable[[U], int] = lambda _: 0,
    ) -> None:
        self.depth = depth
        self._is_free, self._size_of = is_free, size_of
        self.serial = 0  # changes with every phase, for units to know a first touch
        self.begun_s = 0.0  # when the last phase began, by `time.perf_counter()`
        self._phase: Phase | None = None
        self._record: list[U] = []
        self._known: dict[Phase, list[U]] = {}
        self._position: int | None = 0  # in the known record, of the touch that comes next
        self._distances: dict[U, int] | None = None

    @property
    def phase(self) -> Phase | None:
        """What runs, as far as is known."""
        return self._phase

    def knows(self, phase: Phase) -> bool:
        """Whether a phase of this kind has ended."""
        return phase in self._known

    def begin(self, phase: Phase) -> None:
        """A phase starts, and with it ends what ran before."""
        self.end()
        self._phase, self._position, self.begun_s = phase, 0, time.perf_counter()

    def end(self) -> None:
        """The phase ends; its record is what the next one like it is held to be."""
        if self._phase is not None and self._record:
            self._known[self._phase] = self._record
            if self._phase is Phase.BACKWARD:
                self._distances = None
        self._phase, self._record = None, []
        self.serial += 1

    def forget(self) -> None:
        """Units are others now: what is known of their order says nothing."""
        self.end()
        self._known.clear()
        self._distances = None

    def leave_out(self, phase: Phase, units: Container[U]) -> None:
        """Forget that some units were touched in the last phase of a kind."""
        self._known[phase] = [unit for unit in self._known.get(phase, ()) if unit not in units]
        if phase is Phase.BACKWARD:
            self._distances = None

    def touch(self, unit: U) -> Sequence[U]:
        """Note the first touch of a unit in this phase, or since it was gathered; gives what is held to come next."""
        if self._phase is None:
            return ()
        self._record.append(unit)
        known = self._known.get(self._phase, ())
        position = self._position
        if position is None or position >= len(known) or known[position] is not unit:
            position = self._find(known, unit, position or 0)
        self._position = None if position is None else position + 1
        return () if position is None else self._coming(known, position + 1)

    def _coming(self, known: Sequence[U], start: int) -> Sequence[U]:
        """The next ones of a record that need anything."""
        found: list[U] = []
        passed = 0
        for unit in known[start : start + self.depth + _MAX_PASSED]:
            if len(found) == self.depth:
                break
            if self._is_free(unit):
                passed += self._size_of(unit)
            elif passed and passed > self._size_of(unit):
                break
            else:
                found.append(unit)
        return found

    @staticmethod
    def _find(known: Sequence[U], unit: U, start: int) -> int | None:
        """Where `unit` stands in the record, ahead of `start` or else anywhere."""
        for positions in (range(start, len(known)), range(min(start, len(known)))):
            for position in positions:
                if known[position] is unit:
                    return position
        return None

    def distance(self, unit: U) -> float:
        """How far ahead the next backward touches a unit; before any was seen, it is held to run the forward back."""
        known = self._known.get(Phase.BACKWARD)
        if known is None:
            for back, touched in enumerate(reversed(self._record)):
                if touched is unit:
                    return back
            return math.inf
        if self._distances is None:
            self._distances = {}
            for position, touched in enumerate(known):
                self._distances.setdefault(touched, position)
        return self._distances.get(unit, math.inf)

    def in_forwards(self) -> dict[U, int]:
        """How far ahead forwards touch each unit: in this one, as the last one did, or in the next one."""
        touched = set(self._record)
        order = self._known.get(self._phase, self._record) if self._phase is not None else self._record
        found: dict[U, int] = {}
        for position, unit in enumerate(order):
            found.setdefault(unit, position + (len(order) if unit in touched else 0))
        return found


def to_drop(kept: Sequence[tuple[U, int, float]], budget_bytes: int) -> list[U]:
    """Which copies to drop so that the others fit into a budget: those whose next use is furthest ahead.

    For copies of one size that is the choice with the fewest gathers.

    Args:
        kept: Copies, their bytes, and how far ahead their next use is.
        budget_bytes: What may stay.

    Source: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.
    """
    dropped: list[U] = []
    total = sum(num_bytes for _, num_bytes, _ in kept)
    for unit, num_bytes, distance in sorted(kept, key=lambda item: item[2], reverse=True):
        if total <= budget_bytes and not math.isinf(distance):
            break
        dropped.append(unit)
        total -= num_bytes
    return dropped
