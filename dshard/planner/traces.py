"""What a traced step is: phases of parts, of the events and the lives of storages that were noted."""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from torch import nn

from dshard.planner.flops import Op


@dataclass(frozen=True, slots=True)
class Part:
    """Modules that are gathered together: a unit of the plan to be.

    Args:
        label: Name of it.
        modules: In whose forward it is in use; those of several parts may hold one another.
        params: Full names of its parameters.
    """

    label: str
    modules: tuple[nn.Module, ...]
    params: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a step in which one part runs.

    Args:
        part: Its place among the parts.
        is_backward: Which half of the step.
        ops: What it runs, in order.
        early_bytes: The most that was alive of what is no parameter, buffer, input or parameter's gradient, until it
            computes its first gradient of a parameter.
        late_bytes: The same from then on; None if it computes none.
        end_bytes: What of these is alive when it ends.
    """

    part: int
    is_backward: bool
    ops: tuple[Op, ...]
    early_bytes: int
    late_bytes: int | None
    end_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most that was alive in it of what is no parameter, buffer, input or parameter's gradient."""
        return max(self.early_bytes, self.late_bytes or 0)

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return sum(op.flops for op in self.ops)


@dataclass(frozen=True, slots=True)
class Trace:
    """A step as it ran.

    Args:
        parts: As they were given.
        order: Their places, in the order in which forward used them first.
        phases: What ran, in order.
        input_bytes: Of the sample input.
        unused_in_backward: Parts whose parameters backward does not use.
    """

    parts: tuple[Part, ...]
    order: tuple[int, ...]
    phases: tuple[Phase, ...]
    input_bytes: int
    unused_in_backward: frozenset[int] = frozenset()

    @property
    def flops(self) -> int:
        """Floating-point operations of the step, recomputation included."""
        return sum(phase.flops for phase in self.phases)

    @property
    def peak_bytes(self) -> int:
        """The most that was alive of what is no parameter, buffer, input or parameter's gradient."""
        return max((phase.peak_bytes for phase in self.phases), default=0)

    def between(self, other: "Trace", share: float) -> "Trace | None":
        """The step between this one and one of another batch size, `share` of the way; None if they ran differently.

        Operations and bytes grow linearly with the batch, and a maximum of such is never above the line between two.
        """
        if len(self.phases) != len(other.phases) or self.order != other.order:
            return None
        phases = []
        for one, two in zip(self.phases, other.phases, strict=True):
            names = [[(op.name, op.dtype) for op in phase.ops] for phase in (one, two)]
            if (one.part, one.is_backward) != (two.part, two.is_backward) or names[0] != names[1]:
                return None
            if (one.late_bytes is None) != (two.late_bytes is None):
                return None
            ops = tuple(
                replace(a, flops=_between(a.flops, b.flops, share), num_bytes=_between(a.num_bytes, b.num_bytes, share))
                for a, b in zip(one.ops, two.ops, strict=True)
            )
            early, end = (
                _between(getattr(one, name), getattr(two, name), share) for name in ("early_bytes", "end_bytes")
            )
            late = None if one.late_bytes is None else _between(one.late_bytes, two.late_bytes or 0, share)
            phases.append(Phase(one.part, one.is_backward, ops, early, late, end))
        input_bytes = _between(self.input_bytes, other.input_bytes, share)
        return replace(self, phases=tuple(phases), input_bytes=input_bytes)


def _between(start: int, stop: int, share: float) -> int:
    """Rounded up."""
    return start + math.ceil((stop - start) * share)


@dataclass(slots=True)
class Life:
    """The life of a storage.

    Args:
        num_bytes: Of it.
        born: Number of the event that made it.
        died: Number of the first event after it was gone; None while it is there.
        is_gradient: Whether it holds a parameter's gradient.
    """

    num_bytes: int
    born: int
    died: int | None = None
    is_gradient: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """An operation.

    Args:
        part: That it belongs to.
        is_backward: Which half of the step.
        op: What it costs; None where it runs no kernel.
    """

    part: int
    is_backward: bool
    op: Op | None


def phases_of(events: Sequence[Event], lives: Sequence[Life]) -> tuple[Phase, ...]:
    """Events of one part in a row as one phase, with the bytes that were alive in it."""
    num = len(events)
    made, gone = [0] * (num + 1), [0] * (num + 1)
    for life in lives:
        if not life.is_gradient:
            made[life.born] += life.num_bytes
            gone[num if life.died is None else life.died] += life.num_bytes
    alive = list(accumulate(more - less for more, less in zip(made, gone, strict=True)))
    gradients = sorted(life.born for life in lives if life.is_gradient)
    found, start = [], 0
    for (part, is_backward), run in groupby(events, key=lambda event: (event.part, event.is_backward)):
        own = list(run)
        stop = start + len(own)
        place = bisect.bisect_left(gradients, start)
        turn = min(gradients[place], stop) if place < len(gradients) else stop
        found.append(
            Phase(
                part,
                is_backward,
                tuple(event.op for event in own if event.op is not None),
                max(alive[start:turn], default=0),
                max(alive[turn:stop]) if turn < stop else None,
                alive[stop - 1] - (gone[stop] if stop < num else 0),
            )
        )
        start = stop
    return tuple(found)
