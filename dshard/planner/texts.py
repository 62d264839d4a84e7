"""What people read: bytes and seconds, tables and lines, and what planning is at."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dshard import arguments
from dshard.policies import read_bytes

_MAX_WIDTH = 110


def seconds_text(value: float) -> str:
    """Seconds, in the largest unit of which there is one."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value / 1e-6:.4g} us"


def bytes_text(num_bytes: float) -> str:
    """Bytes, in powers of 1024."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes:.0f} B"


def number_text(value: float) -> str:
    """A count or rate without an exponent: 3.14, 98.7, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def parse_bytes(who: str, name: str, value: int | str | None, *, or_none: bool = False) -> Any:
    """Read a number of bytes, as it is or as text like "38GiB" or "40e9", that is an argument of a function.

    Raises:
        ArgumentError: It is none, or not above 0.
    """
    number = read_bytes(value)
    allowed = "a number of bytes above 0, or text such as '38GiB'"
    arguments.expect(bool(number), who, name, value, allowed, "Pass '38GiB'.", or_none=or_none)
    return number


def wrapped(start: str, entries: Iterable[str]) -> list[str]:
    """A line that starts so, and entries with commas between them, on as few lines as it takes."""
    lines = [start]
    for i, entry in enumerate(entries):
        lines[-1] += "," if i else ""
        if len(lines[-1]) + len(entry) > _MAX_WIDTH:
            lines.append(f"  {entry}")
        else:
            lines[-1] += f" {entry}"
    return lines


def aligned(rows: Sequence[Sequence[str]], *, to_left: Sequence[int]) -> list[str]:
    """Rows as lines, whose columns are to the right but for some."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        justified = [c.ljust(width) if i in to_left else c.rjust(width) for i, (c, width) in enumerate(cells)]
        lines.append("  ".join(justified).rstrip())
    return lines


Progress = Callable[[str], object]  # hears what planning is at


def silent(what: str) -> None:
    """Nobody hears what planning is at."""


def throttled(say: Progress, *, every_s: float, clock: Callable[[], float] = time.monotonic) -> Progress:
    """What hears everything, and passes it on when some seconds have gone by since the last time, or since the start.

    Args:
        say: Takes a line.
        every_s: Seconds from one to the next.
        clock: Tells seconds.
    """
    start_s = last_s = clock()

    def hear(what: str) -> None:
        nonlocal last_s
        now_s = clock()
        if now_s - last_s >= every_s:
            last_s = now_s
            say(f"{what} ({now_s - start_s:.0f} s)")

    return hear
