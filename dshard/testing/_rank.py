"""The rank's side of a persistent world: receive a call, make it, answer."""

import faulthandler
import gc
import pickle
import re
import signal
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank has joined the process group."""

    rank: int


@dataclass(frozen=True, slots=True)
class Returned:
    """The call returned; `payload` is its pickled result."""

    rank: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """The call raised."""

    rank: int
    type_name: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Silent:
    """The rank gave no answer; made by the parent, with the stacks of the rank's threads where it could get them."""

    rank: int
    reason: str
    traceback: str


@dataclass(frozen=True, slots=True)
class WarningFilter:
    """One entry of `warnings.filters`, with its patterns as text."""

    action: Any
    message: str
    category: Any
    module: str
    line: int


def _pattern(entry: str | re.Pattern[str] | None) -> str:
    """Text of a filter's pattern; CPython's built-in filters hold plain strings, meant literally."""
    if entry is None:
        return ""
    return re.escape(entry) + r"\Z" if isinstance(entry, str) else entry.pattern


def current_warning_filters() -> tuple[WarningFilter, ...]:
    """The filters of this process, first match first. Spawned ranks do not inherit them."""
    return tuple(
        WarningFilter(action, _pattern(message), category, _pattern(module), line)
        for action, message, category, module, line in warnings.filters
    )


def pack_call(fn: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> bytes:
    """One call with the warning filters in force here.

    Raises:
        TypeError: Something in it cannot be pickled.
    """
    try:
        return pickle.dumps((fn, args, kwargs, current_warning_filters()))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise TypeError(
            f"World.run: fn must be a module-level function and its arguments picklable, but {name} cannot be sent "
            f"({error}). Move it to the top of its module, or build the argument on the rank."
        ) from error


def _make_call(rank: int, request: bytes) -> bytes:
    """Make the call, with the same random numbers on all ranks whatever they drew before, and pack its outcome.

    Never raises.
    """
    try:
        fn, args, kwargs, filters = pickle.loads(request)
        with warnings.catch_warnings():
            warnings.resetwarnings()
            for entry in filters:
                warnings.filterwarnings(
                    entry.action, entry.message, entry.category, entry.module, entry.line, append=True
                )
            torch.manual_seed(0)
            result = fn(*args, **kwargs)
        return pickle.dumps(Returned(rank, pickle.dumps(result)))
    except BaseException as error:
        return pickle.dumps(Raised(rank, type(error).__name__, str(error), traceback.format_exc()))


def _share_equal_meshes() -> None:
    """Have calls that ask for equal device meshes get one: gloo keeps threads for each group, which wake up always.

    Torch takes equal meshes for the same ones, too, and remembers them for longer than a call.
    """
    make = device_mesh.init_device_mesh
    known: dict[Any, Any] = {}

    @wraps(make)
    def shared(device_type: str, mesh_shape: Any, **options: Any) -> Any:
        key = device_type, tuple(mesh_shape), repr(sorted(options.items()))
        if key not in known:
            known[key] = make(device_type, mesh_shape, **options)
        return known[key]

    device_mesh.init_device_mesh = dist.init_device_mesh = shared  # for the modules that calls bring


def _seed_present_devices() -> None:
    """Have `torch.manual_seed` leave out devices that are not there: for each it would format the stack, every time."""
    devices: tuple[Any, ...] = (torch.cuda, torch.xpu, torch.mtia)
    for device in devices:
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


def rank_main(rank: int, num_ranks: int, port: int, group_timeout_s: float, pipe: Connection, stack_file: str) -> None:
    """Body of a rank's process: join the process group, then serve calls until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(1)
    gc.freeze()  # to look through all that was imported takes 0.1 s, each time, and copies its pages for each rank
    with open(stack_file, "w") as stacks:
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        try:
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            timeout = timedelta(seconds=group_timeout_s)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
            _share_equal_meshes()
            _seed_present_devices()
            pipe.send_bytes(pickle.dumps(Ready(rank)))
            while True:
                pipe.send_bytes(_make_call(rank, pipe.recv_bytes()))
        except (EOFError, OSError):
            pass  # the parent closed the pipe, or is gone
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
