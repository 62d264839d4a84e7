"""What ``dshard train`` prints: progress while it runs, tables after it. Rank 0 prints, the others are silent."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from dshard.cli.history import Outcome
from dshard.cli.memory import StateBytes

_NUM_LINES = 20


def mega(num_bytes: float) -> str:
    """Bytes as megabytes (10**6) with one decimal."""
    return f"{num_bytes / 1e6:,.1f} MB"


def printable(text: bytes) -> str:
    """Sampled bytes as text that no terminal takes for a command: what is not UTF-8 or not printable is replaced."""
    characters = text.decode(errors="replace")
    return "".join(one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in characters)


class Progress(Protocol):
    """Takes the events of a run."""

    def step(self, num_done: int, loss: float, *, tokens_per_s: float, memory: StateBytes) -> None:
        """Tell that one more step is done."""

    def validation(self, num_done: int, loss: float) -> None:
        """The validation loss was measured."""

    def note(self, text: str) -> None:
        """Something worth a line of its own."""


class _Silent:
    """Takes events on ranks that do not print."""

    def step(self, num_done: int, loss: float, *, tokens_per_s: float, memory: StateBytes) -> None:
        """Prints nothing."""

    def validation(self, num_done: int, loss: float) -> None:
        """Prints nothing."""

    def note(self, text: str) -> None:
        """Prints nothing."""


class _Lines:
    """Prints a line every few steps, for logs and pipes."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total = label, total
        self._every = max(1, total // _NUM_LINES)

    def step(self, num_done: int, loss: float, *, tokens_per_s: float, memory: StateBytes) -> None:
        """Prints every so many steps."""
        if num_done % self._every == 0 or num_done == self._total:
            where = f"{self._label}  step {num_done:>{len(str(self._total))}}/{self._total}"
            print(f"{where}  loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s  {mega(memory.total)}/rank", flush=True)

    def validation(self, num_done: int, loss: float) -> None:
        """Prints one line."""
        self.note(f"step {num_done:>{len(str(self._total))}}/{self._total}  validation loss {loss:.4f}")

    def note(self, text: str) -> None:
        """Prints one line."""
        print(f"{self._label}  {text}", flush=True)


class _Bar:
    """Moves a rich progress bar."""

    def __init__(self, bar: Any, task: Any, label: str) -> None:
        self._bar, self._task, self._label = bar, task, label

    def step(self, num_done: int, loss: float, *, tokens_per_s: float, memory: StateBytes) -> None:
        """Moves the bar."""
        status = f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s  {mega(memory.total)}/rank"
        self._bar.update(self._task, completed=num_done, status=status)

    def validation(self, num_done: int, loss: float) -> None:
        """Prints one line above the bar."""
        self.note(f"step {num_done}  validation loss {loss:.4f}")

    def note(self, text: str) -> None:
        """Prints one line above the bar."""
        self._bar.console.print(f"{self._label}  {text}", markup=False, highlight=False)


@contextmanager
def open_progress(label: str, *, total: int, is_first: bool) -> Iterator[Progress]:
    """A progress bar on a terminal where rich is installed, lines elsewhere, nothing on ranks other than the first."""
    if not is_first:
        yield _Silent()
        return
    try:
        from rich import progress as rich_progress
    except ImportError:
        rich_progress = None  # type: ignore[assignment]
    if rich_progress is None or not sys.stdout.isatty():
        yield _Lines(label, total)
        return
    columns = (
        rich_progress.TextColumn(label),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TextColumn("{task.fields[status]}"),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns) as bar:
        yield _Bar(bar, bar.add_task(label, total=total, status=""), label)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as aligned lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def largest(memory: Sequence[StateBytes]) -> StateBytes:
    """The count of the rank that holds most."""
    return max(memory, key=lambda one: one.total)


def memory_table(outcomes: Sequence[Outcome]) -> str:
    """Bytes per rank (of the rank that holds most), one column per run."""
    counts = [largest(outcome.memory) for outcome in outcomes]
    rows = [["per rank", *(outcome.name for outcome in outcomes)]]
    for name in ("parameters", "gradients", "optimizer", "total", "peak"):
        label = "peak of the process" if name == "peak" else name
        rows.append([label, *(mega(getattr(count, name)) for count in counts)])
    rows.append(["tokens/s, all ranks", *(f"{outcome.tokens_per_s:,.0f}" for outcome in outcomes)])
    return table(rows)


def loss_table(left: Outcome, right: Outcome) -> str:
    """Training losses of two runs side by side at some steps, validation losses where both have them."""
    num_steps = min(len(left.history.losses), len(right.history.losses))
    every = max(1, num_steps // _NUM_LINES)
    rows = [["step", left.name, right.name, "difference"]]
    for index in range(num_steps):
        if (index + 1) % every == 0 or index in (0, num_steps - 1):
            a, b = left.history.losses[index], right.history.losses[index]
            rows.append([str(index + 1), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}"])
    for step in sorted(left.history.validation.keys() & right.history.validation.keys()):
        a, b = left.history.validation[step], right.history.validation[step]
        rows.append([f"validation at {step}", f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}"])
    return table(rows)


def largest_difference(left: Outcome, right: Outcome) -> float:
    """The largest absolute difference of two runs' training and validation losses at equal steps."""
    steps = left.history.validation.keys() & right.history.validation.keys()
    pairs = [
        *zip(left.history.losses, right.history.losses, strict=False),
        *((left.history.validation[step], right.history.validation[step]) for step in steps),
    ]
    return max((abs(a - b) for a, b in pairs), default=math.nan)
