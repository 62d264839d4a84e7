"""Who is missing, and why: while ranks wait, when a collective has failed, and when a process ends.

Each rank writes to the store of the default process group, which is there when the connections between ranks are not:
where it runs, what it raised or that it left, and, asked, where it is. While it waits for long, a thread names the
ranks that do not come, and the line of the program that they are at; `failure` says the same when a collective has
failed. Of ranks on this host the processes are looked at, too.
"""

import atexit
import json
import logging
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import util as processes
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from dshard.collectives import _c10d, flight
from dshard.collectives._c10d import ProcessGroup
from dshard.collectives.flight import names_of, users_line
from dshard.errors import DivergenceError, DShardError, RankLostError

log = logging.getLogger("dshard")

T = TypeVar("T")
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_STORE_S = 1.5  # for the store to answer at all
_PATIENCE_S = 2.5  # for peers to be found dead, or to say where they are
_ASK_AFTER_S = 0.2
_POLL_S, _FIRST_POLL_S = 0.5, 0.05  # until it is known where the others run
_IDLE_S = 1.0  # without the end of a collective, after which a peer may be asking
_GRACE_S = 2.0  # for peers to write where they are
_READ_S = 0.5  # for others to read a last word, where the store is gone as soon as this process is
_FINISH_S = 5.0  # for others to come to what this rank has begun
_AHEAD = 1 << 62  # of all questions
_TEXT_CHARS, _CAUGHT_CHARS = 600, 300  # of an exception
_MANY_RANKS = 256  # in larger worlds only those of the group are looked at
_MANY_SPEAKERS, _NUM_SPEAKERS = 64, 8  # in groups of more ranks, as many of them speak

_SYMPTOM = re.compile(
    r"connection|broken pipe|socket|tim(ed?|e) ?out|closed by peer|remote (process|peer)|unreachable|no route"
    r"|ncclRemoteError|ncclSystemError|failed to (recv|send)|aborted|wait timeout",
    re.IGNORECASE,
)


# What ranks write to the store.


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

    thread = threading.Thread(target=run, name="dshard store", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


class Board:
    """What ranks write to the store; whatever is called raises RuntimeError or ValueError if the store is gone."""

    def __init__(self) -> None:
        self._root: Any = None
        self._store: Any = dist.HashStore()  # which nobody else sees, until there is a process group
        self.rank = 0

    def open(self) -> bool:
        """Look at the process group that there is now; whether it is another one than before."""
        if not dist.is_initialized():  # of one that was there, ranks may still read this rank's end
            return False
        root = dist.distributed_c10d._get_default_store()
        if root is self._root:
            return False
        self._root, self._store, self.rank = root, dist.PrefixStore("dshard board", root), dist.get_rank()
        return True

    def post(self, topic: str, facts: Any) -> None:
        """Write facts of this rank, in the place of earlier ones."""
        self._store.set(f"{topic}/{self.rank}", json.dumps(facts))

    def read(self, topic: str, ranks: Iterable[int]) -> dict[int, Any]:
        """Facts of a topic, by rank; without ranks that have written none."""
        keys = {rank: f"{topic}/{rank}" for rank in ranks}
        if not keys:
            return {}
        if not self._store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        values = self._store.multi_get(list(keys.values())) if keys else []
        return {rank: json.loads(value) for rank, value in zip(keys, values, strict=True)}

    def note_end(self, how: str, text: str, ranks: tuple[int, ...] = ()) -> None:
        """Write how this rank ended, or what it found."""
        facts = asdict(End(self.rank, how, text, time.time(), ranks))
        self._store.set(f"end {self._store.add('ends', 1)}", json.dumps(facts))

    def ends(self) -> list[End]:
        """How ranks ended, and what they found, in the order in which they wrote it."""
        keys = [f"end {number + 1}" for number in range(self._store.add("ends", 0))]
        values = [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]
        return [End(**{**facts, "ranks": tuple(facts["ranks"])}) for facts in values]

    def ask(self, num_more: int = 1) -> int:
        """Ask all ranks where they are, or not if 0; gives the number of the last question."""
        return int(self._store.add("questions", num_more))

    def answers(self, question: int, ranks: Iterable[int]) -> dict[int, dict[str, str]]:
        """Where those ranks are that have answered a question, or a later one."""
        found = self.read("answer", ranks)
        return {rank: facts["at"] for rank, facts in found.items() if facts["question"] >= question}


@dataclass(slots=True)
class _Wait:
    """For a collective to end; `is_over` asks the device where the host does not wait itself."""

    label: str
    group: ProcessGroup
    since_s: float
    is_over: Callable[[], bool] | None = None
    quiet_s: float = 0.0  # seconds of waiting until it is spoken of next
    question: int = 0  # with answers to which, if the ranks were asked


class _State:
    """What this process knows of the others, what it waits for, and whether it has written its end."""

    board = Board()
    own: RankProcess | None = None
    processes: dict[int, RankProcess] = {}  # noqa: RUF012 -- of the ranks of the world, as far as they were read
    knows_all = False  # whether all were
    done: dict[int, tuple[str, float]] = {}  # noqa: RUF012 -- the last collective of each group that ended well
    after_s = float(os.environ.get("DSHARD_STALL_S", "30")) or math.inf  # of a wait that is spoken of
    waits: dict[Any, _Wait] = {}  # noqa: RUF012 -- by thread, or by group where the host does not wait itself
    last = "", 0.0  # the collective that was waited for last, and when that ended
    is_well = True  # whether it came
    thread: threading.Thread | None = None
    stop = threading.Event()
    failed = ""  # the collective whose failure this rank is looking into
    answered = 0  # the last question
    num_caught = 0  # exceptions that have ended steps here
    dead: "Verdict | None" = None  # that was logged
    pid = 0  # of the process that watches its end, and not of forks of it
    has_said = False  # whether it has written its end
    channels: Collection[Any] = ()  # of all process groups
    look: Callable[[], object] | None = None  # at what ranks have noted


def _arrive() -> None:
    """Say where this rank runs, in each new process group; and read where the others do."""
    board = _State.board
    if board.open():
        _State.own, _State.processes, _State.done, _State.knows_all = RankProcess.own(), {}, {}, False
        _State.num_caught = _State.answered = 0
        board.post("process", asdict(_State.own))
    elif dist.is_initialized():
        missing = [rank for rank in _to_look_at([]) if rank not in _State.processes]
        _State.processes |= _read_processes(missing)
        _State.knows_all = all(rank in _State.processes for rank in missing)


def _read_processes(ranks: Iterable[int]) -> dict[int, RankProcess]:
    return {rank: RankProcess(**facts) for rank, facts in _State.board.read("process", ranks).items()}


def _to_look_at(ranks: Sequence[int]) -> list[int]:
    """The ranks of the world, unless they are too many."""
    size = dist.get_world_size()
    return list(range(size)) if size <= _MANY_RANKS else list(ranks)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who is to blame.

    Args:
        ranks: Of the world.
        text: What became of them, or what they did, as a sentence without its end.
    """

    ranks: tuple[int, ...]
    text: str


# Exceptions that a program has caught on some ranks alone.


def note_step() -> None:
    """A step of this rank begins: an exception is its own, unless a collective fails first."""
    _State.is_well = True


def note_caught(text: str, step: int) -> None:
    """Note that an exception has ended a step of this rank: peers that wait for it say so if the program catches it.

    Args:
        text: What the rank did, such as "raised ValueError: bad batch".
        step: Number of the step.

    Communicates:
        Through the store, for at most 1.5 seconds.
    """
    if not _State.is_well or _State.pid != os.getpid():  # it says what a peer did, or is a forked process's own
        return
    _State.num_caught += 1
    facts = {"text": text[:_CAUGHT_CHARS], "step": step, "num": _State.num_caught}
    ends_within(_STORE_S, lambda: _State.board.post("caught", facts))


def caught_by_some(group: ProcessGroup) -> Verdict | None:
    """The last exceptions of those ranks that have caught more than others; of the world, unless that is large.

    A rank may wait for one that waits for the one to blame, in another group.
    """
    ranks, board = _to_look_at(dist.get_process_group_ranks(group)), _State.board
    found: dict[int, Any]
    found, ends = ends_within(_STORE_S, lambda: (board.read("caught", ranks), board.ends())) or ({}, [])
    nums = {rank: found[rank]["num"] if rank in found else 0 for rank in ranks}
    uncaught = {end.rank for end in ends if end.how == "raised" and not end.ranks}
    blamed = tuple(rank for rank in ranks if nums[rank] > min(nums.values()) and rank not in uncaught)
    if not blamed:
        return None
    texts = [f"in step {found[rank]['step']} rank {rank} {found[rank]['text']}" for rank in blamed[:4]]
    return Verdict(blamed, f"{'; '.join(texts)}, which its program has caught")


# A collective has failed: who is to blame?


def is_symptom(error: BaseException | None) -> bool:
    """Whether an error is what a backend says when a peer is gone."""
    return isinstance(error, RuntimeError) and _SYMPTOM.search(str(error)) is not None


def failure(label: str, error: BaseException, group: ProcessGroup) -> DivergenceError:
    """What to raise where a collective failed: who was lost, or else where the others are.

    Communicates:
        Through the store, for at most seven seconds.
    """
    verdict: Verdict | None = None
    places: dict[int, dict[str, str]] = {}
    caught: Verdict | None = None
    if dist.is_initialized() and is_symptom(error):
        ranks, _State.failed = dist.get_process_group_ranks(group), label
        try:
            verdict, places = _solve(ranks)
        finally:
            _State.failed = ""
        caught = caught_by_some(group)
        places = _away(places) or {rank: place for rank, place in places.items() if rank in ranks}
    also = f" {_capitalized(caught.text)}." if caught is not None else ""
    if verdict is not None:
        last, when = _State.done.get(id(group), ("", 0.0))
        seen = f"; the last that all took part in was the {last}, at {_clock(when)}" if last else ""
        for channel in list(_State.channels):
            channel.close()
        return RankLostError(
            f"{label}: all ranks must take part until the end, but {verdict.text}{seen}. The backend says: "
            f"{_words_of(error)}. Look at what {names_of(verdict.ranks)} wrote, and start again from the last "
            f"checkpoint (torchrun --max-restarts does).{also}",
            verdict.ranks,
        )
    elsewhere = "".join(f" {_capitalized(_whereabouts(rank, place))}." for rank, place in list(places.items())[:4])
    return DivergenceError(
        f"{label}: all ranks must take part in the same collectives in the same order, but waiting for the peers "
        f"failed: {_words_of(error)}.{elsewhere}{also} Look at what the other ranks ran: an exception there, fewer "
        "batches (then wrap the loop in dshard.join(model)), a branch taken or a parameter read on one rank alone.",
        caught.ranks if caught is not None else tuple(_away(places)),
    )


def _words_of(error: BaseException) -> str:
    """What a backend says, without its own source files and its advice."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\] ", "", text).split(". This is typically")[0].rstrip(".")


def found_dead(ranks: Sequence[int]) -> Verdict | None:
    """Ranks on this host whose processes are gone without a word."""
    case = _Case.among(ranks)
    gone = case.gone()
    return case.by_death(gone, _State.board.ends()) if gone else None


def ended_ranks(group: ProcessGroup) -> list[int]:
    """Numbers in a group of its other ranks whose programs have ended, by an error or well."""
    ranks = dist.get_process_group_ranks(group)
    case = _Case.among(ranks)
    ends = ends_within(_STORE_S, _State.board.ends) or []
    ended = {*case.gone(), *(end.rank for end in ends if end.how != "found")}
    return [number for number, rank in enumerate(ranks) if rank in ended]


def _solve(ranks: Sequence[int]) -> tuple[Verdict | None, dict[int, dict[str, str]]]:
    """Who is to blame, and where those ranks are that have answered; ranks that wait are innocent."""
    case = _Case.among(_to_look_at(ranks))
    verdict = ends_within(_PATIENCE_S + _STORE_S, case.solve)
    if verdict is None and not case.is_solved:
        return case.without_store(ranks), {}
    if not _away(case.answers).keys().isdisjoint(ranks):  # then the others are innocent
        case.answers = {rank: place for rank, place in case.answers.items() if rank in ranks}
    found = verdict or _elsewhere(case.answers)
    if found is not None:  # for ranks that cannot see it
        ends_within(_STORE_S, lambda: _State.board.note_end("found", found.text, found.ranks))
    return verdict, case.answers


def _away(places: Mapping[int, dict[str, str] | None]) -> dict[int, Any]:
    """The places of ranks that do not wait for others, as far as is known."""
    return {rank: place for rank, place in places.items() if place is None or "waits" not in place}


def _elsewhere(places: dict[int, dict[str, str]]) -> Verdict | None:
    """Ranks that do not wait for the others."""
    away = _away(places)
    return Verdict(tuple(away), "; ".join(_whereabouts(*each) for each in list(away.items())[:4])) if away else None


@dataclass
class _Case:
    """What is known of a failure."""

    others: list[int]  # that are looked at: a chain of groups may lead to the one to blame
    processes: dict[int, RankProcess]  # where they run
    is_solved: bool = False
    answers: dict[int, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def among(cls, ranks: Iterable[int]) -> "_Case":
        """Where one of these may be to blame, but for this rank."""
        return cls([rank for rank in ranks if rank != dist.get_rank()], dict(_State.processes))

    def solve(self) -> Verdict | None:
        """Look until somebody is to blame, or all have answered."""
        board, question, began, others = _State.board, 0, time.monotonic(), self.others
        self.processes |= _read_processes([rank for rank in others if rank not in self.processes])
        verdict = None
        while verdict is None and time.monotonic() - began < _PATIENCE_S:
            verdict = self._of_ends()
            if verdict is None and time.monotonic() - began >= _ASK_AFTER_S:
                question = question or board.ask()
                self.answers |= board.answers(question, [rank for rank in others if rank not in self.answers])
                if len(self.answers) == len(others):
                    break
            time.sleep(0.02 if verdict is None else 0.0)
        # What is stopped may have answered, ahead of what holds the GIL; and others may hold it for want of that rank.
        silent = [rank for rank in others if rank not in self.answers]
        verdict = verdict or self._stopped(others) or self._by_silence(silent)
        self.is_solved = True
        return verdict

    def _of_ends(self) -> Verdict | None:
        """What words of ends, and ends without a word, say now."""
        gone = self.gone()  # looked at first: what ends between the two looks has written its word by the second
        ends = [end for end in _State.board.ends() if end.rank != _State.board.rank]
        word = _by_word(ends)
        if word is not None and any(end.how == "raised" and not end.ranks for end in ends):
            return word
        silent = self.by_death(gone, ends) or (self._stopped(self.others) if word is not None else None)
        if word is not None and silent is not None:  # what left may have had all that it needed of the other
            return Verdict((*silent.ranks, *word.ranks), f"{silent.text}, and {word.text}")
        finding = next((end for end in ends if end.ranks), None)
        by_others = Verdict(finding.ranks, f"{finding.text} (as rank {finding.rank} found)") if finding else None
        return word or silent or by_others

    def gone(self) -> list[int]:
        """Ranks whose processes on this host have ended."""
        return [rank for rank in self.others if self._is_dead(rank)]

    def by_death(self, gone: Sequence[int], ends: Sequence[End]) -> Verdict | None:
        """Processes that are gone, without having written why."""
        spoke = {end.rank for end in ends if end.how != "found"}
        dead = [rank for rank in gone if rank not in spoke]
        if not dead:
            return None
        what = "were killed, or ended" if len(dead) > 1 else "was killed, or ended"
        return Verdict(tuple(dead), f"{self._described(dead)} {what} without a word")

    def _is_here(self, rank: int) -> bool:
        process, own = self.processes.get(rank), _State.own
        return process is not None and own is not None and process.place == own.place != ""

    def _is_dead(self, rank: int) -> bool:
        if not self._is_here(rank):
            return False
        state, started = state_of(self.processes[rank].pid)
        return state in ("", "Z", "X") or started != self.processes[rank].started

    def _stopped(self, ranks: Sequence[int]) -> Verdict | None:
        """Processes on this host that do not run."""
        found = [rank for rank in ranks if self._is_here(rank) and state_of(self.processes[rank].pid)[0] in ("T", "t")]
        if not found:
            return None
        return Verdict(tuple(found), f"{self._described(found)} {_be(found)} stopped, by a signal or a debugger")

    def _by_silence(self, silent: list[int]) -> Verdict | None:
        """Blame ranks that do not answer."""
        new = [rank for rank in silent if rank not in self.processes]
        if new:
            what = f"{names_of(new)} never came to a collective or process group of dshard"
            why = "was killed, or ended without a word, is out of reach, or does something else yet"
            return Verdict(tuple(new), f"{what}: {why}")
        here = [rank for rank in silent if self._is_here(rank)]
        if here:
            text = f"{self._described(here)} gave no sign, though alive: busy in a call that holds the GIL"
            return Verdict(tuple(here), text)
        why = "its process was stopped or has died, its host is down, or the link to it is cut"
        text = f"{self._described(silent)} {_be(silent)} out of reach: {why}"
        return Verdict(tuple(silent), text) if silent else None

    def without_store(self, ranks: Sequence[int]) -> Verdict:
        """The store is out of reach: its end may be seen ahead of that of the process that held it."""
        for _ in range(25):
            dead = self.by_death(self.gone(), [])
            if dead is not None:
                return dead
            time.sleep(0.02)
        stopped = self._stopped(ranks)
        if stopped is not None:
            return stopped
        held_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        holder = "the launcher of the first host" if held_by_launcher else "rank 0"
        away = [rank for rank in self.others if not self._is_here(rank)]
        lost = f"{self._described(away)} and " if away else ""
        return Verdict(
            tuple(away) or (0,),
            f"{lost}the store of the process group, which {holder} holds, {'are' if away else 'is'} out of reach: what "
            "runs there has ended, its host is down, or the link to it is cut",
        )

    def _described(self, ranks: Sequence[int]) -> str:
        parts = []
        for rank in ranks[:8]:
            process = self.processes.get(rank)
            parts.append(f"rank {rank}" + (f" (pid {process.pid} on {process.host})" if process is not None else ""))
        return ", ".join(parts) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _by_word(ends: Sequence[End]) -> Verdict | None:
    """Those that wrote how they ended, by a fault of their own: the first that raised, else the first that left."""
    for how, what in (("raised", "raised"), ("left", "has left:")):
        first = next((end for end in ends if end.how == how and not end.ranks), None)
        if first is not None:
            return Verdict((first.rank,), f"rank {first.rank} {what} {first.text}, at {_clock(first.when)}")
    return None


def _capitalized(text: str) -> str:
    """The beginning of a sentence."""
    return text[0].upper() + text[1:]


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))


def _be(ranks: Sequence[int]) -> str:
    return "are" if len(ranks) > 1 else "is"


def _whereabouts(rank: int, facts: dict[str, str] | None) -> str:
    """Where a rank is, by what it wrote: a sentence without its capital and its end."""
    if facts is None:
        return f"rank {rank} has given no sign: it computes, was stopped, or has ended"
    if "waits" in facts:
        return f"rank {rank} waits at the {facts['waits']}"
    return (
        f"rank {rank} is at {facts['line'] or 'an unknown line'}; the last that it took part in was the {facts['did']}"
    )


# This rank waits: a thread watches for how long, and answers where this rank is when a peer's collective has failed.


def begin_wait(label: str, group: ProcessGroup | None, place: int = 0) -> None:
    """This thread waits for the peers, from now until `end_wait`; `place` is of the collective in the flight record."""
    if group is not None:
        if (record := flight.record_of(group)) is not None:
            record.begin_wait(label, group, place)
        _State.waits[threading.get_ident()] = _Wait(label, group, time.monotonic())
        if _State.thread is None:
            _start_watching()


def end_wait(label: str, group: ProcessGroup | None, *, is_well: bool) -> None:
    """This thread waits no longer: the peers came, or an error did."""
    if group is not None:
        _State.waits.pop(threading.get_ident(), None)
        _State.last, _State.is_well = (label, time.monotonic()), is_well
        if (record := flight.record_of(group)) is not None:
            record.end_wait(is_well=is_well)
        if is_well:
            _State.done[id(group)] = label, time.time()


def watch_event(label: str, group: ProcessGroup, event: Any) -> None:
    """Watch a wait of the device for the peers, which is over at an event; the host goes on."""
    _State.waits[group.group_name] = _Wait(label, group, time.monotonic(), event.query)


@contextmanager
def making(what: str, group: ProcessGroup) -> Iterator[None]:
    """For what the ranks of a group do by torch's own functions: a failure is raised as that of a collective."""
    watch_end()
    ends_within(_STORE_S, lambda: _answer(_AHEAD, {"waits": what}))  # this may hold the GIL until the timeout
    try:
        yield
    except RuntimeError as error:
        if not is_symptom(error):
            raise
        raise failure(what, error, group) from error
    finally:
        ends_within(_STORE_S, lambda: _answer(0, {}))


def _answer(question: int, place: dict[str, str]) -> None:
    """Answer all questions up to one."""
    _State.board.post("answer", {"question": question, "at": place})
    _State.answered = question


def _start_watching() -> None:
    watch_end()
    _State.thread = threading.Thread(target=_watch, name="dshard watchdog", daemon=True)
    _State.thread.start()
    atexit.register(_stop_watching)


def _stop_watching() -> None:
    """A thread that lived on would end the process badly, if it came back from the store after the interpreter."""
    if _State.thread is not None and _State.pid == os.getpid():  # a fork has no thread, but locks as that held them
        _State.stop.set()
        _State.thread.join(timeout=5)


def _watch() -> None:
    while not _State.stop.wait(_POLL_S if _State.knows_all else _FIRST_POLL_S):
        with suppress(RuntimeError, ValueError, OSError, KeyError):  # the store is gone, or the process group is
            _arrive()
            if dist.is_initialized() and (record := flight.record_of(dist.distributed_c10d._get_default_group())):
                record.note_place(_own_place())
            _look()
            if _State.look is not None:
                _State.look()


def _look() -> None:
    """Name who is missing if this rank has waited for long; answer where it is; see who died."""
    now, board = time.monotonic(), _State.board
    for key, known in list(_State.waits.items()):
        if not _c10d.is_known(known.group):  # it was destroyed, and nobody comes any more
            _State.waits.pop(key, None)
            continue
        is_old = now - known.since_s >= _patience(known)  # asking any sooner may disturb a graph that is captured
        if known.is_over is not None and is_old and known.is_over():
            _State.waits.pop(key, None)
            _State.last = known.label, max(_State.last[1], known.since_s)
    wait = _longest_wait()
    if wait is not None and now - wait.since_s >= _patience(wait):
        _speak(wait, now - wait.since_s)
    if now - (wait.since_s if wait is not None else _State.last[1]) < _IDLE_S:
        return
    question = board.ask(0)
    if question > _State.answered:
        _answer(question, _own_place())
    if wait is not None and wait.is_over is not None:  # whose backend ends the process, without a word of who it was
        verdict = found_dead(dist.get_process_group_ranks(wait.group))
        if verdict is not None and verdict != _State.dead:
            log.error(f"rank {dist.get_rank()} waits at the {wait.label}, but {verdict.text}.")
            _State.dead = verdict


def _longest_wait() -> _Wait | None:
    return min(_State.waits.values(), key=lambda wait: wait.since_s, default=None)


def _patience(wait: _Wait) -> float:
    """Seconds until a wait is spoken of: of a device's, ahead of the timeout, at which its backend ends the process."""
    timeout = _c10d.timeout_of(wait.group) if wait.is_over is not None else None
    return _State.after_s if timeout is None else min(_State.after_s, timeout.total_seconds() / 2)


def _own_place() -> dict[str, str]:
    """Where this rank is, for the others."""
    wait = _longest_wait()
    if _State.failed or wait is not None:
        place = f"{_State.failed}, which failed" if wait is None or _State.failed else wait.label
        return {"waits": place.removeprefix("the ")}
    return {"did": _State.last[0], "line": line_of_program()}


def line_of_program() -> str:
    """Where the main thread is, as file:line; empty if in no file of the program's own."""
    return users_line(sys._current_frames().get(threading.main_thread().ident or 0))


def _speak(wait: _Wait, waited_s: float) -> None:
    """Log who is missing, after some time, and whenever that has doubled: ask all where they are, and read on later."""
    is_speaker = wait.group.size() <= _MANY_SPEAKERS or wait.group.rank() < _NUM_SPEAKERS
    if not is_speaker or waited_s < wait.quiet_s:
        return
    if wait.question:
        log.warning(_message(wait, waited_s))
        wait.quiet_s, wait.question = 2 * waited_s, 0
    else:
        wait.quiet_s, wait.question = waited_s + _GRACE_S, _State.board.ask()


def _message(wait: _Wait, waited_s: float) -> str:
    """Who is missing, and why that may be, by what the ranks have answered."""
    own = dist.get_rank()
    ranks = [rank for rank in dist.get_process_group_ranks(wait.group) if rank != own]
    answers = _State.board.answers(wait.question, ranks)
    found = {rank: answers.get(rank) for rank in ranks}
    away = _away(found)
    text = f"rank {own} has waited for {waited_s:.0f} s (since {_clock(time.time() - waited_s)}) at the {wait.label}, "
    if not away:
        others = {_whereabouts(rank, facts) for rank, facts in found.items()}
        elsewhere = sorted(other for other in others if not other.endswith(f"the {wait.label}"))
        return (
            f"{text}but all other ranks of it wait, too: {'; '.join(elsewhere[:4]) or 'for the same'}. Ranks that wait "
            "at different places have taken different branches; else the network between them is at fault."
        )
    shown = "; ".join(_capitalized(_whereabouts(rank, facts)) for rank, facts in list(away.items())[:4])
    more = f"; and {len(away) - 4} more" if len(away) > 4 else ""
    return (
        f"{text}for {names_of(list(away))}. {shown}{more}. All ranks must take part: a rank that has fewer batches "
        "than the others (wrap the loop in dshard.join(model)), has ended by an error, or works alone, as to save or "
        "to evaluate, keeps them waiting until the process group's timeout."
    )


# This process ends: it says so to the others, who wait for it.


def watch_end() -> None:
    """From now on, and once, have this process say where it runs, and how it ends."""
    if _State.pid == os.getpid():
        return
    _State.pid, _State.has_said = os.getpid(), False
    ends_within(_STORE_S, _arrive)
    previous: _Hook = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        _say_raised(error)
        previous(kind, error, traceback)

    sys.excepthook = on_exception
    processes.Finalize(None, _on_exit, exitpriority=100)  # those of multiprocessing end by it alone, others by it too
    atexit.register(_on_exit)


def watch_ledgers(look: Callable[[], object]) -> None:
    """Have the thread that watches look, too, at what ranks have noted of what they do."""
    _State.look = look


def end_process(text: str) -> None:
    """End this process, whose program waits for a device that waits for ever."""
    log.error(text)
    _say("raised", text)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def watch_channels(channels: Collection[Any]) -> None:
    """Have the channels of all process groups come to their ends with this rank.

    Ahead of the end of this process each one's `finish` is called, for at most some seconds: what peers will wait for
    must arrive. `close` is called where this rank has lost a peer: others wait for this rank, which comes no more.
    """
    _State.channels = channels


def _finish_channels() -> None:
    for channel in list(_State.channels):
        with suppress(RuntimeError, ValueError, OSError):  # of peers that are gone: others wait for the next one
            channel.finish()


def _on_exit() -> None:
    """The interpreter ends: by what a child of multiprocessing raised, or what no hook of ours was shown, or well."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit) and error.code:
        error = error.__context__
    if error is not None and not isinstance(error, SystemExit):
        _say_raised(error)
    elif _State.pid == os.getpid() and not _State.has_said:
        if _State.channels:
            ends_within(_FINISH_S, _finish_channels)
        _say("left", "its program has come to an end, or called sys.exit")


def _say_raised(error: BaseException) -> None:
    """What ends this rank; where a peer's end is behind it, and it does not say so, that is found and noted."""
    if _State.pid != os.getpid() or _State.has_said:
        return
    blamed = _blamed_in(error)
    text = " ".join(f"{type(error).__name__}: {error}".split())
    is_ours = isinstance(error, DShardError)
    if blamed:
        _say("raised", text, blamed)
    elif is_ours and is_symptom(error.__cause__):
        _say("failed", text)
    elif not is_ours and is_symptom(error) and dist.is_initialized() and dist.get_world_size() > 1:
        verdict, places = _solve(range(dist.get_world_size()))
        verdict = verdict or _elsewhere(places)
        if verdict is not None:
            error.add_note(f"dshard: {verdict.text}. Look at what {names_of(verdict.ranks)} wrote.")
        _say("failed", text if verdict is None else verdict.text, verdict.ranks if verdict is not None else ())
    else:
        _say("raised", text)


def _blamed_in(error: BaseException | None) -> tuple[int, ...]:
    """The ranks that an error, or what led to it, says are to blame."""
    for _ in range(20):
        if error is None or (isinstance(error, DivergenceError) and error.ranks):
            break
        error = error.__cause__ or error.__context__
    return error.ranks if isinstance(error, DivergenceError) else ()


def _say(how: str, text: str, ranks: tuple[int, ...] = ()) -> None:
    _State.has_said = True
    flight.note_end(how, text)
    ends_within(_STORE_S, lambda: _State.board.note_end(how, text[:_TEXT_CHARS], ranks))
    if _holds_store() and (how != "left" or _State.look is not None):  # whose answers others may have still to read
        time.sleep(_READ_S)


def _holds_store() -> bool:
    """Whether the store, and with it what ranks have written there, goes with this process."""
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    return not is_alone and dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
