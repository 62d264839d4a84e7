"""Which gradients have arrived in a backward, and to which reduction each belongs."""

from dataclasses import dataclass

from dshard.gradients.reduction import GradReduction
from dshard.units.buckets import Bucket
from dshard.units.unit import Unit


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Which gradients of a unit have arrived in the backward that is running.

    Args:
        all_buckets: Of the parameters that take a gradient.
        buckets: For each of those parameters, its bucket.
        arrived: Those whose gradients are here.
        open: For each parameter, the reduction that took the last gradient of its bucket.
    """

    all_buckets: list[Bucket]
    buckets: dict[int, Bucket]
    arrived: set[int]
    open: dict[int, GradReduction]

    @classmethod
    def of(cls, unit: Unit) -> "Arrivals":
        """None so far."""
        buckets = unit.buckets(unit.trainable, unit.reduce_dtypes)
        return cls(buckets, {slot: bucket for bucket in buckets for slot in bucket.slots}, set(), {})


@dataclass(frozen=True, slots=True)
class ReductionKey:
    """Which reduction a gradient belongs to.

    Args:
        unit_id: Identity of the unit.
        slots: The bucket's parameters.
        is_captured: Whether `autograd.grad` takes the result, rather than `.grad`.
    """

    unit_id: int
    slots: tuple[int, ...]
    is_captured: bool

    @property
    def order(self) -> tuple[tuple[int, ...], bool]:
        """Orders the reductions of one unit, on all ranks alike."""
        return self.slots, self.is_captured
