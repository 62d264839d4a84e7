"""Persistent worlds: ranks that start once and are then sent functions, so that a test body costs milliseconds.

Because calls are made from the parent, every rank gets the same example, and because a failure on a rank raises an
`AssertionError` in the parent, shrinking works as usual. Ranks are forked by Python's fork server, which has imported
torch and dshard: a new world then costs tens of milliseconds where a spawned one costs seconds, and shrinking
starts one per failing example. The ranks' environment variables are those of the moment when the first world started.
"""

import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.machinery import PathFinder
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self, TypeVar

import torch
import torch.distributed as dist

from dshard import arguments
from dshard.collectives import ReduceOp, ShardGroup, all_reduce, num_all_failures

T = TypeVar("T")

_START_TIMEOUT_S = 180.0  # importing torch on a busy machine
# What the fork server imports, once. The first step of an optimizer imports torch._dynamo.
_PRELOAD = ["torch", "torch.distributed.tensor", "torch._dynamo", "numpy"]
_OF_TESTS = ["pytest", "hypothesis"]  # which the modules import that most functions come from


@dataclass(frozen=True, slots=True)
class _Reply:
    """The answer of a rank to a call, or to the start of its process.

    Attributes:
        rank: The rank.
        outcome: "returned" or "raised"; "silent" if it did not answer in time, or died.
        payload: The pickled result of a call that returned.
        error: Name of the exception's type.
        message: Text of the exception, or how the rank failed to answer.
        traceback: Where it was raised; of a silent rank the stacks of its threads, if it could still write them.
        num_failures: Exceptions that have ended steps of models on the rank so far, summed over its process groups.
    """

    rank: int
    outcome: str
    payload: bytes = b""
    error: str = "Silent"
    message: str = ""
    traceback: str = ""
    num_failures: int = 0

    def describe(self, num_ranks: int) -> str:
        """One line for a report."""
        who = f"rank {self.rank} of {num_ranks}"
        if self.outcome == "raised":
            return f"{who} raised {self.error}: {self.message}"
        return f"{who} {self.message or 'returned'}"


class RemoteRankError(AssertionError):
    """A rank raised, died or did not answer; raised in the parent process.

    Args:
        message: The whole report: first the failed rank with its traceback, then what its peers did.
        rank: The first rank that failed.
        type_name: Name of the exception's type there; "Silent" if the rank did not answer.
        remote_traceback: The traceback on that rank, as text; of a silent rank, where its threads were.
    """

    def __init__(self, message: str, *, rank: int, type_name: str, remote_traceback: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.type_name = type_name
        self.remote_traceback = remote_traceback


class _Rank(NamedTuple):
    """A rank as its parent sees it: its process, the pipe of calls and replies, and that of its threads' stacks."""

    process: BaseProcess
    pipe: Connection
    stacks: Connection


class World:
    """N ranks in processes of their own, joined by a gloo process group; started at the first call.

    A rank is a process with one thread, on which `fn` finds the process group initialised. After a call in which a rank
    failed or did not answer, the processes are killed, and the next call starts new ones: no example sees what another
    left behind. In a script, guard the entry point with `if __name__ == "__main__"`, as for every new process.

    Args:
        num_ranks: Number of ranks, at least 1.
        group_timeout_s: `timeout` of the process group: how long a collective waits for its peers.
        grace_s: How long the peers may go on after the first rank's failure.

    Example:
        >>> import torch.distributed as dist
        >>> with World(2) as world:
        ...     world.run(dist.get_rank)
        [0, 1]
    """

    def __init__(self, num_ranks: int, *, group_timeout_s: float = 20.0, grace_s: float = 1.0) -> None:
        self.num_ranks: int = arguments.count("World", "num_ranks", num_ranks)
        self.group_timeout_s: float = arguments.above_0("World", "group_timeout_s", group_timeout_s)
        self.grace_s: float = arguments.from_0("World", "grace_s", grace_s)
        self._ranks: list[_Rank] = []
        self._store: dist.TCPStore | None = None

    @property
    def is_running(self) -> bool:
        """Whether the ranks are up; if not, the next call starts them."""
        return bool(self._ranks)

    def start(self) -> None:
        """Start the ranks, if they are not up, and wait until they have joined the process group."""
        if self._ranks:
            return
        context = mp.get_context("forkserver")
        modules = [*_PRELOAD, *_own_package(), *(name for name in _OF_TESTS if name in sys.modules)]
        context.set_forkserver_preload(modules)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.num_ranks):
            (pipe, its_pipe), (stacks, its_stacks) = context.Pipe(), context.Pipe(duplex=False)
            process = context.Process(
                target=_serve,
                args=(rank, self.num_ranks, self._store.port, self.group_timeout_s, its_pipe, its_stacks),
                name=f"dshard-rank-{rank}-of-{self.num_ranks}",
                daemon=True,
            )
            process.start()
            its_pipe.close()
            its_stacks.close()
            self._ranks.append(_Rank(process, pipe, stacks))
        replies = self._collect(_START_TIMEOUT_S, self.grace_s)
        if any(reply.outcome != "returned" for reply in replies):
            self._fail("start", replies)

    def run(self, fn: Callable[..., T], *args: object, timeout_s: float = 60.0, **kwargs: object) -> list[T]:
        """Call `fn(*args, **kwargs)` on every rank.

        Where some ranks alone caught an exception of a model's step, the next call starts new ranks: in these, dshard
        refuses every further collective.

        Args:
            fn: A module-level function; it travels by its name.
            *args: Picklable; equal on every rank. `fn` asks `torch.distributed.get_rank()` for its own part.
            timeout_s: Seconds until a rank that has not answered counts as hung.
            **kwargs: As `args`.

        Returns:
            What each rank returned, in rank order.

        Raises:
            RemoteRankError: A rank raised, died, or did not answer in time.
            TypeError: `fn` or an argument cannot be pickled.

        Communicates:
            Nothing of its own.
        """
        _check_call("World.run", fn, timeout_s)
        replies = self._call(fn, args, kwargs, timeout_s, self.grace_s)
        if any(reply.outcome != "returned" for reply in replies):
            self._fail(_name(fn), replies)
        if len({reply.num_failures for reply in replies}) > 1:
            self.close()
        return [pickle.loads(reply.payload) for reply in sorted(replies, key=lambda reply: reply.rank)]

    def close(self) -> None:
        """Kill the ranks at once; a later call starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            for each in rank:
                each.close()
        self._ranks, self._store = [], None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _call(
        self,
        fn: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        timeout_s: float,
        grace_s: float,
    ) -> list[_Reply]:
        """Send one call to every rank and return the replies in the order in which they came."""
        request = _pack_call(fn, args, kwargs)
        self.start()
        try:
            for rank in self._ranks:
                rank.pipe.send_bytes(request)
        except OSError:
            pass  # a rank died since the last call: `_receive` finds it by the end of its pipe
        try:
            return self._collect(timeout_s, grace_s)
        except BaseException:
            self.close()  # interrupted: an answer that came later would be taken for the next call's
            raise

    def _collect(self, timeout_s: float, grace_s: float) -> list[_Reply]:
        """Wait for one reply per rank, on all at once, and after the first failure for `grace_s` more."""
        pending = {rank.pipe: number for number, rank in enumerate(self._ranks)}
        deadline = time.monotonic() + timeout_s
        reason = f"did not answer within {timeout_s:g} s"
        replies: list[_Reply] = []
        while pending and (remaining := deadline - time.monotonic()) > 0:
            for pipe in wait(list(pending), timeout=remaining):
                assert isinstance(pipe, Connection)
                reply = self._receive(pipe, pending.pop(pipe))
                replies.append(reply)
                if reply.outcome != "returned":
                    deadline = min(deadline, time.monotonic() + grace_s)
                    reason = f"did not answer within {grace_s:g} s of the first failure"
        return replies + self._stacks(sorted(pending.values()), reason)

    def _receive(self, pipe: Connection, rank: int) -> _Reply:
        try:
            reply: _Reply = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            process = self._ranks[rank].process
            process.join(10.0)  # the fork server reports the exit code, once it is scheduled itself
            return _Reply(rank, "silent", message=f"died with exit code {process.exitcode}")
        return reply

    def _stacks(self, ranks: Sequence[int], reason: str) -> list[_Reply]:
        """Ask ranks that do not answer for the stacks of their threads."""
        for rank in ranks:
            pid = self._ranks[rank].process.pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR1)  # the rank's faulthandler writes its stacks to the pipe
        texts = [_text_of(self._ranks[rank].stacks) for rank in ranks]
        return [_Reply(rank, "silent", message=reason, traceback=text) for rank, text in zip(ranks, texts, strict=True)]

    def _fail(self, what: str, replies: Sequence[_Reply]) -> NoReturn:
        """Kill the ranks and raise the report of their replies."""
        self.close()
        first, *others = [reply for reply in replies if reply.outcome != "returned"]
        lines = [f"{what}: {first.describe(self.num_ranks)}", first.traceback.rstrip()]
        lines += [f"also {reply.describe(self.num_ranks)}" for reply in others]
        lines += [reply.traceback.rstrip() for reply in others if reply.outcome == "silent"]
        raise RemoteRankError(
            "\n".join(line for line in lines if line),
            rank=first.rank,
            type_name=first.error,
            remote_traceback=first.traceback,
        )


class WorldPool:
    """Worlds by size, each started at its first call and all closed at the end; for a session-scoped fixture.

    Args:
        group_timeout_s: As for `World`.
        grace_s: As for `World`.
    """

    def __init__(self, *, group_timeout_s: float = 20.0, grace_s: float = 1.0) -> None:
        self._group_timeout_s: float = arguments.above_0("WorldPool", "group_timeout_s", group_timeout_s)
        self._grace_s: float = arguments.from_0("WorldPool", "grace_s", grace_s)
        self._worlds: dict[int, World] = {}

    def get_world(self, num_ranks: int) -> World:
        """The pool's world of `num_ranks` ranks."""
        num_ranks = arguments.count("WorldPool.get_world", "num_ranks", num_ranks)
        if num_ranks not in self._worlds:
            self._worlds[num_ranks] = World(num_ranks, group_timeout_s=self._group_timeout_s, grace_s=self._grace_s)
        return self._worlds[num_ranks]

    def run(
        self, num_ranks: int, fn: Callable[..., T], *args: object, timeout_s: float = 60.0, **kwargs: object
    ) -> list[T]:
        """`World.run` on the world of `num_ranks` ranks."""
        num_ranks = arguments.count("WorldPool.run", "num_ranks", num_ranks)
        _check_call("WorldPool.run", fn, timeout_s)
        return self.get_world(num_ranks).run(fn, *args, timeout_s=timeout_s, **kwargs)

    def close(self) -> None:
        """Close every world."""
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def expect_error(
    world: World,
    fn: Callable[..., object],
    *args: object,
    timeout_s: float = 60.0,
    grace_s: float | None = None,
    **kwargs: object,
) -> list[tuple[str, str]]:
    """Call `fn` on every rank where every rank must raise, and keep the world if its ranks are still in step.

    Args:
        world: The ranks.
        fn: As for `World.run`.
        *args: As for `World.run`.
        timeout_s: As for `World.run`.
        grace_s: How long the peers may go on after the first rank's error; None for the world's own.
        **kwargs: As for `World.run`.

    Returns:
        `(type name, message)` of each rank's exception, in rank order.

    Raises:
        RemoteRankError: A rank did not answer.
        AssertionError: A rank returned instead of raising.

    Communicates:
        A barrier and a sum afterwards, which prove that no rank is a collective ahead, of its own or of dshard's; a
        world that fails them is killed.
    """
    is_world, way = isinstance(world, World), "Pass worlds.get_world(2)."
    arguments.expect(is_world, "expect_error", "world", world, "a World", way)
    _check_call("expect_error", fn, timeout_s)
    grace = world.grace_s if grace_s is None else arguments.from_0("expect_error", "grace_s", grace_s, or_none=True)
    replies = sorted(world._call(fn, args, kwargs, timeout_s, grace), key=lambda reply: reply.rank)
    returned = [reply.rank for reply in replies if reply.outcome == "returned"]
    raised = [reply for reply in replies if reply.outcome == "raised"]
    if len(returned) + len(raised) < world.num_ranks:
        world._fail(_name(fn), replies)
    if returned:
        world.close()
        others = "; ".join(reply.describe(world.num_ranks) for reply in raised) or "no rank raised"
        raise AssertionError(f"{_name(fn)}: every rank must raise, but ranks {returned} returned. {others}.")
    if any(reply.outcome != "returned" for reply in world._call(_meet, (), {}, 1.0, 0.0)):
        world.close()
    return [(reply.error, reply.message) for reply in raised]


def _meet() -> None:
    """Take part in a collective of torch's, and in one that dshard compares."""
    dist.barrier()
    if dist.group.WORLD is not None:
        group = ShardGroup(dist.group.WORLD, torch.device("cpu"))
        all_reduce([torch.zeros(1, device="cpu")], group, ReduceOp.SUM, label="end of expect_error").wait()


def _text_of(pipe: Connection) -> str:
    """What comes through a pipe as bare text, until nothing more comes."""
    text = b""
    while pipe.poll(0.2) and (chunk := os.read(pipe.fileno(), 1 << 16)):
        text += chunk
    return text.decode(errors="replace")


def _check_call(who: str, fn: Any, timeout_s: Any) -> None:
    arguments.expect(callable(fn), who, "fn", fn, "a function", "Pass a function of a module.")
    arguments.above_0(who, "timeout_s", timeout_s)


def _own_package() -> list[str]:
    """Name dshard for the fork server's imports, if the server finds the same dshard as this process.

    It takes each rank half a second to import. The search is that of a new interpreter: changes of `sys.path` reach the
    ranks alone.
    """
    places = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    found = PathFinder.find_spec("dshard", places)
    ours = Path(__file__).parents[1] / "__init__.py"
    is_ours = found is not None and found.origin is not None and Path(found.origin) == ours
    return ["dshard", __name__] if is_ours else []


def _name(fn: Callable[..., object]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _pack_call(fn: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> bytes:
    """Pickle one call with the warning filters of this process, which spawned ranks do not inherit.

    Raises:
        TypeError: Something in it cannot be pickled.
    """
    try:
        return pickle.dumps((fn, args, kwargs, warnings.filters))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"World.run: fn must be a module-level function and its arguments picklable, but {_name(fn)} cannot be "
            f"sent ({error}). Move it to the top of its module, or build the argument on the rank."
        ) from error


# --- on the rank ---


def _serve(rank: int, num_ranks: int, port: int, group_timeout_s: float, pipe: Connection, stacks: Connection) -> None:
    """Join the process group, then serve calls until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=True)
    torch.set_num_threads(1)
    gc.freeze()  # a collection over all that was imported takes 0.1 s each time, and copies its pages for each rank
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        timeout = timedelta(seconds=group_timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
        pipe.send_bytes(pickle.dumps(_Reply(rank, "returned")))
        while True:
            pipe.send_bytes(_make_call(rank, pipe.recv_bytes()))
    except (EOFError, OSError):
        pass  # the parent closed the pipe, or is gone
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _make_call(rank: int, request: bytes) -> bytes:
    """Make the call and pickle the reply; it never raises.

    Every call begins with the same random state on all ranks, whatever earlier calls drew.
    """
    try:
        fn, args, kwargs, filters = pickle.loads(request)
        with warnings.catch_warnings():
            warnings.resetwarnings()  # also has Python forget which warnings it showed under other filters
            present: Any = warnings.filters  # typeshed calls it a Sequence; it is the list that Python reads
            present[:] = filters
            torch.manual_seed(0)
            result = fn(*args, **kwargs)
        reply = _Reply(rank, "returned", payload=pickle.dumps(result), num_failures=num_all_failures())
        return pickle.dumps(reply)
    except BaseException as error:
        where = traceback.format_exc()
        return pickle.dumps(_Reply(rank, "raised", error=type(error).__name__, message=str(error), traceback=where))
