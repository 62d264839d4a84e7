"""When things that were issued to the simulated device would run, under given durations: what a step waits for.

The records of `Machine` say what the host issued, in which order, and to which stream. Here each gets a duration, and
streams, marks and waits their times. All of it is a *prediction*: nothing is timed, and kernels do not slow each other.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Record(NamedTuple):
    """One thing that was issued, as `take_records` gives it.

    Attributes:
        kind: "op", "copy" (between host and device), "collective", "mark", "wait" (of a stream for a mark), "host" (the
            host waits for a mark, for the end of its stream where the number is -1, for what is over where it is 0).
        name: Of the operation.
        label: Ranges that were open, the innermost first.
        stream: That it was issued to.
        read_bytes: Bytes of the device that it reads.
        written_bytes: Bytes of the device that it writes.
        number: Of a mark, or of that which is waited for; of a collective its ranks.
        shapes: Of an operation's tensor arguments.
        itemsize: Bytes of the widest element among them.
        allocated_bytes: That were allocated when it was issued.
    """

    kind: str
    name: str
    label: str
    stream: int
    read_bytes: int
    written_bytes: int
    number: int
    shapes: Sequence[Sequence[int]] = ()
    itemsize: int = 1
    allocated_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Durations:
    """What things cost on a machine.

    Attributes:
        name: Of the machine.
        half_flops: Of matrix products in elements of at most two bytes, per second, as they are reached.
        float_flops: The same of wider ones.
        attention_flops: Of fused attention, per second.
        memory_bytes_per_s: That kernels read and write, per second.
        kernel_s: Of each kernel, whatever it does: from the end of the one before it to its own begin.
        launch_s: From the host's call to the begin of a kernel on a device that has nothing to do.
        link_bytes_per_s: That a rank sends to its neighbour on a ring, per second.
        collective_s: Of each collective, whatever it moves.
        step_s: Of each of a ring's steps.
        host_link_bytes_per_s: Of copies between host and device, per second.
        op_host_s: Of the host, to issue an operation or copy.
        collective_host_s: Of the host, to issue a collective.
        order_host_s: Of the host, to issue a mark or a stream's wait.
        host_wait_s: Of the host, to wake up after it waited for the device.
    """

    name: str
    half_flops: float
    float_flops: float
    attention_flops: float
    memory_bytes_per_s: float
    kernel_s: float
    launch_s: float
    link_bytes_per_s: float
    collective_s: float
    step_s: float
    host_link_bytes_per_s: float
    op_host_s: float
    collective_host_s: float
    order_host_s: float
    host_wait_s: float


# Peaks are of NVIDIA's datasheet of the H100 SXM; the shares of them that are reached, all latencies and everything of
# the host are *assumptions*, the same for whatever is compared.
H100 = Durations(
    "H100 SXM, NVLink 4",
    half_flops=989e12 * 0.6,  # flop/s, dense bf16 tensor cores
    float_flops=67e12 * 0.8,  # flop/s, fp32 without tensor cores
    attention_flops=989e12 * 0.4,  # flop/s; FlashAttention-2's paper and those after it report 350 to 550e12
    memory_bytes_per_s=3.35e12 * 0.85,  # byte/s, HBM3
    kernel_s=1.5e-6,
    launch_s=5e-6,
    link_bytes_per_s=450e9 * 0.8,  # byte/s, NVLink 4 in one direction
    collective_s=10e-6,
    step_s=1.5e-6,
    host_link_bytes_per_s=64e9 * 0.8,  # byte/s, PCIe 5.0 x16 in one direction
    op_host_s=6e-6,
    collective_host_s=25e-6,
    order_host_s=1.5e-6,
    host_wait_s=10e-6,
)

_GATHERING = "index_select", "embedding", "gather", "nll_loss_forward"  # they read what they write, not all there is


def _product(left: Sequence[int], right: Sequence[int]) -> float:
    """Of (..., rows, inner) and (..., inner, columns)."""
    return 2.0 * math.prod(left) * right[-1]


def _attention(record: Record) -> float:
    """Of a causal one: each row sees half of the others."""
    query, key = record.shapes[0], record.shapes[1]
    forward = 4.0 * math.prod(query) * key[-2] / 2
    return forward * 2.5 if "backward" in record.name else forward


def _convolution(record: Record) -> float:
    if record.name == "convolution_backward":
        grad, _, weight = record.shapes[:3]
        return 2 * 2.0 * math.prod(grad) * math.prod(weight[1:])
    return 2.0 * record.written_bytes / record.itemsize * math.prod(record.shapes[1][1:])


_FLOPS: dict[str, Callable[[Record], float]] = {
    "mm": lambda r: _product(*r.shapes[:2]),
    "bmm": lambda r: _product(*r.shapes[:2]),
    "addmm": lambda r: _product(*r.shapes[1:3]),
    "baddbmm": lambda r: _product(*r.shapes[1:3]),
    "linear": lambda r: 2.0 * math.prod(r.shapes[0]) * r.shapes[1][0],
    "convolution": _convolution,
    "convolution_backward": _convolution,
}


def flops_of(record: Record) -> float:
    """Floating-point operations of matrix products, convolutions and attention; 0 of everything else."""
    if "dot_product" in record.name:
        return _attention(record)
    known = _FLOPS.get(record.name)
    return known(record) if known is not None else 0.0


def kernel_s(record: Record, durations: Durations) -> float:
    """How long an operation runs: as its products take or its bytes do, whichever is longer."""
    num_bytes = record.read_bytes + record.written_bytes
    if record.name in _GATHERING:
        num_bytes = 2 * record.written_bytes
    rate = durations.half_flops if record.itemsize <= 2 else durations.float_flops
    if "dot_product" in record.name:
        rate = durations.attention_flops
    return durations.kernel_s + max(flops_of(record) / rate, num_bytes / durations.memory_bytes_per_s)


def collective_s(record: Record, durations: Durations) -> float:
    """How long a collective runs, on a ring."""
    num_ranks = max(1, record.number)
    others = num_ranks - 1
    whole, num_steps = float(max(record.read_bytes, record.written_bytes)), others
    sent = whole * others / num_ranks
    if record.name == "all_reduce":
        sent, num_steps = 2 * sent, 2 * others
    elif record.name in ("broadcast", "reduce", "send", "recv"):
        sent = whole
    return durations.collective_s + num_steps * durations.step_s + sent / durations.link_bytes_per_s


@dataclass(frozen=True, slots=True)
class Stall:
    """The stream of the computation had nothing to do but to wait for communication.

    Attributes:
        label: Ranges that were open at what waited.
        name: Of what waited.
        at_s: When it could have begun.
        waited_s: For how long it did not.
    """

    label: str
    name: str
    at_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran: in which stream, from when to when, which record."""

    stream: int
    begin_s: float
    end_s: float
    index: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """What became of a list of records.

    Attributes:
        step_s: From the host's first call to the end of the last stream, or of the host.
        busy_s: In which the stream of the computation computed.
        exposed_s: In which it waited for the end of a collective, or of what follows one in its stream.
        held_s: In which it waited for any other stream.
        host_s: Until the host had issued everything.
        host_waits_s: In which the host waited for the device.
        communication_s: In which collectives ran.
        num_kernels: Operations, in all streams.
        num_copies: Between host and device.
        num_collectives: Those.
        stalls: What of `exposed_s` came where.
        spans: All that ran.
    """

    step_s: float
    busy_s: float
    exposed_s: float
    held_s: float
    host_s: float
    host_waits_s: float
    communication_s: float
    num_kernels: int
    num_copies: int
    num_collectives: int
    stalls: list[Stall] = field(repr=False)
    spans: list[Span] = field(repr=False)

    @property
    def starved_s(self) -> float:
        """In which the stream of the computation had nothing to do, and waited for no stream: the host was late."""
        return self.step_s - self.busy_s - self.exposed_s - self.held_s


@dataclass(slots=True)
class _Stream:
    ready_s: float = 0.0  # what it has run
    held_s: float = 0.0  # what it waits for
    holds_for_link: bool = False

    @property
    def end_s(self) -> float:
        return max(self.ready_s, self.held_s)


class _Clock:
    """Goes through records in the order in which the host issued them."""

    def __init__(self, records: Sequence[Record], durations: Durations, compute: int) -> None:
        self.durations, self.compute = durations, compute
        self.linked = {r.stream for r in records if r.kind == "collective"} - {compute}
        self.streams: dict[int, _Stream] = defaultdict(_Stream)
        self.marks: dict[int, tuple[float, bool]] = {}  # when, and whether communication is why
        self.host_s = self.host_waits_s = self.link_s = 0.0
        self.busy_s = self.exposed_s = self.other_s = 0.0
        self.stalls: list[Stall] = []
        self.spans: list[Span] = []

    def run(self, index: int, record: Record, duration_s: float, host_s: float, *, over_link: bool = False) -> None:
        """Something begins when its stream, the host and, of a collective, the one before it allow."""
        self.host_s += host_s
        stream = self.streams[record.stream]
        free_s = max(stream.ready_s, self.host_s + self.durations.launch_s)
        begin_s = max(free_s, stream.held_s)
        if record.stream == self.compute and begin_s > free_s:
            waited_s = begin_s - free_s
            if stream.holds_for_link:
                self.exposed_s += waited_s
                self.stalls.append(Stall(record.label, record.name, free_s, waited_s))
            else:
                self.other_s += waited_s
        if over_link:
            link_s, self.link_s = self.link_s, max(begin_s, self.link_s) + duration_s
            if record.stream == self.compute:  # and of its own stream that is all exposed
                self.exposed_s += self.link_s - begin_s
                self.stalls.append(Stall(record.label, record.name, begin_s, self.link_s - begin_s))
            begin_s = max(begin_s, link_s)
        elif record.stream == self.compute:
            self.busy_s += duration_s
        stream.ready_s = begin_s + duration_s
        self.spans.append(Span(record.stream, begin_s, stream.ready_s, index))

    def mark(self, record: Record) -> None:
        """Remember when all before it in its stream is over, and whether that is communication."""
        self.host_s += self.durations.order_host_s
        stream = self.streams[record.stream]
        by_link = record.stream in self.linked or (stream.holds_for_link and stream.held_s >= stream.ready_s)
        self.marks[record.number] = stream.end_s, by_link

    def wait(self, record: Record) -> None:
        """What follows in the stream begins after a mark."""
        self.host_s += self.durations.order_host_s
        at_s, by_link = self.marks.get(record.number, (0.0, False))
        stream = self.streams[record.stream]
        if at_s > stream.held_s:
            stream.held_s, stream.holds_for_link = at_s, by_link

    def wait_on_host(self, record: Record) -> None:
        """The host stops until a mark, or the end of a stream."""
        known = self.marks.get(record.number)
        at_s = 0.0 if known is None else known[0]
        if record.number < 0:
            at_s = self.streams[record.stream].end_s
        waited_s = max(0.0, at_s - self.host_s)
        self.host_waits_s += waited_s
        self.host_s += waited_s + self.durations.host_wait_s

    @property
    def end_s(self) -> float:
        """When all is over."""
        return max([self.host_s, *(stream.end_s for stream in self.streams.values())])

    def end(self) -> None:
        """Nothing follows: what communication still takes is exposed."""
        free_s = max(self.host_s, self.streams[self.compute].ready_s)
        waited_s = max([stream.end_s - free_s for n, stream in self.streams.items() if n in self.linked], default=0.0)
        if waited_s > 0:
            self.exposed_s += waited_s
            self.stalls.append(Stall("the end", "", free_s, waited_s))


def timeline(records: Iterable[Sequence[Any]], durations: Durations, *, compute: int = 0) -> Timeline:
    """When what was issued would run.

    Collectives run one after another in the order in which they were issued, whatever their streams, as those of one
    NCCL communicator do; other streams run side by side. Marks of before the first record count as over.

    Args:
        records: As `take_records` gives them.
        durations: Of a machine.
        compute: The stream of the computation.
    """
    issued = [Record(*record) for record in records]
    clock = _Clock(issued, durations, compute)
    for i, record in enumerate(issued):
        if record.kind == "op":
            clock.run(i, record, kernel_s(record, durations), durations.op_host_s)
        elif record.kind == "copy":
            num_bytes = max(record.read_bytes, record.written_bytes)
            copy_s = durations.kernel_s + num_bytes / durations.host_link_bytes_per_s
            clock.run(i, record, copy_s, durations.op_host_s)
        elif record.kind == "collective":
            clock.run(i, record, collective_s(record, durations), durations.collective_host_s, over_link=True)
        elif record.kind == "mark":
            clock.mark(record)
        elif record.kind == "wait":
            clock.wait(record)
        elif record.kind == "host":
            clock.wait_on_host(record)
        else:
            raise ValueError(f"a record is of no kind that is known: {record.kind!r}")
    clock.end()
    kinds = Counter(record.kind for record in issued)
    return Timeline(
        step_s=clock.end_s,
        busy_s=clock.busy_s,
        exposed_s=clock.exposed_s,
        held_s=clock.other_s,
        host_s=clock.host_s,
        host_waits_s=clock.host_waits_s,
        communication_s=sum(collective_s(r, durations) for r in issued if r.kind == "collective"),
        num_kernels=kinds["op"],
        num_copies=kinds["copy"],
        num_collectives=kinds["collective"],
        stalls=clock.stalls,
        spans=clock.spans,
    )
