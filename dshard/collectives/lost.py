"""Who is to blame when a collective fails: the rank that died, raised, left, stopped, or cannot be reached.

What the backend says is where the connection broke. Of the ranks on this host the processes can be looked at; others
have written how they ended, or what they found; and who says nothing is asked.
"""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch.distributed as dist

from dshard.collectives.board import STORE_S, Board, End, RankProcess, ends_within, state_of
from dshard.errors import RankLostError

PATIENCE_S = 2.5  # for the peers to be found dead, or to say where they are
_ASK_AFTER_S = 0.2
_LEAVING_S = 0.3  # from the exception that a program does not catch to its last word
_MANY_RANKS = 256  # in larger worlds only those of the group are looked at

_SYMPTOM = re.compile(
    r"connection|broken pipe|socket|tim(ed?|e) ?out|closed by peer|remote (process|peer)|unreachable|no route"
    r"|ncclRemoteError|ncclSystemError|failed to (recv|send)|aborted|wait timeout",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who is to blame.

    Args:
        ranks: Of the world.
        text: What became of them, as a sentence without its end.
    """

    ranks: tuple[int, ...]
    text: str


class _State:
    """What this process knows of the others."""

    board = Board()
    own: RankProcess | None = None
    num_wanted = 0  # processes
    processes: dict[int, RankProcess] = {}  # noqa: RUF012 -- of the ranks of the world, as far as they were read
    done: dict[int, tuple[str, float]] = {}  # noqa: RUF012 -- the last collective of each group that ended well
    found: Verdict | None = None  # whom this rank has told its program of


def board() -> Board:
    """The board of this process."""
    return _State.board


def arrive() -> None:
    """Say where this rank runs, in each new process group; and read where the others do."""
    if _State.board.open():
        _State.own, _State.processes, _State.done, _State.found = RankProcess.own(), {}, {}, None
        _State.board.post("process", asdict(_State.own))
    elif _State.board.is_open and dist.is_initialized():
        missing = [rank for rank in _world([]) if rank not in _State.processes]
        _State.num_wanted = len(_State.processes) + len(missing)
        if missing:
            _State.processes |= _State.board.processes(missing)


def knows_processes() -> bool:
    """Whether all ranks of the world have been read."""
    return bool(_State.processes) and len(_State.processes) >= _State.num_wanted


def note_done(label: str, group: dist.ProcessGroup) -> None:
    """A collective of a group has ended well."""
    _State.done[id(group)] = label, time.time()


def _world(ranks: Sequence[int]) -> list[int]:
    """The ranks to look at: all, unless they are too many."""
    size = dist.get_world_size()
    return list(range(size)) if size <= _MANY_RANKS else list(ranks)


def is_symptom(error: BaseException | None) -> bool:
    """Whether an error is what a backend says when a peer is gone."""
    return isinstance(error, RuntimeError) and _SYMPTOM.search(str(error)) is not None


def looked_into(
    label: str, error: BaseException, group: dist.ProcessGroup
) -> "RankLostError | dict[int, dict[str, str]]":
    """Why a collective of a group failed: a rank was lost, or where each of the others is.

    Communicates:
        Through the store, for at most four seconds.
    """
    if not dist.is_initialized() or not is_symptom(error):
        return {}
    verdict, places = _solve(dist.get_process_group_ranks(group))
    if verdict is None:
        return {rank: place for rank, place in places.items() if "waits" not in place} or {
            rank: place for rank, place in places.items() if rank in dist.get_process_group_ranks(group)
        }
    _State.found = verdict
    last, when = _State.done.get(id(group), ("", 0.0))
    seen = f"; the last that all took part in was the {last}, at {_clock(when)}" if last else ""
    return RankLostError(
        f"{label}: all ranks must take part until the end, but {verdict.text}{seen}. The backend says: "
        f"{backends_words(error)}. Look at what {names(verdict.ranks)} wrote, and start again from the last "
        "checkpoint (torchrun --max-restarts does).",
        verdict.ranks,
    )


def backends_words(error: BaseException) -> str:
    """What a backend says, without its own source files and its advice."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\] ", "", text).split(". This is typically")[0].rstrip(".")


def find(ranks: Sequence[int]) -> Verdict | None:
    """Who is to blame, if only by being elsewhere; None if all ranks wait.

    Args:
        ranks: That were waited for.
    """
    verdict, places = _solve(ranks)
    return verdict or _elsewhere(places)


def last_verdict() -> Verdict | None:
    """Whom this rank has told its program of."""
    return _State.found


def ended(rank: int, known: Verdict | None = None) -> RankLostError | None:
    """What to say of a rank that has left a step, if it comes to its end soon, or told of another that did.

    Args:
        rank: Of the world.
        known: What it told.
    """
    verdict, until = known, time.monotonic() + _LEAVING_S
    while verdict is None:
        ends = ends_within(STORE_S, _State.board.ends)
        verdict = _by_word([end for end in ends if end.rank == rank]) if ends is not None else _solve([rank])[0]
        if verdict is None:
            if ends is None or time.monotonic() > until:
                return None
            time.sleep(0.02)
    _State.found = verdict
    return RankLostError(
        f"all ranks must take part until the end, but {verdict.text}. Look at what {names(verdict.ranks)} wrote, and "
        "start again from the last checkpoint (torchrun --max-restarts does).",
        verdict.ranks,
    )


def found_dead(ranks: Sequence[int]) -> Verdict | None:
    """Ranks on this host whose processes are gone without a word."""
    case = _Case(list(ranks), dist.get_rank(), dict(_State.processes))
    gone = case.gone()
    return case.by_death(gone, _State.board.ends()) if gone else None


def _solve(ranks: Sequence[int]) -> tuple[Verdict | None, dict[int, dict[str, str]]]:
    case = _Case(_world(ranks), dist.get_rank(), dict(_State.processes))
    verdict = ends_within(PATIENCE_S + STORE_S, case.solve)
    if verdict is None and not case.is_solved:
        return case.by_death_soon() or case.stopped(ranks) or case.without_store(), {}
    if any("waits" not in case.answers.get(rank, {"waits"}) for rank in ranks):  # then the others are innocent
        case.answers = {rank: place for rank, place in case.answers.items() if rank in ranks}
    found = verdict or _elsewhere(case.answers)
    if found is not None:  # for ranks that cannot see it
        ends_within(STORE_S, lambda: _State.board.note_end("found", found.text, found.ranks))
    return verdict, case.answers


def _elsewhere(places: dict[int, dict[str, str]]) -> Verdict | None:
    """Ranks that do not wait for the others."""
    away = {rank: place for rank, place in places.items() if "waits" not in place}
    return Verdict(tuple(away), "; ".join(whereabouts(*each) for each in list(away.items())[:4])) if away else None


@dataclass
class _Case:
    """What is known of a failure."""

    world: list[int]  # all ranks that are looked at
    own: int  # this rank
    processes: dict[int, RankProcess]  # where they run
    is_solved: bool = False
    answers: dict[int, dict[str, str]] = field(default_factory=dict)

    def solve(self) -> Verdict | None:
        """Look until somebody is to blame, or all have answered."""
        board, question, began = _State.board, 0, time.monotonic()
        others = self._others()  # a chain of groups may lead to the one to blame
        self.processes |= board.processes([rank for rank in self.world if rank not in self.processes])
        verdict = None
        while verdict is None and time.monotonic() - began < PATIENCE_S:
            verdict = self._of_ends()
            if verdict is None and time.monotonic() - began >= _ASK_AFTER_S:
                question = question or board.ask()
                self.answers |= board.answers(question, [rank for rank in others if rank not in self.answers])
                if len(self.answers) == len(others):
                    break
            time.sleep(0.02 if verdict is None else 0.0)
        # What is stopped may have answered, ahead of what holds the GIL; and others may hold it for want of that rank.
        silent = [rank for rank in others if rank not in self.answers]
        verdict = verdict or self.stopped(others) or self._by_silence(silent)
        self.is_solved = True
        return verdict

    def _of_ends(self) -> Verdict | None:
        """What words of ends, and ends without a word, say now."""
        gone = self.gone()  # looked at first: what ends between the two looks has written its word by the second
        ends = [end for end in _State.board.ends() if end.rank != self.own]
        word = _by_word(ends)
        if word is not None and any(end.how == "raised" and not end.ranks for end in ends):
            return word
        silent = self.by_death(gone, ends) or (self.stopped(self._others()) if word is not None else None)
        if word is not None and silent is not None:  # what left may have had all that it needed of the other
            return Verdict((*silent.ranks, *word.ranks), f"{silent.text}, and {word.text}")
        return word or silent or _by_finding(ends)

    def _others(self) -> list[int]:
        return [rank for rank in self.world if rank != self.own]

    def gone(self) -> list[int]:
        """Ranks whose processes on this host have ended."""
        return [rank for rank in self._others() if self._is_dead(rank)]

    def by_death(self, gone: Sequence[int], ends: Sequence[End]) -> Verdict | None:
        """Processes that are gone, without having written why."""
        spoke = {end.rank for end in ends if end.how != "found"}
        dead = [rank for rank in gone if rank not in spoke]
        if not dead:
            return None
        what = "were killed, or ended" if len(dead) > 1 else "was killed, or ended"
        return Verdict(tuple(dead), f"{self._described(dead)} {what} without a word")

    def by_death_soon(self) -> Verdict | None:
        """The same without the store, whose end may be seen ahead of that of the process that held it."""
        for _ in range(25):
            verdict = self.by_death(self.gone(), [])
            if verdict is not None:
                return verdict
            time.sleep(0.02)
        return None

    def _is_here(self, rank: int) -> bool:
        process, own = self.processes.get(rank), _State.own
        return process is not None and own is not None and process.place == own.place != ""

    def _is_dead(self, rank: int) -> bool:
        if not self._is_here(rank):
            return False
        state, started = state_of(self.processes[rank].pid)
        return state in ("", "Z", "X") or started != self.processes[rank].started

    def stopped(self, ranks: Sequence[int]) -> Verdict | None:
        """Processes on this host that do not run."""
        found = [rank for rank in ranks if self._is_here(rank) and state_of(self.processes[rank].pid)[0] in ("T", "t")]
        if not found:
            return None
        return Verdict(tuple(found), f"{self._described(found)} {_be(found)} stopped, by a signal or a debugger")

    def _by_silence(self, silent: list[int]) -> Verdict | None:
        """Blame ranks that do not answer."""
        if not silent:
            return None
        new = [rank for rank in silent if rank not in self.processes]
        if new:
            what = f"{names(new)} never came to a collective or process group of dshard"
            why = "was killed, or ended without a word, is out of reach, or does something else yet"
            return Verdict(tuple(new), f"{what}: {why}")
        here = [rank for rank in silent if self._is_here(rank)]
        if here:
            return Verdict(
                tuple(here), f"{self._described(here)} gave no sign, though alive: busy in a call that holds the GIL"
            )
        why = "its process was stopped or has died, its host is down, or the link to it is cut"
        return Verdict(tuple(silent), f"{self._described(silent)} {_be(silent)} out of reach: {why}")

    def without_store(self) -> Verdict:
        """The store itself is out of reach."""
        held_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        holder = "the launcher of the first host" if held_by_launcher else "rank 0"
        away = [rank for rank in self._others() if not self._is_here(rank)]
        store = f"the store of the process group, which {holder} holds,"
        why = "has ended, its host is down, or the link"
        if not away:
            return Verdict((0,), f"{store} is out of reach: that process {why} to it is cut")
        lost = f"{self._described(away)} {_be(away)} out of reach, and {store} too"
        return Verdict(tuple(away), f"{lost}: what runs there {why} between is cut")

    def _described(self, ranks: Sequence[int]) -> str:
        parts = []
        for rank in ranks[:8]:
            process = self.processes.get(rank)
            parts.append(f"rank {rank}" + (f" (pid {process.pid} on {process.host})" if process is not None else ""))
        return ", ".join(parts) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _by_word(ends: Sequence[End]) -> Verdict | None:
    """Those that wrote how they ended, by a fault of their own: the first that raised, else the first that left."""
    own = [end for end in ends if not end.ranks]
    first = next((end for end in own if end.how == "raised"), None) or next(
        (end for end in own if end.how == "left"), None
    )
    if first is None:
        return None
    what = f"raised {first.text}" if first.how == "raised" else f"has left: {first.text}"
    return Verdict((first.rank,), f"rank {first.rank} {what}, at {_clock(first.when)}")


def _by_finding(ends: Sequence[End]) -> Verdict | None:
    """What others found."""
    first = next((end for end in ends if end.ranks), None)
    return Verdict(first.ranks, f"{first.text} (as rank {first.rank} found)") if first is not None else None


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))


def _be(ranks: Sequence[int]) -> str:
    return "are" if len(ranks) > 1 else "is"


def names(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}"


def whereabouts(rank: int, facts: dict[str, str] | None) -> str:
    """Where a rank is, by what it wrote: a sentence without its capital and its end."""
    if facts is None:
        return f"rank {rank} has given no sign: it computes, was stopped, or has ended"
    if "waits" in facts:
        return f"rank {rank} waits at the {facts['waits']}"
    return (
        f"rank {rank} is at {facts['line'] or 'an unknown line'}; the last that it took part in was the {facts['did']}"
    )
