"""When a step computes and when it communicates: a simulation of one compute stream and one channel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add

from dshard.arguments import checked
from dshard.planner.costs import Cluster, ModelCosts
from dshard.planner.memory import moments
from dshard.planner.options import Option, options_of
from dshard.policies import Strategy

_Together = Callable[[float, float], float]


@dataclass(frozen=True, slots=True)
class Segment:
    """What one stream does from `start_s` to `stop_s`.

    Args:
        name: Of the unit.
        kind: "forward", "backward" or "step" on the compute stream; "gather", "slices" or "reduce" on the channel.
        stream: "compute" or "comm".
        start_s: Since the start of the step.
        stop_s: Likewise.
    """

    name: str
    kind: str
    stream: str
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """Bytes that live from `start_s` on."""

    start_s: float
    num_bytes: int
    phase: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step.

    Args:
        step_s: Its time.
        compute_s: Of which the compute stream is busy.
        exposed_s: Of which it waits for the channel.
        segments: What runs when.
        memory: Bytes over time.
    """

    step_s: float
    compute_s: float
    exposed_s: float
    segments: tuple[Segment, ...]
    memory: tuple[MemoryEvent, ...]

    @property
    def peak_bytes(self) -> int:
        """The most bytes at one moment."""
        return max(event.num_bytes for event in self.memory)


@checked
def step_time(model: ModelCosts, strategies: Sequence[Strategy | str], cluster: Cluster) -> float:
    """Time of a step: the same as `simulate` gives, as the sum that the solver makes smallest.

    Where collectives run beside computation, forward waits for the first gather, and then for unit `i` as long as
    `max(forward i, gather i + 1)`. Backward waits for the last unit's gather, and then as long as
    `max(backward i, reduction i + 1 and gather i - 1)`; last comes the reduction of the first unit, and the optimizer.
    Elsewhere each `max` is a sum.
    """
    together = max if cluster.overlaps else add
    options = options_of(model, strategies, cluster)
    again = model.num_backwards - 1
    return (
        _forward_s(options, [o.gather_s for o in options], together)
        + again * _forward_s(options, [o.gather_again_s for o in options], together)
        + again * _backward_s(options, [o.reduce_early_s for o in options], together)
        + _backward_s(options, [o.reduce_s for o in options], together)
        + sum(o.optimizer_s for o in options)
    )


def _forward_s(options: Sequence[Option], gather_s: Sequence[float], together: _Together) -> float:
    following = [*gather_s[1:], 0.0]
    slots = (together(o.forward_s, o.forward_comm_s + next_s) for o, next_s in zip(options, following, strict=True))
    return gather_s[0] + sum(slots)


def _backward_s(options: Sequence[Option], reduce_s: Sequence[float], together: _Together) -> float:
    total_s = options[-1].gather_backward_s + reduce_s[0]
    for i, option in enumerate(options):
        comm_s = reduce_s[i + 1] if i + 1 < len(options) else 0.0
        comm_s += option.backward_comm_s + (options[i - 1].gather_backward_s if i else 0.0)
        total_s += together(option.backward_s, comm_s)
    return total_s


@checked
def simulate(model: ModelCosts, strategies: Sequence[Strategy | str], cluster: Cluster) -> Timeline:
    """Run a step, event by event.

    One channel takes gathers and reductions in the order in which they are issued. When a unit starts to compute, its
    own slices and then the gather of the next unit are issued; in backward, the reduction of the unit before it in
    time comes first, and must end before the unit's own is issued, since one reduction may be in flight. A phase starts
    when the channel is idle. Where collectives do not run beside computation, each runs once what computes has ended,
    and what computes next waits for it.
    """
    options = options_of(model, strategies, cluster)
    streams = _Streams([unit.name for unit in model.units], overlaps=cluster.overlaps)
    for number in range(model.num_backwards):
        is_last = number == model.num_backwards - 1
        _run_forward(streams, options, [o.gather_again_s if number else o.gather_s for o in options])
        _run_backward(streams, options, [o.reduce_s if is_last else o.reduce_early_s for o in options])
    for i, option in enumerate(options):
        streams.compute(i, "step", streams.compute_free_s, option.optimizer_s)
    live = {(moment.phase, moment.unit): moment.num_bytes for moment in moments(model, strategies, cluster)}
    memory = tuple(MemoryEvent(start_s, live[phase, unit], phase) for start_s, phase, unit in streams.starts)
    step_s = streams.compute_free_s
    compute_s = sum(segment.stop_s - segment.start_s for segment in streams.segments if segment.stream == "compute")
    return Timeline(step_s, compute_s, step_s - compute_s, tuple(streams.segments), memory)


class _Streams:
    """The two streams, and what has run on them.

    Args:
        names: Of the units.
        overlaps: Whether the two run at the same time.
    """

    def __init__(self, names: Sequence[str], *, overlaps: bool) -> None:
        self._names, self._overlaps = names, overlaps
        self.segments: list[Segment] = []
        self.starts: list[tuple[float, str, int]] = []  # of moments: when, phase, unit
        self.compute_free_s = self.comm_free_s = 0.0

    def compute(self, unit: int, kind: str, ready_s: float, duration_s: float) -> float:
        """Run a unit when it is ready and the compute stream free; gives its start."""
        start_s = max(self.compute_free_s, ready_s)
        self.compute_free_s = start_s + duration_s
        self.segments.append(Segment(self._names[unit], kind, "compute", start_s, self.compute_free_s))
        self.starts.append((start_s, kind, unit))
        return start_s

    def send(self, unit: int, kind: str, issued_s: float, duration_s: float) -> float:
        """Queue a collective; gives its end."""
        if duration_s == 0:
            return issued_s
        start_s = max(self.comm_free_s, issued_s if self._overlaps else self.compute_free_s)
        self.comm_free_s = start_s + duration_s
        if not self._overlaps:
            self.compute_free_s = self.comm_free_s
        self.segments.append(Segment(self._names[unit], kind, "comm", start_s, self.comm_free_s))
        return self.comm_free_s

    def wait(self, until_s: float) -> None:
        """Have the compute stream do nothing until then."""
        self.compute_free_s = max(self.compute_free_s, until_s)


def _run_forward(streams: _Streams, options: Sequence[Option], gather_s: Sequence[float]) -> None:
    ready_s = streams.send(0, "gather", streams.compute_free_s, gather_s[0])
    for i, option in enumerate(options):
        start_s = streams.compute(i, "forward", ready_s, option.forward_s)
        streams.send(i, "slices", start_s, option.forward_comm_s)
        if i + 1 < len(options):
            ready_s = streams.send(i + 1, "gather", start_s, gather_s[i + 1])
    streams.wait(streams.comm_free_s)


def _run_backward(streams: _Streams, options: Sequence[Option], reduce_s: Sequence[float]) -> None:
    last = len(options) - 1
    ready_s = streams.send(last, "gather", streams.compute_free_s, options[last].gather_backward_s)
    for i in range(last, -1, -1):
        option = options[i]
        start_s = streams.compute(i, "backward", ready_s, option.backward_s)
        for phase in ("gradients", "slices"):  # from somewhere in between
            streams.starts.append((start_s + option.backward_s / 2, phase, i))
        if i < last:
            streams.starts.append((streams.compute_free_s, "reduce", i + 1))
        reduced_s = streams.send(i + 1, "reduce", start_s, reduce_s[i + 1]) if i < last else start_s
        sliced_s = streams.send(i, "slices", start_s, option.backward_comm_s)
        streams.wait(max(reduced_s, sliced_s))
        if i > 0:
            ready_s = streams.send(i - 1, "gather", start_s, options[i - 1].gather_backward_s)
    streams.starts.append((streams.compute_free_s, "reduce", 0))
    streams.wait(streams.send(0, "reduce", streams.compute_free_s, reduce_s[0]))
