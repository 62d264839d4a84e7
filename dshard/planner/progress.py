"""What planning is at, for who waits for it: told often, passed on now and then."""

import time
from collections.abc import Callable
from typing import Final, Protocol


class Progress(Protocol):
    """Hears what planning is at."""

    def at(self, what: str, share: float | None = None) -> None:
        """It is at `what`, of which a share between 0 and 1 is done, if that is known."""


class _Silent:
    """Passes nothing on."""

    def at(self, what: str, share: float | None = None) -> None:
        """Nobody hears it."""


SILENT: Final[Progress] = _Silent()


class Stretch:
    """A part of what somebody else waits for.

    Args:
        whole: Hears of it.
        what: It is, put ahead of all that it says.
        start: The share of the whole that is done when it starts.
        stop: The same when it ends.
    """

    def __init__(self, whole: Progress, what: str, start: float, stop: float) -> None:
        self._whole, self._what = whole, what
        self._start, self._stop = start, stop

    def at(self, what: str, share: float | None = None) -> None:
        """As `Progress.at`."""
        self._whole.at(f"{self._what}{what}", self._start + (share or 0.0) * (self._stop - self._start))


class Throttled:
    """Passes a line on when some seconds have gone by since the last, or since the start.

    Args:
        say: Takes the line.
        every_s: Seconds from one to the next.
        clock: Tells seconds.
    """

    def __init__(
        self, say: Callable[[str], object], *, every_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._every_s, self._clock = say, every_s, clock
        self._start_s = self._last_s = clock()

    def at(self, what: str, share: float | None = None) -> None:
        """As `Progress.at`."""
        now_s = self._clock()
        if now_s - self._last_s < self._every_s:
            return
        self._last_s = now_s
        done = "" if share is None else f"{share:.0%}, "
        self._say(f"{what} ({done}{now_s - self._start_s:.0f} s)")
