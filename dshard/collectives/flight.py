"""The last collectives of this rank, in a file that outlives it: what `dshard explain-hang` reads.

The environment variable `DSHARD_FLIGHT_RECORD` names a folder. Each rank keeps a file there of lines of equal length,
mapped into its memory: what was written is there after any end of the process. Each line is JSON. The first says whose
file it is, then come the rank's end, where its program is, what its threads wait for, and a ring of collectives.
"""

import functools
import json
import logging
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from dshard.collectives import _c10d
from dshard.collectives._c10d import ProcessGroup

log = logging.getLogger("dshard")

VARIABLE = "DSHARD_FLIGHT_RECORD"
SUFFIX, BEFORE_SUFFIX = ".flight", ".flight-before"  # of a file, and of that which an earlier process left
LINE_BYTES = 512
NUM_COLLECTIVES = 1000
END, PLACE, WAITS, RING = 1, 2, 3, 16  # numbers of lines; the first is the header
_TEXTS = ("label", "line", "waits", "did", "text")  # which are cut where a line would be too long
_MAX_CHARS = 120  # of a label and of a line of the program, whose end matters


class _State:
    """Where records go, read once, as this is imported; and the last one."""

    folder = os.environ.get(VARIABLE, "")
    last: "FlightRecord | None" = None  # whose process groups may be gone


@dataclass(slots=True)
class _Known:
    """A process group of the record."""

    name: str
    ranks: str
    num_begun: int = 0  # collectives

    def facts(self, place: int) -> dict[str, Any]:
        """Which collective one is, and the line of the program that is at it."""
        line = users_line(sys._getframe(2))[-_MAX_CHARS:]
        return {"group": self.name[:40], "ranks": self.ranks, "place": place, "line": line}


class FlightRecord:
    """The file of this rank.

    Args:
        folder: Where it is made. One that an earlier process left is renamed.
    """

    def __init__(self, folder: Path) -> None:
        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._pid = os.getpid()
        self._groups: dict[int, _Known] = {}
        self._lines: dict[int, int] = {}  # numbers of lines of waits, by thread
        self._waits: dict[int, dict[str, Any]] = {}  # what they wait for
        self._num_noted = 0
        path = folder / f"rank-{rank:05}{SUFFIX}"
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.replace(path.with_suffix(BEFORE_SUFFIX))
        num_bytes = (RING + NUM_COLLECTIVES) * LINE_BYTES
        with path.open("w+b") as file:
            file.write((b" " * (LINE_BYTES - 1) + b"\n") * (RING + NUM_COLLECTIVES))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), num_bytes)
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        facts = {"rank": rank, "ranks": num_ranks, "pid": self._pid, "host": socket.gethostname(), "restarts": restarts}
        self.put(0, {"flight": 1, **facts, "began": time.time()})

    def put(self, number: int, facts: dict[str, Any]) -> None:
        """Write a line; forks of the process write nothing."""
        if os.getpid() != self._pid:
            return
        text = json.dumps(facts, separators=(",", ":"))
        longest = _MAX_CHARS
        while len(text) >= LINE_BYTES:  # what is not ASCII takes six characters
            longest //= 2
            facts = {k: v[-longest:] if k in _TEXTS else v for k, v in facts.items()}
            text = json.dumps(facts, separators=(",", ":"))
        self._memory[number * LINE_BYTES : (number + 1) * LINE_BYTES] = text.ljust(LINE_BYTES - 1).encode() + b"\n"

    def group(self, group: ProcessGroup) -> _Known:
        """What is known of a group."""
        known = self._groups.get(id(group))
        if known is None or known.name != group.group_name:
            ranks = dist.get_process_group_ranks(group) if dist.is_initialized() else [0]
            known = self._groups[id(group)] = _Known(group.group_name, _as_ranges(ranks))
        return known

    def note(self, kind: str, label: str, group: ProcessGroup, num_bytes: int) -> None:
        """Write down that a collective begins on this rank."""
        known, number = self.group(group), self._num_noted
        known.num_begun += 1
        self._num_noted += 1
        what = {"kind": kind, "label": label[-_MAX_CHARS:], "bytes": num_bytes}
        line = RING + number % NUM_COLLECTIVES
        self.put(line, {"number": number, "at": time.time(), **known.facts(known.num_begun), **what})

    def _line_of_thread(self) -> int:
        return self._lines.setdefault(threading.get_ident(), min(WAITS + len(self._lines), RING - 1))

    def begin_wait(self, label: str, group: ProcessGroup, place: int) -> None:
        """Write down that this thread waits for the peers, for the collective of that number in its group."""
        facts = {"waits": label[-_MAX_CHARS:], "at": time.time(), **self.group(group).facts(place)}
        self._waits[threading.get_ident()] = facts
        self.put(self._line_of_thread(), facts)

    def end_wait(self, *, is_well: bool) -> None:
        """Write down that this thread waits no longer: the peers came, or an error did."""
        waited = self._waits.pop(threading.get_ident(), None)
        if waited is not None:
            self.put(self._line_of_thread(), {**waited, "came" if is_well else "failed": time.time()})

    def note_place(self, place: dict[str, str]) -> None:
        """The process lives, and its program is somewhere; called by a thread of its own."""
        self.put(PLACE, {"at": time.time(), **{name: text[-_MAX_CHARS:] for name, text in place.items()}})


def is_kept() -> bool:
    """Whether this rank is to keep a record."""
    return bool(_State.folder)


def record_of(group: ProcessGroup) -> FlightRecord | None:
    """The record of the default process group, if one is kept; made at its first collective."""
    return _c10d.kept_for(_c10d.world_of(group), "flight", _made) if _State.folder else None


def _made() -> FlightRecord | None:
    try:
        _State.last = FlightRecord(Path(_State.folder))
    except OSError as error:
        log.warning(
            f"{VARIABLE} must name a folder in which files can be made, but {_State.folder!r} gives: {error}. This "
            "rank keeps no flight record."
        )
        _State.last = None
    return _State.last


def place_of(group: ProcessGroup) -> int:
    """How many collectives of a group have begun: the number of the last one, equal on all ranks."""
    record = record_of(group)
    return record.group(group).num_begun if record is not None else 0


def note_end(how: str, text: str) -> None:
    """The process ends: "raised" or "failed" with an exception's text, or "left"."""
    if _State.last is not None:
        _State.last.put(END, {"end": how, "text": text[: 2 * _MAX_CHARS], "at": time.time()})


def _as_ranges(ranks: list[int]) -> str:
    """Ranks as text: "0-3", "0-511:8" for every eighth, "0,1,5"; of too many in no order those that fit, and "..."."""
    if len(ranks) > 2 and (step := ranks[1] - ranks[0]) > 0 and ranks == list(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
    text = ",".join(map(str, ranks))
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS].rpartition(',')[0]},..."


def ranks_of(text: str) -> list[int]:
    """Ranks of a text, as a record has them; without those that did not fit."""
    span, _, step = text.partition(":")
    if "-" in span:
        first, last = map(int, span.split("-"))
        return list(range(first, last + 1, int(step or 1)))
    return [int(word) for word in span.split(",") if word.isdigit()]


def names_of(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


_PYTHONS_FOLDER = str(Path(os.__file__).parent)
_OWN_FOLDERS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


def users_line(frame: FrameType | None) -> str:
    """Where a stack leaves the user's own program, as file:line; empty if nowhere."""
    while isinstance(frame, FrameType):  # CPython 3.11 has given another object for a frame of a thread that runs
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.cache
def is_users(file: str) -> bool:
    """Whether a file is of the program that runs, and not torch's, Python's or this library's."""
    is_pythons = file.startswith(_PYTHONS_FOLDER) and "site-packages" not in file
    return not file.startswith(_OWN_FOLDERS) and "<" not in file and not is_pythons
