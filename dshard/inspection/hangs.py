"""Read the flight records of a job's ranks, and find out which rank waits for which, and where."""

import json
import re
import socket
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dshard.collectives.flight import END, LINE_BYTES, PLACE, RING, SUFFIX, WAITS, names_of, ranks_of
from dshard.inspection.explain import text_table

_SILENT_S = 5.0  # without a sign, while others gave one
_TABLE_CHARS = 90
_FOLDERS = re.compile(r"(?<=[ (])/(?:[^/()]*/)*")  # of a file: with them the table would be too wide
_COLUMNS = ("rank", "is", "for", "began last")
_Group = tuple[str, str]  # name, and ranks


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that a rank began.

    Attributes:
        group: Name and ranks of its process group.
        place: Its number among those of the group, from 1 on.
        at: When it began, in seconds of the clock.
        what: Kind and label.
        line: Line of the program, as file:line.
    """

    group: _Group
    place: int
    at: float
    what: str
    line: str

    def __str__(self) -> str:
        return f"{self.what}{_at(self.line)}, number {self.place}, ranks {self.group[1]}"


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The flight record of a rank.

    Attributes:
        rank: The rank in the world.
        num_ranks: Number of ranks of the world.
        host: Name of its host.
        pid: Its process.
        end: How it ended; "" if it did not say.
        line: Line of the program where it was seen last; "" for nowhere.
        wait: The wait that it is in, or that failed: label, group, place, line, at, and perhaps "failed".
        collectives: The collectives that it began, in order.
        last_sign: When it last wrote, in seconds of the clock.
    """

    rank: int
    num_ranks: int
    host: str
    pid: int
    end: str
    line: str
    wait: dict[str, Any] | None
    collectives: tuple[Collective, ...]
    last_sign: float

    def begun(self, group: _Group) -> int:
        """The last collective of a group that it has begun."""
        return max((c.place for c in self.collectives if c.group == group), default=0)

    @property
    def is_gone(self) -> bool:
        """Whether it ran on this host and has gone without noting its end."""
        return not self.end and self.host == socket.gethostname() and not Path(f"/proc/{self.pid}").exists()

    def state(self, now: float) -> str:
        """Say what the rank does; `now` is the last sign of any rank."""
        if self.end:
            return f"ended: {self.end}"
        if self.wait is not None:
            text = f"at the {self.wait['waits']}{_at(self.wait['line'])}"
        else:
            text = f"at {self.line}" if self.line else "at a line that is not known"
        if self.is_gone:
            return f"ended without a word, {text}"
        if now - self.last_sign > _SILENT_S:
            at = time.strftime("%H:%M:%S", time.localtime(self.last_sign))
            return f"gave no sign after {at}, {text}"
        return f"waits {text}" if self.wait is not None else f"is {text}"


@dataclass(frozen=True, slots=True)
class Hang:
    """The ranks of a job and the waits between them; `str()` of it explains them.

    Attributes:
        records: The records by rank.
        missing: For each rank that waits, the ranks that have not begun the collective that it waits for.
        difference: The first collective that differs between ranks, in words; "" for none.
    """

    records: dict[int, RankRecord]
    missing: dict[int, tuple[int, ...]]
    difference: str

    @property
    def now(self) -> float:
        """The last sign of any rank, in seconds of the clock."""
        return max(record.last_sign for record in self.records.values())

    @property
    def blamed(self) -> tuple[int, ...]:
        """Ranks that others wait for, and that wait for no rank themselves."""
        wanted = {rank for ranks in self.missing.values() for rank in ranks}
        return tuple(sorted(rank for rank in wanted if not self.missing.get(rank)))

    def __str__(self) -> str:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.now))
        num_ranks = max(record.num_ranks for record in self.records.values())
        head = f"{len(self.records)} of {num_ranks} ranks have a record; the last sign of any is of {at}."
        rows = [self._row(record) for record in self.records.values()]
        parts = [head, "", text_table(_COLUMNS, rows, to_left=(1, 3)), "", *self._findings()]
        return "\n".join(parts)

    def _row(self, record: RankRecord) -> tuple[str, str, str, str]:
        last = record.collectives[-1] if record.collectives else None
        since = record.wait["at"] if record.wait is not None else last.at if last is not None else record.last_sign
        state, began = (_FOLDERS.sub("", text) for text in (record.state(self.now), str(last or "")))
        state = state if len(state) <= _TABLE_CHARS else f"{state[:_TABLE_CHARS]} ..."
        return str(record.rank), state, f"{max(self.now - since, 0):.1f} s", began

    def _findings(self) -> list[str]:
        found = []
        alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for rank, ranks in self.missing.items():
            wait = self.records[rank].wait
            assert wait is not None
            alike[wait["waits"], wait["line"], wait["ranks"], ranks].append(rank)
        for (label, line, group, ranks), waiting in alike.items():
            who = f"{names_of(waiting).capitalize()} wait{'s' * (len(waiting) == 1)}"
            if ranks:
                found.append(f"{who} for {names_of(ranks)} at the {label}{_at(line)}.")
            else:
                found.append(
                    f"{who} at the {label}{_at(line)}, which all ranks of {group} have begun: what they send does not "
                    "arrive, or the wait has ended on the others. Look at the network between them."
                )
        found += [self._of_blamed(rank) for rank in self.blamed]
        if any(self.missing.values()) and not self.blamed:
            found.append("All that are waited for wait themselves: they have taken different branches.")
        if self.difference:
            found.append(self.difference)
        return found or ["No rank waits for another."]

    def _of_blamed(self, rank: int) -> str:
        record = self.records.get(rank)
        if record is None:
            return f"Rank {rank} has no record here: it did not start, or wrote it on another host."
        last = f"; it began last: {record.collectives[-1]}" if record.collectives else ""
        why = " It was killed, ran out of memory, or called os._exit." if record.is_gone else ""
        return f"Rank {rank} (process {record.pid} on {record.host}) {record.state(self.now)}{last}.{why}"


def read_records(folder: Path) -> dict[int, RankRecord]:
    """Read the flight records of a folder, sorted by rank."""
    found = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        record = _read(path.read_bytes())
        if record is not None:
            found[record.rank] = record
    return dict(sorted(found.items()))


def explain_hang(records: dict[int, RankRecord]) -> Hang:
    """Find out which rank waits for which.

    Args:
        records: What `read_records` gives, at least one record.
    """
    missing = {}
    for rank, record in records.items():
        wait = record.wait
        if wait is not None:
            key = wait["group"], wait["ranks"]
            others = [r for r in ranks_of(wait["ranks"]) if r != rank]
            missing[rank] = tuple(r for r in others if not _has_begun(records.get(r), key, wait["place"], record))
    return Hang(records, missing, _first_difference(records.values()))


def _has_begun(other: RankRecord | None, group: _Group, place: int, own: RankRecord) -> bool:
    """Whether another rank has begun the collective that `own` waits for, or its ring no longer shows it."""
    if other is None or other.begun(group) < place:
        return False
    if place == 0:  # ahead of any collective, where ranks find out how to reach each other
        is_there = other.wait is not None and (other.wait["group"], other.wait["ranks"]) == group
        return is_there or other.begun(group) > place
    mine, theirs = ({c.place: c.what for c in r.collectives if c.group == group} for r in (own, other))
    return place not in mine or place not in theirs or mine[place] == theirs[place]


def _first_difference(records: Iterable[RankRecord]) -> str:
    """Describe the first collective that differs between ranks of a group."""
    by_place: dict[tuple[_Group, int], dict[int, Collective]] = defaultdict(dict)
    for record in records:
        for each in record.collectives:
            by_place[each.group, each.place][record.rank] = each
    apart = {key: each for key, each in by_place.items() if len({c.what for c in each.values()}) > 1}
    if not apart:
        return ""
    last_group, _ = max(apart, key=lambda key: max(c.at for c in apart[key].values()))
    places = [place for group, place in apart if group == last_group]
    first = apart[last_group, min(places)]
    sides: dict[str, list[int]] = defaultdict(list)
    for rank, each in first.items():
        sides[f"{each.what}{_at(each.line)}"].append(rank)
    common = next(iter(first.values()))
    where = f"number {common.place} among ranks {common.group[1]}"
    texts = " and ".join(f"{side} on {names_of(ranks)}" for side, ranks in sides.items())
    return f"The first difference: {where} is {texts}."


def _read(data: bytes) -> RankRecord | None:
    """Read a file; None for a file of another kind. Lines that a process was writing as it ended are left out."""
    lines = [_parsed(data[start : start + LINE_BYTES]) for start in range(0, len(data), LINE_BYTES)]
    if not lines or lines[0].get("flight") != 1:
        return None
    head, end, place, waits = lines[0], lines[END], lines[PLACE], lines[WAITS:RING]
    ring = sorted((line for line in lines[RING:] if line), key=lambda line: line["number"])
    collectives = tuple(
        Collective((c["group"], c["ranks"]), c["place"], c["at"], f"{c['kind']} '{c['label']}'", c["line"])
        for c in ring
    )
    newest = max((line["at"] for line in ring), default=0.0)
    waiting = [w for w in waits if w and "came" not in w and w.get("failed", newest) >= newest]
    ended = f"{end['end']}: {end['text']}" if end else ""
    signs = [line["at"] for line in (end, place, *waits, *ring) if line]
    return RankRecord(
        **{name: head[name] for name in ("rank", "host", "pid")},
        num_ranks=head["ranks"],
        end=ended,
        line=place.get("line", ""),
        wait=min(waiting, key=lambda w: ("failed" in w, w["at"]), default=None),
        collectives=collectives,
        last_sign=max(signs, default=head["began"]),
    )


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _at(line: str) -> str:
    return f" ({line})" if line else ""
