"""How far planning is: a bar on a terminal, a line now and then elsewhere; on stderr, so that stdout holds results."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dshard.cli.usage import speaks

if TYPE_CHECKING:
    from dshard.planner.progress import Progress

EVERY_S = 10.0  # from one line to the next
REFRESHES_PER_S = 10.0  # of a bar
_ALMOST = 0.999


class _Bar:
    """Moves a rich progress bar."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task

    def at(self, what: str, share: float | None = None) -> None:
        """Moves the bar, which pulses while nobody knows how much is done; a full one would stop its clock."""
        total = None if share is None else 1.0
        self._bar.update(self._task, description=what, completed=min(share or 0.0, _ALMOST), total=total)


@contextmanager
def open_progress(who: str) -> Iterator[Progress]:
    """Shows what a command is at while the block runs; nothing on ranks other than the first of a machine.

    Args:
        who: The command, ahead of its lines.
    """
    from dshard.planner.progress import SILENT, Throttled

    stream = sys.stderr
    if not speaks():
        yield SILENT
        return
    try:
        from rich import console, progress, table
    except ImportError:
        progress = None  # type: ignore[assignment]
    if progress is None or not stream.isatty():
        yield Throttled(lambda line: print(f"{who}: {line}", file=stream, flush=True), every_s=EVERY_S)
        return
    columns = (
        progress.SpinnerColumn(),
        progress.BarColumn(bar_width=24),
        progress.TimeElapsedColumn(),
        progress.TextColumn(
            "{task.description}", markup=False, table_column=table.Column(no_wrap=True, overflow="ellipsis", ratio=1)
        ),
    )
    terminal = console.Console(file=stream)
    bar = progress.Progress(*columns, console=terminal, transient=True, expand=True, refresh_per_second=REFRESHES_PER_S)
    with bar:
        yield _Bar(bar, bar.add_task("", total=None))
