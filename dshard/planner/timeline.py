"""When a step computes and when it communicates, by a simulation of both; what its time is made of, and a picture."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dshard.errors import PlanError
from dshard.planner.costs import Cluster, Link, Links, ModelCosts, UnitCosts
from dshard.planner.files import write_picture
from dshard.planner.memory import moments
from dshard.planner.options import Option, options_of, read_step
from dshard.planner.texts import bytes_text, number_text, wrapped
from dshard.policies import Strategy

_OF_WORK = {
    "products_s": "products",
    "attention_s": "attention",
    "traffic_s": "memory traffic",
    "copies_s": "copies for collectives",
    "starts_s": "starts of kernels",
    "cut_s": "tensor parallelism",
}
_COMPUTED, _SLICES, _OPTIMIZER = "computation", "slices", "optimizer"
SLOWEST, BESIDE = "the slowest of the devices", "computing beside collectives"
_WAITS = {"gather": "gathers", "reduce": "reductions", "slices": "slices"}
_ROUNDING, _NO_TIME = 1e-12, 1e-30
_COLORS = {"forward": "C0", "backward": "C3", "step": "C7", "gather": "C2", "slices": "C8", "reduce": "C1"}
_ROWS = {"compute": 1, "comm": 0}
_STREAMS = {"compute": "computation", "comm": "communication"}


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


def step_time(model: ModelCosts, strategies: Sequence[Strategy | str], cluster: Cluster) -> float:
    """Time of a step, as `simulate` has it.

    Where collectives run beside computation, forward waits for the first gather, and then for unit `i` as long as
    `max(forward i, gather i + 1)`. Backward waits for the last unit's gather, and then as long as
    `max(backward i, reduction i + 1 and gather i - 1)`; last comes the reduction of the first unit, and the optimizer.
    Elsewhere each `max` is a sum. The solver makes that sum smallest.
    """
    strategies = read_step("step_time", model, strategies, cluster)
    return _run(model, options_of(model, strategies, cluster), overlaps=cluster.overlaps).compute_free_s


def deferred_step_time(model: ModelCosts, strategies: Sequence[Strategy | str], cluster: Cluster) -> float | None:
    """Time of a step, if the host steps what is kept in the CPU's memory beside the forward of the next one.

    From the end of a backward on the host steps units in the order in which forward uses them, and none is gathered
    before it was stepped: what forward is too short to hide is waited for there. Units that owners step, and those that
    are kept on the device, are stepped at once.

    Returns:
        Seconds between the ends of two backwards; None where nothing is stepped in the CPU's memory, or where the cores
        that would step compute, as over gloo.
    """
    strategies = read_step("deferred_step_time", model, strategies, cluster)
    if not cluster.overlaps or not any(map(_can_wait, model.units)):
        return None
    return _run(model, options_of(model, strategies, cluster), overlaps=True, defers=True).compute_free_s


def _can_wait(unit: UnitCosts) -> bool:
    return unit.is_offloaded and not any(param.owner_work for param in unit.params)


def simulate(model: ModelCosts, strategies: Sequence[Strategy | str], cluster: Cluster) -> Timeline:
    """Run a step, event by event.

    One channel takes gathers and reductions in the order in which they are issued. When a unit starts to compute, its
    own slices and then the gather of the next unit are issued; in backward, the reduction of the unit before it in
    time comes first, and must end before the unit's own is issued, since one reduction may be in flight. A phase starts
    when the channel is idle. Where collectives do not run beside computation, each runs once what computes has ended,
    and what computes next waits for it.
    """
    strategies = read_step("simulate", model, strategies, cluster)
    streams = _run(model, options_of(model, strategies, cluster), overlaps=cluster.overlaps)
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


def _run(model: ModelCosts, options: Sequence[Option], *, overlaps: bool, defers: bool = False) -> _Streams:
    """A step on both streams; the optimizer's comes last, or where it is deferred, that of the last backward first."""
    streams = _Streams([unit.name for unit in model.units], overlaps=overlaps)
    stepped_s, is_stepped_s = 0.0, [0.0] * len(options)  # when the host has stepped all so far, and each unit
    if defers:
        for i, (unit, option) in enumerate(zip(model.units, options, strict=True)):
            if _can_wait(unit):
                stepped_s += option.optimizer_s
                is_stepped_s[i] = stepped_s
            else:
                streams.compute(i, "step", streams.compute_free_s, option.optimizer_s)
    for number in range(model.num_backwards):
        is_last = number == model.num_backwards - 1
        _run_forward(streams, options, [o.gather_again_s if number else o.gather_s for o in options], is_stepped_s)
        _run_backward(streams, options, [o.reduce_s if is_last else o.reduce_early_s for o in options])
    for i, option in enumerate(() if defers else options):
        if option.owners_bytes:
            streams.starts.append((streams.compute_free_s, "owners", i))
        streams.compute(i, "step", streams.compute_free_s, option.optimizer_s)
    return streams


def _run_forward(
    streams: _Streams, options: Sequence[Option], gather_s: Sequence[float], is_stepped_s: Sequence[float]
) -> None:
    """A forward, of which no unit is gathered before it was stepped."""
    ready_s = streams.send(0, "gather", max(streams.compute_free_s, is_stepped_s[0]), gather_s[0])
    for i, option in enumerate(options):
        start_s = streams.compute(i, "forward", ready_s, option.forward_s)
        streams.send(i, "slices", start_s, option.forward_comm_s)
        if i + 1 < len(options):
            ready_s = streams.send(i + 1, "gather", max(start_s, is_stepped_s[i + 1]), gather_s[i + 1])
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


def terms_of(
    model: ModelCosts, strategies: Sequence[Strategy], cluster: Cluster, timeline: Timeline
) -> dict[str, float]:
    """Seconds of a simulated step by what takes them; terms that take none are left out.

    They add up to the step. Communication counts as far as what computes waits for it; the part of a collective that
    goes between hosts is taken to be waited for like the rest of it.
    """
    options = options_of(model, strategies, cluster)
    found: dict[str, float] = defaultdict(float)
    alone = options_of(model, strategies, replace(cluster, interference=0.0))
    for unit, option, undisturbed in zip(model.units, options, alone, strict=True):
        for term, seconds in _computed(unit, undisturbed, cluster.stragglers):
            found[term] += model.num_backwards * seconds
        lost_s = option.forward_s + option.backward_s - undisturbed.forward_s - undisturbed.backward_s
        found[BESIDE] += model.num_backwards * lost_s
        found[_OPTIMIZER] += option.optimizer_s
    between = _saved(model, options, options_of(model, strategies, _near(cluster)))
    copied = _saved(model, options, options_of(_at_once(model), strategies, cluster))
    for name, kind, seconds in _waits(timeline):
        far, copies = between[name, kind], copied[name, kind]
        found[f"waiting for {_WAITS[kind]} between hosts"] += far * seconds
        found[f"waiting for {_WAITS[kind]} within hosts"] += (1 - far - copies) * seconds
        found["waiting for copies of what is kept in the CPU's memory"] += copies * seconds
    least_s = _ROUNDING * sum(found.values())  # of a difference that is none
    return {term: seconds for term, seconds in sorted(found.items(), key=lambda item: -item[1]) if seconds > least_s}


def bound_text(terms: Mapping[str, float]) -> list[str]:
    """One sentence: what takes most of a step, and what takes the rest."""
    step_s = sum(terms.values())
    if not step_s:
        return []
    (largest, most), *rest = sorted(terms.items(), key=lambda item: -item[1])
    start = f"the step is bound by {largest}: {most / step_s:.1%} of it{';' if rest else ''}"
    return wrapped(start, (f"{term} {seconds / step_s:.1%}" for term, seconds in rest))


def _computed(unit: UnitCosts, option: Option, stragglers: float) -> Iterator[tuple[str, float]]:
    """Seconds of one forward and backward of a unit by term, where no collective disturbs it.

    An option that takes longer than its unit on the slowest device does so for slices.
    """
    halves = ((unit.forward_s, option.forward_s), (unit.backward_s, option.backward_s))
    for place, (own_s, took_s) in enumerate(halves):
        yield SLOWEST, own_s * stragglers
        yield _SLICES, took_s - own_s * (1 + stragglers)
        work = unit.work[place] if place < len(unit.work) else None
        if work is None or not work.total_s:
            yield _COMPUTED, own_s
            continue
        for name, term in _OF_WORK.items():  # times may have been scaled since, to what was measured
            yield term, own_s * getattr(work, name) / work.total_s


def _waits(timeline: Timeline) -> Iterator[tuple[str, str, float]]:
    """Unit, kind and seconds of each stretch of a collective for which the compute stream waits."""
    sent = [segment for segment in timeline.segments if segment.stream == "comm"]
    place, free_s = 0, 0.0
    for segment in timeline.segments:
        if segment.stream != "compute":
            continue
        while place < len(sent) and sent[place].start_s < segment.start_s:
            seconds = min(sent[place].stop_s, segment.start_s) - max(sent[place].start_s, free_s)
            if seconds > 0:
                yield sent[place].name, sent[place].kind, seconds
            if sent[place].stop_s > segment.start_s:
                break
            place += 1
        free_s = segment.stop_s


def _near(cluster: Cluster) -> Cluster:
    """The same ranks, whose links between hosts take no time."""
    free = Links.of(Link(0.0, 0.0))
    is_one_host = cluster.num_ranks <= cluster.ranks_per_host
    return replace(
        cluster,
        across=None if cluster.across is None else free,
        shards={num: links if cluster.is_inside(num) else free for num, links in cluster.shards.items()},
        replicas={num: links if is_one_host else free for num, links in cluster.replicas.items()},
    )


def _at_once(model: ModelCosts) -> ModelCosts:
    """The same units, of which copies from the CPU's memory take next to no time."""
    units = (replace(unit, home_s_per_byte=min(unit.home_s_per_byte, _NO_TIME)) for unit in model.units)
    return replace(model, units=tuple(units))


def _saved(model: ModelCosts, options: Sequence[Option], others: Sequence[Option]) -> dict[tuple[str, str], float]:
    """Of each unit's communication the part of its time that it does not take under other circumstances."""
    found = {}
    for unit, option, other in zip(model.units, options, others, strict=True):
        for kind, name in (("gather", "gather_s"), ("reduce", "reduce_s"), ("slices", "forward_comm_s")):
            whole_s = getattr(option, name)
            found[unit.name, kind] = 1 - getattr(other, name) / whole_s if whole_s else 0.0
    return found


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise PlanError("plot: needs matplotlib, but it is not installed. Run: pip install 'dshard[cli]'.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_timeline(path: Path, timeline: Timeline, *, title: str, limit_bytes: int = 0) -> None:
    """Both streams over time, and the bytes that live, by matplotlib, which is optional.

    Args:
        path: Its suffix says the format.
        timeline: A simulated step.
        title: Above it.
        limit_bytes: Drawn as a line; 0 for none.
    """
    pyplot = _pyplot()
    figure, (streams, memory) = pyplot.subplots(
        2, 1, figsize=(11, 4.8), sharex=True, height_ratios=(1, 1.2), layout="constrained"
    )
    unit, scale = ("s", 1.0) if timeline.step_s >= 10 else ("ms", 1e3)
    for kind, color in _COLORS.items():
        for stream, row in _ROWS.items():
            found = [s for s in timeline.segments if s.kind == kind and s.stream == stream]
            if found:
                spans = [(s.start_s * scale, (s.stop_s - s.start_s) * scale) for s in found]
                edge = "white" if stream == "compute" else color  # the latter so that no short one gets lost
                streams.broken_barh(
                    spans, (row - 0.4, 0.8), facecolors=color, edgecolors=edge, linewidth=0.3, label=kind
                )
    streams.set_yticks(list(_ROWS.values()), [_STREAMS[name] for name in _ROWS])
    streams.legend(frameon=False, fontsize=8, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    events = sorted(timeline.memory, key=lambda event: event.start_s)
    times = [event.start_s * scale for event in events] + [timeline.step_s * scale]
    sizes = [event.num_bytes / 2**30 for event in events]
    memory.step(times, [*sizes, *sizes[-1:]], where="post", lw=1, label="memory")
    if limit_bytes:
        memory.axhline(limit_bytes / 2**30, color="C3", ls="--", lw=1, label=f"limit, {bytes_text(limit_bytes)}")
    memory.legend(frameon=False, fontsize=8, ncols=2, loc="lower right")
    memory.set(xlabel=unit, ylabel="GiB per rank", ylim=(0, None))
    for axis in (memory.xaxis, memory.yaxis):
        axis.set_major_formatter(_plain)
    figure.suptitle(title, fontsize=9, wrap=True)
    write_picture(path, figure, dpi=130)
    pyplot.close(figure)


def _plain(value: float, _: object) -> str:
    return number_text(value)
