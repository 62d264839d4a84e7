"""Python programs started by fork from a process that has imported torch: a run costs what the program itself does.

`run` is `python PROGRAM` or, with ranks, `torchrun PROGRAM`: arguments, environment, working folder, output and exit
codes are the program's own. It differs that the modules of `PRELOAD` are there already, that all programs hash strings
alike, that gloo's threads stand back, that of the ranks nobody but this module takes care, and that a process is gone
once its program's objects are, its threads have ended and its exit handlers have run: to take the interpreter and torch
apart costs more than most programs do (tests/programs/test_exits.py has it done). `python -P warm.py` is the server.
"""

import atexit
import gc
import importlib.util
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# What most programs import. Nothing of dshard: a program may bring its own.
PRELOAD = ("numpy", "torch", "torch.distributed.tensor", "torch._dynamo")
GLOO_THREADS = Path(__file__).with_name("gloo_threads.py")
GRACE_S = 20.0  # how long the other ranks may go on after the first one's failure


@dataclass(frozen=True, slots=True)
class Ran:
    """How a program ended: exit codes by rank (a killed one's is negative), and what all of them wrote."""

    codes: list[int]
    stdout: str
    stderr: str
    timed_out: bool

    @property
    def returncode(self) -> int:
        """0, or the first that is not."""
        return next((code for code in self.codes if code), 0)


def run(
    program: Sequence[object],
    *,
    ranks: int = 0,
    env: Mapping[str, str],
    cwd: Path | None = None,
    timeout_s: float,
    grace_s: float = GRACE_S,
    doomed: int | None = None,
    server: tuple[str, ...] = (),
    agent_store: bool = True,
    linger_s: float = 0.0,
) -> Ran:
    """Run a program to its end.

    Args:
        program: A script with its arguments, or "-m", a module and its arguments.
        ranks: How many processes, each with the variables of torchrun; 0 for one without.
        env: The environment; of Python's own variables, PYTHONPATH and an action in PYTHONWARNINGS count.
        cwd: The working folder; None for this process's.
        timeout_s: Seconds after which all processes are killed.
        grace_s: How long the other ranks may go on after the first one's failure.
        doomed: A rank that does not end by itself, and is killed as soon as all others have ended.
        server: Modules that the server imports besides; each such tuple has a server of its own, and what follows a "#"
            is but a name.
        agent_store: Whether this process holds the ranks' store, as torchrun does; else rank 0 does.
        linger_s: How long a process is still there after its last word, as one is that Python takes apart.
    """
    import torch.distributed as dist

    variables: list[dict[str, str]] = [{}]
    if ranks:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
        if not agent_store:
            del store  # which leaves its port free
        variables = [_rank_variables(rank, ranks, port, agent_store=agent_store) for rank in range(ranks)]
    with tempfile.TemporaryDirectory(prefix="dshard-warm-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {
            "program": [str(each) for each in program],
            "environments": [{**env, **each} for each in variables],
            "cwd": str(cwd or Path.cwd()),
            "output": [str(out), str(err)],
            "timeout_s": timeout_s,
            "grace_s": grace_s,
            "doomed": doomed,
            "linger_s": linger_s,
        }
        answer = _ask(request, server)
        return Ran(answer["codes"], out.read_text(), err.read_text(), answer["timed_out"])


def _rank_variables(rank: int, ranks: int, port: int, *, agent_store: bool) -> dict[str, str]:
    """As torchrun sets them, which hosts the store, too."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": str(agent_store),
    }


@cache
def _server(modules: tuple[str, ...]) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**env, "OMP_NUM_THREADS": "1"},  # a thread would not survive a fork
    )
    atexit.register(process.communicate)  # closes its input, which ends it
    return process


def _ask(request: dict[str, Any], modules: tuple[str, ...]) -> dict[str, Any]:
    server = _server(modules)
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps(request), file=server.stdin, flush=True)
    line = server.stdout.readline()
    assert line, "the server of tests/warm.py has died"
    answer: dict[str, Any] = json.loads(line)
    return answer


def _serve() -> None:
    """Answer requests, one after another; in a fork, be the program, and end as it does."""
    sys.path[:0] = [str(Path(__file__).parents[1])] if sys.argv[1:] else []
    for module in (*PRELOAD, *(word.partition("#")[0] for word in sys.argv[1:])):
        __import__(module)
    spec = importlib.util.spec_from_file_location("gloo_threads", GLOO_THREADS)
    assert spec is not None
    assert spec.loader is not None
    gloo_threads = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gloo_threads)
    gloo_threads.have_gloo_stand_back()
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False  # of torch's libraries, which go with the process
    gc.freeze()  # what forks have in common is not looked through by each
    while line := sys.stdin.readline():
        request = json.loads(line)
        pids = []
        for env in request["environments"]:
            pid = os.fork()
            if pid == 0:
                _end(_become(request, env), request["linger_s"])
            pids.append(pid)
        print(json.dumps(_watch(pids, request["timeout_s"], request["grace_s"], request["doomed"])), flush=True)


def _end(code: int, linger_s: float) -> None:
    """Of this process: what Python does at its end, but for taking everything apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    time.sleep(linger_s)
    os._exit(code)


def _become(request: dict[str, Any], env: dict[str, str]) -> int:
    """Be a program; gives its exit code."""
    os.setsid()  # so that what it starts can be killed with it
    os.chdir(request["cwd"])
    for target, path in zip((0, 1, 2), (os.devnull, *request["output"]), strict=True):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, target)
        os.close(opened)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(env)
    warnings.simplefilter(env.get("PYTHONWARNINGS", "default"))
    name, *rest = request["program"]
    first = request["cwd"] if name == "-m" else str(Path(name).resolve().parent)
    sys.path[:0] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = rest if name == "-m" else [name, *rest]
    try:
        if name == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _watch(pids: list[int], timeout_s: float, grace_s: float, doomed: int | None) -> dict[str, Any]:
    """Wait for the processes; kill them at the deadline, which the first failure brings nearer."""
    deadline, timed_out, codes = time.monotonic() + timeout_s, False, dict.fromkeys(pids, 0)
    running = {os.pidfd_open(pid): pid for pid in pids}
    is_last = False  # whether but the doomed one is left
    while running:
        ended, _, _ = select.select(list(running), [], [], max(0.0, deadline - time.monotonic()))
        if not ended:
            timed_out = timed_out or not (any(codes.values()) or is_last)
            for pid in running.values():
                with suppress(ProcessLookupError):  # not yet a group of its own: next time
                    os.killpg(pid, signal.SIGKILL)
            deadline = time.monotonic() + 1.0
        for each in ended:
            pid = running.pop(each)
            os.close(each)
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if codes[pid]:
                deadline = min(deadline, time.monotonic() + grace_s)
        if doomed is not None and list(running.values()) == [pids[doomed]]:
            is_last, deadline = True, 0.0
    return {"codes": list(codes.values()), "timed_out": timed_out}


if __name__ == "__main__":
    _serve()
