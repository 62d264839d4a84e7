"""The last collectives of this rank, in a file that outlives it: what `dshard explain-hang` reads.

The environment variable `DSHARD_FLIGHT_RECORD` names a folder. Each rank keeps a file there of lines of equal length,
mapped into its memory: what was written is there after any end of the process. Each line is JSON. The first says whose
file it is, then come the rank's end, where its program is, what its threads wait for, and a ring of collectives.
"""

import json
import logging
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from dshard.collectives import _c10d
from dshard.collectives._c10d import ProcessGroup
from dshard.collectives.callers import users_line

if TYPE_CHECKING:
    from dshard.collectives.group import ShardGroup

log = logging.getLogger("dshard")

VARIABLE = "DSHARD_FLIGHT_RECORD"
SUFFIX, BEFORE_SUFFIX = ".flight", ".flight-before"  # of a file, and of that which an earlier process left
LINE_BYTES = 512
NUM_COLLECTIVES = 1000
END, PLACE, WAITS, RING = 1, 2, 3, 16  # numbers of lines; the first is the header
_TEXTS = ("label", "line", "waits", "did", "text")  # which are cut where a line would be too long
_MAX_CHARS = 120  # of a label and of a line of the program, whose end matters


class _State:
    """Where records go, read once, as this is imported; the last one; and the number of the step that a group is in."""

    folder = os.environ.get(VARIABLE, "")
    last: "_Flight | None" = None  # whose process groups may be gone
    step_of: "Callable[[ShardGroup], int]" = staticmethod(lambda _: 0)


class Place(NamedTuple):
    """Which collective of a group one is: the same on all ranks, also after steps that some have left earlier."""

    step: int
    number: int  # in the step, from 1 on


@dataclass(slots=True)
class _Known:
    """A process group of the record."""

    name: str
    ranks: str
    place: Place  # of the last collective that began


class _Flight:
    """The file of this rank.

    Args:
        folder: Where it is made. One that an earlier process left is renamed.
    """

    def __init__(self, folder: Path) -> None:
        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._pid = os.getpid()
        self._groups: dict[int, _Known] = {}
        self._threads: dict[int, int] = {}  # numbers of threads
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
        if known is None or known.name != _c10d.name_of(group):
            ranks = dist.get_process_group_ranks(group) if dist.is_initialized() else [0]
            known = self._groups[id(group)] = _Known(_c10d.name_of(group), _as_ranges(ranks), Place(0, 0))
        return known

    def note(self, kind: str, label: str, group: "ShardGroup", num_bytes: int, line: str) -> None:
        """Write down a collective that begins."""
        known, step = self.group(group.process_group), _State.step_of(group)
        known.place = Place(step, known.place.number + 1 if known.place.step == step else 1)
        where = {"group": known.name[:40], "ranks": known.ranks, "place": known.place}
        what = {"kind": kind, "label": label[-_MAX_CHARS:], "bytes": num_bytes, "line": line[-_MAX_CHARS:]}
        number = self._num_noted
        self._num_noted += 1
        self.put(RING + number % NUM_COLLECTIVES, {"number": number, "at": time.time(), **where, **what})

    def note_wait(self, label: str, group: ProcessGroup, place: Place, line: str) -> None:
        """Write down that a thread waits."""
        known, thread = self.group(group), self._threads.setdefault(threading.get_ident(), len(self._threads))
        where = {"group": known.name[:40], "ranks": known.ranks, "place": place, "line": line[-_MAX_CHARS:]}
        self._waits[thread] = {"waits": label[-_MAX_CHARS:], "at": time.time(), **where}
        self.put(_line_of(thread), self._waits[thread])

    def note_waited(self, *, is_well: bool) -> None:
        """Write down that it waits no longer."""
        thread = self._threads.get(threading.get_ident(), 0)
        waited = self._waits.pop(thread, None)
        if waited is not None:
            self.put(_line_of(thread), {**waited, "came" if is_well else "failed": time.time()})


def _line_of(thread: int) -> int:
    return WAITS + min(thread, RING - WAITS - 1)


def steps_are(step_of: "Callable[[ShardGroup], int]") -> None:
    """Have places tell the step that a function gives; it is above this module."""
    _State.step_of = staticmethod(step_of)


def is_kept() -> bool:
    """Whether a record is kept: no more than a look."""
    return bool(_State.folder)


def note(kind: str, label: str, group: "ShardGroup", num_bytes: int) -> None:
    """A collective begins on this rank."""
    flight = _flight(group.process_group)
    if flight is not None:
        flight.note(kind, label, group, num_bytes, users_line(sys._getframe(1)))


def place_of(group: "ShardGroup") -> Place | None:
    """The last collective of a group that has begun."""
    flight = _flight(group.process_group)
    return flight.group(group.process_group).place if flight is not None else None


def note_wait(label: str, group: ProcessGroup, place: Place | None) -> None:
    """This thread waits for the peers, for the collective at a place of its group."""
    flight = _flight(group)
    if flight is not None:
        flight.note_wait(label, group, place or Place(0, 0), users_line(sys._getframe(1)))


def note_waited(group: ProcessGroup, *, is_well: bool) -> None:
    """This thread waits no longer: the peers came, or an error did."""
    flight = _flight(group)
    if flight is not None:
        flight.note_waited(is_well=is_well)


def note_place(place: dict[str, str]) -> None:
    """The process lives, and its program is somewhere; called by a thread of its own."""
    flight = _flight(None)
    if flight is not None:
        flight.put(PLACE, {"at": time.time(), **{name: text[-_MAX_CHARS:] for name, text in place.items()}})


def note_end(how: str, text: str) -> None:
    """The process ends: "raised" or "failed" with an exception's text, or "left"."""
    flight = _State.last
    if flight is not None:
        flight.put(END, {"end": how, "text": text[: 2 * _MAX_CHARS], "at": time.time()})


def _flight(group: ProcessGroup | None) -> _Flight | None:
    """The record of the default process group; made at its first collective."""
    if group is None and not _c10d.is_initialized():
        return None
    world = _c10d.world_of(group) if group is not None else dist.distributed_c10d._get_default_group()
    return _c10d.kept_for(world, "flight", _made)


def _made() -> _Flight | None:
    try:
        _State.last = _Flight(Path(_State.folder))
    except OSError as error:
        log.warning(
            f"{VARIABLE} must name a folder in which files can be made, but {_State.folder!r} gives: {error}. This "
            "rank keeps no flight record."
        )
        _State.last = None
    return _State.last


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
