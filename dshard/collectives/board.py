"""What ranks tell each other of themselves, through the store of the default process group.

It is there when the connections between them are not. Each rank says once where it runs, and at its end how it ended;
asked, it says where it is.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

STORE_S = 1.5  # for the store to answer at all
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of a rank, and where it runs.

    Args:
        host: Its host's name.
        pid: Of its process.
        place: Equal on ranks that see each other's processes.
        started: When the process began, in the system's own count: a number may be given to another process later.
    """

    host: str
    pid: int
    place: str
    started: str

    @classmethod
    def own(cls) -> "RankProcess":
        """Where this process runs."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            place = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        except OSError:
            place = ""
        return cls(socket.gethostname(), os.getpid(), place, state_of(os.getpid())[1])


@dataclass(frozen=True, slots=True)
class End:
    """What a rank wrote when it ended, or found out about others.

    Args:
        rank: Which.
        how: "raised", "left", "found", or "failed" for want of a peer.
        text: What it raised, or found.
        when: In seconds since the epoch, by its own clock.
        ranks: That are to blame, if it was another's fault.
    """

    rank: int
    how: str
    text: str
    when: float
    ranks: tuple[int, ...] = ()


def state_of(pid: int) -> tuple[str, str]:
    """A process's state, a letter of proc(5), and when it began; both empty where there is none, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


def ends_within(seconds: float, action: Callable[[], T]) -> T | None:
    """What an action gives, or None if it raises or takes longer: a store whose host is away never answers."""
    found: list[T] = []

    def run() -> None:
        with suppress(RuntimeError, ValueError, OSError):  # the store is gone
            found.append(action())

    thread = threading.Thread(target=run, name="dshard board", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


class Board:
    """The store, as long as there is one; whatever is called raises RuntimeError or ValueError if there is none."""

    def __init__(self) -> None:
        self._root: Any = None
        self._store: Any = None
        self._posted: dict[str, Any] = {}
        self.rank = 0

    def open(self) -> bool:
        """Look at the process group that there is now; whether it is another one than before."""
        if not dist.is_initialized():  # one that was there may still be told of this rank's end
            return False
        root = dist.distributed_c10d._get_default_store()
        if root is self._root:
            return False
        self._root, self._store = root, dist.PrefixStore("dshard board", root)
        self._posted, self.rank = {}, dist.get_rank()
        return True

    @property
    def is_open(self) -> bool:
        """Whether there was a process group."""
        return self._store is not None

    def post(self, topic: str, facts: Any) -> None:
        """Write facts of this rank, unless they are there."""
        if self.is_open and (topic not in self._posted or facts != self._posted[topic]):
            self._store.set(f"{topic}/{self.rank}", json.dumps(facts))
            self._posted[topic] = facts

    def read(self, topic: str, ranks: Iterable[int]) -> dict[int, Any]:
        """What those of some ranks wrote that did."""
        keys = {rank: f"{topic}/{rank}" for rank in ranks}
        if not self.is_open or not keys:
            return {}
        if not self._store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        values = self._store.multi_get(list(keys.values())) if keys else []
        return {rank: json.loads(value) for rank, value in zip(keys, values, strict=True)}

    def processes(self, ranks: Iterable[int]) -> dict[int, RankProcess]:
        """Where ranks run, as far as they have said."""
        return {rank: RankProcess(**facts) for rank, facts in self.read("process", ranks).items()}

    def note_end(self, how: str, text: str, ranks: tuple[int, ...] = ()) -> None:
        """Write how this rank ended, or what it found."""
        if self.is_open:
            facts = asdict(End(self.rank, how, text, time.time(), ranks))
            self._store.set(f"end {self._store.add('ends', 1)}", json.dumps(facts))

    def ends(self) -> list[End]:
        """How ranks ended, and what they found, in the order of their words."""
        if not self.is_open:
            return []
        keys = [f"end {number + 1}" for number in range(self._store.add("ends", 0))]
        values = [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]
        return [End(**{**facts, "ranks": tuple(facts["ranks"])}) for facts in values]

    def ask(self) -> int:
        """Ask all ranks where they are; gives the question's number."""
        return int(self._store.add("questions", 1))

    def newest_question(self) -> int:
        """The number of the last question, 0 if there was none."""
        return int(self._store.add("questions", 0)) if self.is_open else 0

    def answers(self, question: int, ranks: Iterable[int]) -> dict[int, dict[str, str]]:
        """Where those ranks are that have answered a question, or a later one."""
        found = self.read("answer", ranks)
        return {rank: facts["at"] for rank, facts in found.items() if facts["question"] >= question}
