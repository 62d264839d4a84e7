"""The most memory at one time: of gathered copies, by dshard's own count, and of a rank's process, by the system's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from dshard.units.eviction import Eviction
from dshard.units.unit import Unit

_NUM_STEPS = 5
_LOOK_S = 0.004


@dataclass(slots=True)
class Peak:
    """What was counted so far."""

    num_bytes: int = 0


@contextmanager
def gathered_peak() -> Iterator[Peak]:
    """The most bytes of gathered copies at one time within the block, by `Eviction.num_bytes`."""
    peak, note_gather = Peak(), Eviction.note_gather

    def counted(self: Eviction, unit: Unit) -> None:
        note_gather(self, unit)
        peak.num_bytes = max(peak.num_bytes, self.num_bytes)

    Eviction.note_gather = counted  # type: ignore[method-assign]
    try:
        yield peak
    finally:
        Eviction.note_gather = note_gather  # type: ignore[method-assign]


def _resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _proportional_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


class Grown(NamedTuple):
    """Bytes that this rank's process grew by at the peak.

    Args:
        resident: By the system's own mark, which counts a page once for each of its mappings, and for each process.
        proportional: Of pages that several map, this process's share: the most of looks every few milliseconds.
    """

    resident: int
    proportional: int


def grown(make_step: Callable[[], Callable[[], object]]) -> Grown:
    """Bytes that this rank's process grew by: the most in five steps, less what it was before.

    Args:
        make_step: Builds the model, and returns a training step of it. Best in a fresh process, for a heap that others
            have used tells nothing.

    Communicates:
        A barrier before and one after, besides what the steps do.
    """
    dist.barrier()
    resident, proportional, found = _resident_bytes("VmRSS:"), _proportional_bytes(), Peak()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    has_ended = threading.Event()

    def look() -> None:
        while not has_ended.wait(_LOOK_S):
            found.num_bytes = max(found.num_bytes, _proportional_bytes())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        step = make_step()
        for _ in range(_NUM_STEPS):
            step()
    finally:
        has_ended.set()
        looking.join()
    known = Grown(_resident_bytes("VmHWM:") - resident, found.num_bytes - proportional)
    dist.barrier()
    return known
