"""Peers that do not come: each rank that waits says who is missing, where and since when, long before the timeout.

A thread looks twice a second at what this process waits for. Where that takes too long it writes so to the store of the
default process group, as does a rank that has begun no collective for as long; and then it reads what the peers wrote.
It also answers where this rank is, when a peer's collective has failed.
"""

import atexit
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from dshard.collectives import _c10d, flight
from dshard.collectives._c10d import ProcessGroup
from dshard.collectives.board import STORE_S, ends_within
from dshard.collectives.callers import users_line
from dshard.collectives.exits import watch_end
from dshard.collectives.lost import (
    Verdict,
    arrive,
    backends_words,
    board,
    found_dead,
    is_symptom,
    knows_processes,
    looked_into,
    names,
    note_done,
    whereabouts,
)
from dshard.errors import DivergenceError, RankLostError

log = logging.getLogger("dshard")

_POLL_S, _FIRST_POLL_S = 0.5, 0.05  # until it is known where the others run
_IDLE_S = 1.0  # without the end of a collective, after which a peer may be asking
_AHEAD = 1 << 62  # of all questions
_GRACE_S = 2.0  # for the peers to write down where they are
_MANY_RANKS, _NUM_SPEAKERS = 64, 8  # in groups of more ranks, as many of them speak


@dataclass(frozen=True, slots=True)
class _Wait:
    """For a collective to end; `is_over` tells it where the host does not wait itself."""

    label: str
    group: ProcessGroup
    since_s: float
    is_over: Callable[[], bool] | None = None


class _State:
    """What this process waits for, and the thread that watches it."""

    after_s = float(os.environ.get("DSHARD_STALL_S", "30")) or math.inf
    waits: dict[Any, _Wait] = {}  # noqa: RUF012 -- by thread, or by group where the host does not wait itself
    last = "", 0.0  # the collective that was waited for last, and when that ended
    thread: threading.Thread | None = None
    stop = threading.Event()
    making = ""  # what torch makes, and all ranks of a group must take part in
    failed = ""  # the collective whose failure this rank is looking into
    answered = 0  # the last question
    dead: Verdict | None = None  # whom it has told of


def begin_wait(label: str, group: ProcessGroup | None, place: flight.Place | None = None) -> None:
    """This thread waits for the peers, from now until `end_wait`; `place` is of the collective in the flight record."""
    if group is not None:
        if flight.is_kept():
            flight.note_wait(label, group, place)
        _State.waits[threading.get_ident()] = _Wait(label, group, time.monotonic())
        if _State.thread is None:
            _start()


def end_wait(label: str, group: ProcessGroup | None, *, is_well: bool) -> None:
    """This thread waits no longer: the peers came, or an error did."""
    if group is not None:
        _State.waits.pop(threading.get_ident(), None)
        _State.last = label, time.monotonic()
        if flight.is_kept():
            flight.note_waited(group, is_well=is_well)
        if is_well:
            note_done(label, group)


def failure(label: str, error: BaseException, group: ProcessGroup) -> DivergenceError:
    """What to raise where a collective failed: who was lost, or else where the others are.

    Communicates:
        Through the store, for at most four seconds.
    """
    _State.failed = label
    try:
        outcome = looked_into(label, error, group)
    finally:
        _State.failed = ""
    if isinstance(outcome, RankLostError):
        return outcome
    elsewhere = "".join(f" R{whereabouts(rank, facts)[1:]}." for rank, facts in list(outcome.items())[:4])
    away = tuple(rank for rank, facts in outcome.items() if "waits" not in facts)
    return DivergenceError(
        f"{label}: all ranks must take part in the same collectives in the same order, but waiting for the peers "
        f"failed: {backends_words(error)}.{elsewhere} Look at what the other ranks ran: an exception there, fewer "
        "batches (then wrap the loop in dshard.join(model)), a branch taken or a parameter read on one rank alone.",
        away,
    )


@contextmanager
def making(what: str, group: ProcessGroup) -> Iterator[None]:
    """For what the ranks of a group do by torch's own functions; its failures are told as those of collectives."""
    watch_end()
    _State.making = what
    ends_within(STORE_S, lambda: _post_answer(_AHEAD, {"waits": what}))  # for this may hold the GIL until the timeout
    try:
        yield
    except RuntimeError as error:
        if not is_symptom(error):
            raise
        raise failure(what, error, group) from error
    finally:
        ends_within(STORE_S, lambda: _post_answer(0, {}))
        _State.making = ""


def watch_event(label: str, group: ProcessGroup, event: Any) -> None:
    """A device has been told to wait for the peers, ahead of an event; the host goes on."""
    _State.waits[_c10d.name_of(group)] = _Wait(label, group, time.monotonic(), event.query)


def _start() -> None:
    watch_end()
    _State.thread = threading.Thread(target=_run, name="dshard stalls", daemon=True)
    _State.thread.start()
    atexit.register(_end)


def _end() -> None:
    """A thread that lived on would end the process badly, if it came back from the store after the interpreter."""
    _State.stop.set()
    if _State.thread is not None:
        _State.thread.join(timeout=5)


def _run() -> None:
    told = _Doubling()
    while not _State.stop.wait(_POLL_S if knows_processes() else _FIRST_POLL_S):
        try:
            arrive()
            if flight.is_kept():
                flight.note_place(_own_place())
            _look(told)
        except (RuntimeError, ValueError, OSError):  # the store is gone, or the process group is
            pass


def _look(told: "_Doubling") -> None:
    now = time.monotonic()
    for key, known in list(_State.waits.items()):
        is_old = now - known.since_s >= _patience(known)  # asking any sooner may disturb a graph that is captured
        if known.is_over is not None and is_old and known.is_over():
            _State.waits.pop(key, None)
            _State.last = known.label, max(_State.last[1], known.since_s)
    wait = min(_State.waits.values(), key=lambda wait: wait.since_s, default=None)
    if wait is not None and now - wait.since_s >= _patience(wait):
        board().post("stall", {"waits": wait.label})
        speaks = _c10d.size_of(wait.group) <= _MANY_RANKS or _c10d.rank_in(wait.group) < _NUM_SPEAKERS
        if speaks and told.is_due(wait, now - wait.since_s, _patience(wait) + _GRACE_S):
            log.warning(_message(wait, now - wait.since_s))
    elif wait is None and _State.last[0] and now - _State.last[1] >= _State.after_s:
        board().post("stall", _own_place())
    else:
        board().post("stall", None)
    if now - (wait.since_s if wait is not None else _State.last[1]) >= _IDLE_S:
        _answer()
        if wait is not None and wait.is_over is not None:
            _tell_of_deaths(wait)


def _patience(wait: _Wait) -> float:
    """Seconds until a wait is spoken of: of a device's, ahead of the timeout, at which its backend ends the process."""
    timeout = _c10d.timeout_of(wait.group) if wait.is_over is not None else None
    return _State.after_s if timeout is None else min(_State.after_s, timeout.total_seconds() / 2)


def _own_place() -> dict[str, str]:
    """Where this rank is, for the others."""
    if _State.failed:
        return {"waits": f"{_State.failed}, which failed"}
    wait = min(_State.waits.values(), key=lambda wait: wait.since_s, default=None)
    if wait is not None:
        return {"waits": wait.label}
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    return {"did": _State.last[0], "line": users_line(main)}


def _answer() -> None:
    """Say where this rank is, if a peer has asked since the last time."""
    if _State.making:  # it has answered ahead
        return
    question = board().newest_question()
    if question > _State.answered:
        _post_answer(question, _own_place())
    _State.answered = question


def _post_answer(question: int, place: dict[str, str]) -> None:
    """Answer all questions up to one."""
    board().post("answer", {"question": question, "at": place})


def _tell_of_deaths(wait: _Wait) -> None:
    """A peer on this host is gone: the backend of a device ends the process, without a word of who it was."""
    verdict = found_dead(dist.get_process_group_ranks(wait.group))
    if verdict is not None and verdict != _State.dead:
        log.error(f"rank {dist.get_rank()} waits at the {wait.label}, but {verdict.text}.")
        _State.dead = verdict


class _Doubling:
    """When to speak of a wait: after some time, and whenever that has doubled."""

    def __init__(self) -> None:
        self._wait: _Wait | None = None
        self._next_s = 0.0

    def is_due(self, wait: _Wait, waited_s: float, first_s: float) -> bool:
        if wait is not self._wait:
            self._wait, self._next_s = wait, first_s
        if waited_s < self._next_s:
            return False
        self._next_s = 2 * waited_s
        return True


def _message(wait: _Wait, waited_s: float) -> str:
    """Who is missing, and why that may be."""
    own = dist.get_rank()
    ranks = [rank for rank in dist.get_process_group_ranks(wait.group) if rank != own]
    read = board().read("stall", ranks)
    found = {rank: read.get(rank) for rank in ranks}
    away = {rank: facts for rank, facts in found.items() if facts is None or "waits" not in facts}
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited_s))
    text = f"rank {own} has waited for {waited_s:.0f} s (since {since}) at the {wait.label}, "
    if not away:
        others = {f"rank {rank} waits at the {facts['waits']}" for rank, facts in found.items() if facts}
        elsewhere = sorted(other for other in others if not other.endswith(f"the {wait.label}"))
        return (
            f"{text}but all other ranks of it wait, too: {'; '.join(elsewhere[:4]) or 'for the same'}. Ranks that wait "
            "at different places have taken different branches; else the network between them is at fault."
        )
    shown = "; ".join(f"R{whereabouts(rank, facts)[1:]}" for rank, facts in list(away.items())[:4])
    more = f"; and {len(away) - 4} more" if len(away) > 4 else ""
    return (
        f"{text}for {names(list(away))}. {shown}{more}. All ranks must take part: a rank that has fewer batches than "
        "the others (wrap the loop in dshard.join(model)), has ended by an error, or works alone, as to save or to "
        "evaluate, keeps them waiting until the process group's timeout."
    )
