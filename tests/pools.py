"""Worlds of ranks that tests share, and what keeps them from slowing one another down."""

import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from dshard.testing import RemoteRankError, World, WorldPool
from tests.gloo_threads import have_gloo_stand_back

T = TypeVar("T")

_MAX_GROUPS = 12  # of a rank that goes on with the next file
# Three times as long as programs of users: machines that others use, too, were seen to be five times as slow.
_GROUP_TIMEOUT_S, _TIMEOUT_S = 60.0, 180.0


class RestedWorld(World):
    """A world whose ranks are not kept from running by gloo's threads, and wait long for one another.

    While another world is called its processes are stopped: for each group gloo has a thread that wakes a hundred times
    a second, and those of idle ranks would keep a few cores from what is tested.
    """

    awake: ClassVar[set["RestedWorld"]] = set()

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks, group_timeout_s=_GROUP_TIMEOUT_S)
        self._num_calls = 0  # that are under way

    def start(self) -> None:
        if not self.is_running:
            super().start()
            self.run(_prepare)

    def _call(self, *args: Any) -> Any:
        for other in self.awake - {self}:
            other.sleep()
        self._signal(signal.SIGCONT)
        self.awake.add(self)
        self._num_calls += 1
        try:
            return super()._call(*args)
        finally:
            self._num_calls -= 1

    def sleep(self) -> None:
        """Stop its processes until the next call, unless one is under way."""
        if not self._num_calls:
            self.awake.discard(self)
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self.awake.discard(self)
        super().close()

    def _signal(self, number: int) -> None:
        for rank in self._ranks:
            if rank.process.is_alive() and rank.process.pid is not None:
                os.kill(rank.process.pid, number)


def _prepare() -> None:
    _end_with_parent()
    have_gloo_stand_back()
    _share_equal_meshes()
    _seed_present_devices()


def _end_with_parent() -> None:
    """Have the system kill this process as soon as that which forked it is gone: a stopped one does not notice."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


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
    """Have `torch.manual_seed` skip absent devices: for each of them it would format the stack, every time."""
    devices: tuple[Any, ...] = (torch.cuda, torch.xpu, torch.mtia)
    for device in devices:
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


class MessagingWorld(RestedWorld):
    """A world whose ranks exchange messages, as those of several hosts do."""

    def start(self) -> None:
        if not self.is_running:
            super().start()
            self.run(_exchange_messages)


def _exchange_messages() -> None:
    os.environ["DSHARD_TRANSPORT"] = "messages"


def _num_groups() -> int:
    c10d: Any = dist.distributed_c10d  # type: ignore[attr-defined]
    return len(c10d._world.pg_map)


class RestedPool(WorldPool):
    """Such worlds by size; those that have made many process groups end with the file of tests, the others sleep."""

    open: ClassVar[list["RestedPool"]] = []

    def __init__(self, kind: type[RestedWorld] = RestedWorld) -> None:
        super().__init__()
        self._kind = kind
        self.open.append(self)

    def get_world(self, num_ranks: int) -> World:
        return self._worlds.setdefault(num_ranks, self._kind(num_ranks))

    def run(
        self, num_ranks: int, fn: Callable[..., T], *args: object, timeout_s: float = _TIMEOUT_S, **kwargs: object
    ) -> list[T]:
        return super().run(num_ranks, fn, *args, timeout_s=timeout_s, **kwargs)

    def rest(self) -> None:
        """End the ranks that have many groups; the next call starts others, or wakes those that are there."""
        for world in self._worlds.values():
            with suppress(RemoteRankError):
                if world.is_running and max(world.run(_num_groups)) > _MAX_GROUPS:
                    world.close()
        for awake in tuple(RestedWorld.awake):
            awake.sleep()

    def close(self) -> None:
        super().close()
        if self in self.open:
            self.open.remove(self)
