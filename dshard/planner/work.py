"""What half a step of a unit computes, in seconds by what takes them."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of a forward or a backward.

    Args:
        products_s: Arithmetic of matrix products and convolutions.
        attention_s: Arithmetic of attention.
        traffic_s: What is read from memory and written to it.
        copies_s: Of these alone what goes into and out of buffers of collectives.
        starts_s: Of kernels.
        cut_s: Collectives among the ranks over which layers are cut; what computes waits for them.
    """

    products_s: float = 0.0
    attention_s: float = 0.0
    traffic_s: float = 0.0
    copies_s: float = 0.0
    starts_s: float = 0.0
    cut_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))
