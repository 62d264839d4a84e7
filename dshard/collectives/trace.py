"""Counting what the collectives put on the wire, and timing how long this rank waits for it."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist

from dshard import arguments
from dshard.collectives import flight
from dshard.collectives._c10d import ProcessGroup


@dataclass(frozen=True, slots=True)
class CommRecord:
    """One collective as this rank saw it.

    Args:
        kind: 'all_gather', 'reduce_scatter', 'all_reduce', 'all_to_all' or 'broadcast'; 'check' where ranks compare
            what they did.
        label: What it was for: a unit's name, or an operation.
        num_ranks: Ranks that took part.
        payload_bytes: Bytes of real elements that this rank sends under a direct or ring algorithm; between ranks of
            one host, that its peers read in its memory, or may.
        padding_bytes: Bytes that it sends because shards are uneven.
        header_bytes: Bytes that it sends so that the ranks can check that they mean the same unit.
        at_s: When it began, by `time.perf_counter()`.
        phase: Of the model then: "forward", "eval" (a forward without gradients), "backward", or "" between them.
    """

    kind: str
    label: str
    num_ranks: int
    payload_bytes: int
    padding_bytes: int = 0
    header_bytes: int = 0
    at_s: float = field(default=0.0, compare=False)
    phase: str = field(default="", compare=False)

    @property
    def total_bytes(self) -> int:
        """All bytes that this rank sends."""
        return self.payload_bytes + self.padding_bytes + self.header_bytes


class _Group(Protocol):
    """The ranks of a collective."""

    process_group: ProcessGroup
    num_ranks: int


class _Open:
    """The open traces of this process. Backward runs on threads of its own, so a context variable would miss it."""

    traces: "ClassVar[tuple[CommTrace, ...]]" = ()
    phase: ClassVar[Callable[[], str]] = staticmethod(lambda: "")


def phases_are(phase: Callable[[], str]) -> None:
    """Have records tell the phase that a function gives; rooms above know it."""
    _Open.phase = staticmethod(phase)


def is_recording() -> bool:
    """Whether anybody is told of collectives."""
    return bool(_Open.traces or flight.is_kept())


def record(
    kind: str, label: str, group: _Group, payload_bytes: int, padding_bytes: int = 0, header_bytes: int = 0
) -> None:
    """Tell every open trace, and the flight record, of a collective; the arguments are those of `CommRecord`."""
    if _Open.traces:
        numbers = group.num_ranks, payload_bytes, padding_bytes, header_bytes
        entry = CommRecord(kind, label, *numbers, time.perf_counter(), _Open.phase())
        for trace in _Open.traces:
            trace.records.append(entry)
    if (kept := flight.record_of(group.process_group)) is not None:
        kept.note(kind, label, group.process_group, payload_bytes + padding_bytes + header_bytes)


class Wait:
    """One wait for the peers, from its making to `end`.

    On CPU `wait` of a collective blocks the host, so its clock tells. On CUDA it returns at once and holds back the
    current stream: two events around it tell for how long. Which of the two happened is not asked: the longer one did.
    A test with stand-ins for the events holds the arithmetic of the CUDA half; one on a GPU is in `tests/gpu`.
    """

    __slots__ = ("_events", "_start_s", "_traces", "_waited_s")

    def __init__(self, traces: "tuple[CommTrace, ...]") -> None:
        self._traces = traces
        self._waited_s = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events[0].record()
        self._start_s = time.perf_counter()

    def end(self) -> None:
        """Stop, and tell the traces that were open at the start. Does not wait for the device."""
        self._waited_s = time.perf_counter() - self._start_s
        if self._events is not None:
            self._events[1].record()
        for trace in self._traces:
            trace.waits.append(self)

    @property
    def waited_s(self) -> float:
        """Seconds; on CUDA waits until the stream has come past the end."""
        if self._events is not None:
            start, end = self._events
            end.synchronize()
            self._waited_s = max(self._waited_s, start.elapsed_time(end) / 1e3)
            self._events = None
        return self._waited_s


def start_wait() -> Wait | None:
    """Begin to time a wait for the peers; None, and no more than a look, where no trace is open."""
    return Wait(_Open.traces) if _Open.traces else None


def waited_for_peer(group: ProcessGroup, peer: int, waited_s: float) -> None:
    """Tell every open trace of a wait for the header of a rank of a group."""
    for trace in _Open.traces:
        rank = dist.get_global_rank(group, peer)
        trace.peer_waits_s[rank] = trace.peer_waits_s.get(rank, 0.0) + waited_s


class CommTrace:
    """Counts collectives and their bytes, and times the waits for them, while it is open.

    ::

        with dshard.CommTrace() as trace:
            loss = model(x).sum()
            loss.backward()
        print(trace.calls("all_gather"), trace.total_bytes, trace.exposed_s)

    Bytes are those that *this rank sends*. An all-gather or reduce-scatter of `P` bytes over `N` ranks sends
    `(N - 1) / N * P`; an all-reduce `2 * (N - 1) / N * P`, or `(N - 1) * P` where a small tensor is exchanged directly.
    `payload_bytes` is that formula for the real elements; padding and headers are counted apart.

    `peer_waits_s` has seconds by rank of the world, where ranks say headers ahead of collectives (gloo): peers are
    waited for one after the other, and each counts with what it took beyond those before it.

    Communicates:
        Nothing.
    """

    def __init__(self) -> None:
        self.records: list[CommRecord] = []
        self.waits: list[Wait] = []
        self.peer_waits_s: dict[int, float] = {}  # by rank, beyond those for peers that were waited for before it

    def __enter__(self) -> "CommTrace":
        _Open.traces = (*_Open.traces, self)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        _Open.traces = tuple(trace for trace in _Open.traces if trace is not self)

    def __repr__(self) -> str:
        return f"<CommTrace: {len(self.records)} collectives, {self.total_bytes:,} bytes sent, {len(self.waits)} waits>"

    def select(self, kind: str | None = None, label: str | None = None) -> list[CommRecord]:
        """Records of one kind and label, or of all."""
        _check_selection("CommTrace.select", kind, label)
        return [r for r in self.records if kind in (None, r.kind) and label in (None, r.label)]

    def calls(self, kind: str | None = None, label: str | None = None) -> int:
        """Number of collectives of one kind and label, or of all."""
        _check_selection("CommTrace.calls", kind, label)
        return len(self.select(kind, label))

    @property
    def payload_bytes(self) -> int:
        """Bytes of real elements that this rank sent."""
        return sum(r.payload_bytes for r in self.records)

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding that this rank sent."""
        return sum(r.padding_bytes for r in self.records)

    @property
    def header_bytes(self) -> int:
        """Bytes of headers that this rank sent."""
        return sum(r.header_bytes for r in self.records)

    @property
    def total_bytes(self) -> int:
        """All bytes that this rank sent."""
        return sum(r.total_bytes for r in self.records)

    @property
    def exposed_s(self) -> float:
        """Seconds that this rank waited for its peers; communication that no computation hid.

        On CPU the host's time within `wait`; on CUDA that of the stream which the computation runs on, by events
        around each wait. Reading it there waits for the device.
        """
        return sum(wait.waited_s for wait in self.waits)

    def summary(self) -> str:
        """A table of calls and bytes by kind."""
        counts = Counter(r.kind for r in self.records)
        lines = [f"{'collective':<16}{'calls':>7}{'payload':>14}{'padding':>12}{'headers':>12}"]
        for kind, calls in sorted(counts.items()):
            rows = self.select(kind)
            cells = [sum(getattr(r, f"{part}_bytes") for r in rows) for part in ("payload", "padding", "header")]
            lines.append(f"{kind:<16}{calls:>7}{cells[0]:>14,}{cells[1]:>12,}{cells[2]:>12,}")
        return "\n".join(lines)


def _check_selection(who: str, kind: str | None, label: str | None) -> None:
    arguments.choice(
        who, "kind", kind, "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "check", None
    )
    arguments.text(who, "label", label, or_none=True)
