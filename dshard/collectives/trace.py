"""Counting what the collectives put on the wire."""

from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar

__all__ = ["CommRecord", "CommTrace", "record"]


@dataclass(frozen=True, slots=True)
class CommRecord:
    """One collective as this rank saw it.

    Args:
        kind: 'all_gather', 'reduce_scatter', 'all_reduce' or 'broadcast'.
        label: What it was for: a unit's name, or an operation.
        num_ranks: Ranks that took part.
        payload_bytes: Bytes of real elements that this rank sends under a direct or ring algorithm.
        padding_bytes: Bytes that it sends because shards are uneven.
        header_bytes: Bytes that it sends so that the ranks can check that they mean the same unit.
    """

    kind: str
    label: str
    num_ranks: int
    payload_bytes: int
    padding_bytes: int = 0
    header_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All bytes that this rank sends."""
        return self.payload_bytes + self.padding_bytes + self.header_bytes


class _Open:
    """The open traces of this process. Backward runs on threads of its own, so a context variable would miss it."""

    traces: "ClassVar[tuple[CommTrace, ...]]" = ()


def record(entry: CommRecord) -> None:
    """Tell every open trace of a collective."""
    for trace in _Open.traces:
        trace.records.append(entry)


class CommTrace:
    """Counts collectives and their bytes while it is open.

        with dshard.CommTrace() as trace:
            loss = model(x).sum()
            loss.backward()
        print(trace.calls("all_gather"), trace.total_bytes)

    Bytes are those that *this rank sends*. An all-gather or reduce-scatter of `P` bytes over `N` ranks sends
    `(N - 1) / N * P`; an all-reduce `2 * (N - 1) / N * P`, or `(N - 1) * P` where a small tensor is exchanged directly.
    `payload_bytes` is that formula for the real elements; padding and headers are counted apart.

    Communicates:
        Nothing.
    """

    def __init__(self) -> None:
        self.records: list[CommRecord] = []

    def __enter__(self) -> "CommTrace":
        _Open.traces = (*_Open.traces, self)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        _Open.traces = tuple(trace for trace in _Open.traces if trace is not self)

    def select(self, kind: str | None = None, label: str | None = None) -> list[CommRecord]:
        """Records of one kind and label, or of all."""
        return [r for r in self.records if kind in (None, r.kind) and label in (None, r.label)]

    def calls(self, kind: str | None = None, label: str | None = None) -> int:
        """Number of collectives of one kind and label, or of all."""
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

    def summary(self) -> str:
        """A table of calls and bytes by kind."""
        counts = Counter(r.kind for r in self.records)
        lines = [f"{'collective':<16}{'calls':>7}{'payload':>14}{'padding':>12}{'headers':>12}"]
        for kind, calls in sorted(counts.items()):
            rows = self.select(kind)
            cells = [sum(getattr(r, f"{part}_bytes") for r in rows) for part in ("payload", "padding", "header")]
            lines.append(f"{kind:<16}{calls:>7}{cells[0]:>14,}{cells[1]:>12,}{cells[2]:>12,}")
        return "\n".join(lines)
