"""A rank that ends says so to the others, who wait for it: what it raised, or that it has left."""

import atexit
import os
import sys
import time
from collections.abc import Callable
from multiprocessing import util as processes
from types import TracebackType

import torch.distributed as dist

from dshard.collectives import flight
from dshard.collectives.board import STORE_S, ends_within
from dshard.collectives.lost import arrive, board, find, is_symptom, names
from dshard.errors import DivergenceError, DShardError

_TEXT_CHARS = 600  # of what was raised
_READ_S = 0.5  # for the others to read it, where the store is gone as soon as this process is
_FINISH_S = 5.0  # for the others to come to what this rank has begun
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class _State:
    """Whether this process has told of its end; `pid` tells it from forks of it."""

    pid = 0
    has_said = False
    finish: Callable[[], object] | None = None  # what this rank has begun


def watch_end() -> None:
    """From now on, and once, have this process tell where it runs, and its end."""
    if _State.pid == os.getpid():
        return
    _State.pid, _State.has_said = os.getpid(), False
    ends_within(STORE_S, arrive)
    previous: _Hook = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        _say_raised(error)
        previous(kind, error, traceback)

    sys.excepthook = on_exception
    processes.Finalize(None, _on_exit, exitpriority=100)  # those of multiprocessing end by it alone, others by it too
    atexit.register(_on_exit)


def finish_at_end(call: Callable[[], object]) -> None:
    """Have a process that ends do something first, for at most some seconds: what peers will wait for must arrive."""
    _State.finish = call


def _on_exit() -> None:
    """The interpreter ends: by what a child of multiprocessing raised, or what no hook of ours was shown, or well."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit) and error.code:
        error = error.__context__
    if error is not None and not isinstance(error, SystemExit):
        _say_raised(error)
    elif _State.pid == os.getpid() and not _State.has_said:
        if _State.finish is not None:
            ends_within(_FINISH_S, _State.finish)
        _say("left", "its program has come to an end, or called sys.exit")


def _say_raised(error: BaseException) -> None:
    """What ends this rank; where a peer's end is behind it, and it does not say so, that is found and noted."""
    if _State.pid != os.getpid() or _State.has_said:
        return
    blamed = _blamed_in(error)
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if blamed:
        _say("raised", text, blamed)
    elif isinstance(error, DShardError) and is_symptom(error.__cause__):
        _say("failed", text)
    elif (
        not isinstance(error, DShardError) and is_symptom(error) and dist.is_initialized() and dist.get_world_size() > 1
    ):
        verdict = find(range(dist.get_world_size()))
        if verdict is not None:
            error.add_note(f"dshard: {verdict.text}. Look at what {names(verdict.ranks)} wrote.")
        _say("failed", text if verdict is None else verdict.text, verdict.ranks if verdict is not None else ())
    else:
        _say("raised", text)


def _blamed_in(error: BaseException | None) -> tuple[int, ...]:
    """The ranks that an error, or what led to it, says are to blame."""
    for _ in range(20):
        if error is None:
            break
        if isinstance(error, DivergenceError) and error.ranks and not error.left_step:  # which a program may catch
            return error.ranks
        error = error.__cause__ or error.__context__
    return ()


def _say(how: str, text: str, ranks: tuple[int, ...] = ()) -> None:
    if _State.pid == os.getpid() and not _State.has_said:
        _State.has_said = True
        flight.note_end(how, text)
        ends_within(STORE_S, lambda: board().note_end(how, text[:_TEXT_CHARS], ranks))
        if how != "left" and _holds_store():
            time.sleep(_READ_S)


def _holds_store() -> bool:
    """Whether the store, and with it what ranks have written there, goes with this process."""
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    return not is_alone and dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
