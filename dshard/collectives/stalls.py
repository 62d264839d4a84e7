"""Peers that do not come: each rank that waits says who is missing, where and since when, long before the timeout.

A thread looks once a second at what this process waits for. Where that takes too long it writes so to the store of the
default process group, as does a rank that has begun no collective for as long; and then it reads what the peers wrote.
"""

import atexit
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from dshard.collectives import _c10d
from dshard.collectives._c10d import ProcessGroup

__all__ = ["begin_wait", "end_wait", "users_line", "watch_event"]

log = logging.getLogger("dshard")

_POLL_S = 1.0
_GRACE_S = 2.0  # for the peers to write down where they are
_MANY_RANKS, _NUM_SPEAKERS = 64, 8  # in groups of more ranks, as many of them speak
_OWN_FOLDERS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


@dataclass(frozen=True, slots=True)
class _Wait:
    """For a collective to end; `is_over` tells it where the host does not wait itself."""

    label: str
    group: ProcessGroup
    since_s: float
    is_over: Callable[[], bool] | None = None


class _State:
    """Of this process."""

    after_s = float(os.environ.get("DSHARD_STALL_S", "30"))
    waits: dict[Any, _Wait] = {}  # noqa: RUF012 -- by thread, or by group where the host does not wait itself
    last = "", 0.0  # the collective that was waited for last, and when that ended
    thread: threading.Thread | None = None
    stop = threading.Event()


def begin_wait(label: str, group: ProcessGroup | None) -> None:
    """This thread waits for the peers, from now until `end_wait`."""
    if group is not None:
        _State.waits[threading.get_ident()] = _Wait(label, group, time.monotonic())
        if _State.thread is None and _State.after_s > 0:
            _start()


def end_wait(label: str, group: ProcessGroup | None) -> None:
    """They came, or an error did."""
    if group is not None:
        _State.waits.pop(threading.get_ident(), None)
        _State.last = label, time.monotonic()


def watch_event(label: str, group: ProcessGroup, event: Any) -> None:
    """A device has been told to wait for the peers, ahead of an event; the host goes on."""
    _State.waits[_c10d.name_of(group)] = _Wait(label, group, time.monotonic(), event.query)


def _start() -> None:
    _State.thread = threading.Thread(target=_run, name="dshard stalls", daemon=True)
    _State.thread.start()
    atexit.register(_end)


def _end() -> None:
    """A thread that lived on would end the process badly, if it came back from the store after the interpreter."""
    _State.stop.set()
    if _State.thread is not None:
        _State.thread.join(timeout=5)


def _run() -> None:
    board, told = _Board(), _Doubling()
    while not _State.stop.wait(_POLL_S):
        try:
            _look(board, told)
        except (RuntimeError, ValueError, OSError):  # the store is gone, or the process group is
            board.forget()


def _look(board: "_Board", told: "_Doubling") -> None:
    now = time.monotonic()
    for key, known in list(_State.waits.items()):
        is_old = now - known.since_s >= _State.after_s  # asking any sooner may disturb a graph that is captured
        if known.is_over is not None and is_old and known.is_over():
            _State.waits.pop(key, None)
            _State.last = known.label, max(_State.last[1], known.since_s)
    wait = min(_State.waits.values(), key=lambda wait: wait.since_s, default=None)
    if wait is not None and now - wait.since_s >= _State.after_s:
        board.post({"waits": wait.label})
        speaks = _c10d.size_of(wait.group) <= _MANY_RANKS or _c10d.rank_in(wait.group) < _NUM_SPEAKERS
        if speaks and told.is_due(wait, now - wait.since_s, _State.after_s + _GRACE_S):
            log.warning(_message(wait, now - wait.since_s, board))
    elif wait is None and _State.last[0] and now - _State.last[1] >= _State.after_s:
        board.post({"did": _State.last[0], "line": users_line(_main_frame())})
    else:
        board.post(None)


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


class _Board:
    """What each rank of the world has written of itself, in the store of the default process group."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The process group is gone."""
        self._store: Any = None
        self._posted: dict[str, str] | None = None

    def post(self, facts: dict[str, str] | None) -> None:
        """Write them for this rank, unless they are there."""
        if facts != self._posted and dist.is_initialized():
            self._open().set(str(dist.get_rank()), json.dumps(facts))
            self._posted = facts

    def read(self, rank: int) -> dict[str, str] | None:
        """What a rank of the world wrote."""
        store = self._open()
        found = json.loads(store.get(str(rank))) if store.check([str(rank)]) else None
        return found if isinstance(found, dict) else None

    def _open(self) -> Any:
        if self._store is None:
            self._store = dist.PrefixStore("dshard stalls", dist.distributed_c10d._get_default_store())
        return self._store


def _message(wait: _Wait, waited_s: float, board: _Board) -> str:
    """Who is missing, and why that may be."""
    own = dist.get_rank()
    ranks = [rank for rank in dist.get_process_group_ranks(wait.group) if rank != own]
    found = {rank: board.read(rank) for rank in ranks}
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
    shown = "; ".join(_whereabouts(rank, facts) for rank, facts in list(away.items())[:4])
    more = f"; and {len(away) - 4} more" if len(away) > 4 else ""
    return (
        f"{text}for {_names(list(away))}. {shown}{more}. All ranks must take part: a rank that has fewer batches than "
        "the others (wrap the loop in dshard.join(model)), has ended by an error, or works alone, as to save or to "
        "evaluate, keeps them waiting until the process group's timeout."
    )


def _whereabouts(rank: int, facts: dict[str, str] | None) -> str:
    if facts is None:
        return f"Rank {rank} has given no sign: it computes, was stopped, or has ended"
    return (
        f"Rank {rank} is at {facts['line'] or 'an unknown line'}; the last that it took part in was the {facts['did']}"
    )


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}"


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def users_line(frame: FrameType | None) -> str:
    """Where a stack leaves the user's own program, as file:line; empty if nowhere."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OWN_FOLDERS) and "<" not in file:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
