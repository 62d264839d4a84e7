"""The device "sim" of `second_device.cpp`, and the backend "simccl", which knows no CPU tensors.

All of it is per process: call `start` on each rank. Needs a C++ compiler and ninja.
"""

import contextlib
import shutil
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import cpp_extension

CAN_BUILD = shutil.which("c++") is not None and shutil.which("ninja") is not None


@cache
def build() -> Any:
    """Compile the device, once per machine and release of torch, and load it."""
    name = f"dshard_second_device_{torch.__version__.split('+')[0].replace('.', '_')}"
    source = Path(__file__).with_name("second_device.cpp")
    return cpp_extension.load(name, [str(source)], extra_cflags=["-O0"])


class Event:
    """Waited for by the host, it ends the copies that are late."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Nothing: the device has one queue."""

    def synchronize(self) -> None:
        """Wait."""
        build().flush(True)


class Stream(torch.Stream):
    """The device has one queue, whatever its streams are called."""

    def __new__(cls, device: Any = None, **kwargs: Any) -> "Stream":
        return super().__new__(cls, device="sim:0")

    def wait_stream(self, other: Any) -> None:
        """Nothing."""

    def record_event(self, event: Any = None) -> Event:
        """An event."""
        return Event()


class SimGroup(dist.ProcessGroup):
    """Collectives over tensors on the device alone, as NCCL's; by gloo's, on their memory."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "simccl"

    def _done(self, work: Any) -> Any:
        """Wait: the memory of the device is nobody's but its tensors', which the caller may let go."""
        work.wait()
        return _Done()

    @property
    def group_name(self) -> str:
        """As torch keeps it for all groups."""
        return str(dist.distributed_c10d._world.pg_names[self])

    def _host(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "sim":
            raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
        return build().host_alias(tensor)

    def _allgather_base(self, out: Tensor, own: Tensor, opts: Any = None) -> Any:
        out, own = self._host(out), self._host(own)
        return self._done(self._gloo.allgather([list(out.view(self.size(), -1).unbind(0))], [own.view(-1)]))

    def _reduce_scatter_base(self, out: Tensor, rows: Tensor, opts: Any) -> Any:
        total = self._host(rows).clone()
        options = dist.AllreduceOptions()
        options.reduceOp = opts.reduceOp
        done = self._done(self._gloo.allreduce([total], options))
        self._host(out).copy_(total.view(self.size(), -1)[self.rank()])
        return done

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        options = dist.AllreduceOptions()
        if opts is not None:
            options.reduceOp = opts.reduceOp
        return self._done(self._gloo.allreduce([self._host(t) for t in tensors], options))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        return self._done(self._gloo.broadcast([self._host(t) for t in tensors], opts))

    def allgather(self, out: Any, own: Any, opts: Any = None) -> Any:
        return self._done(
            self._gloo.allgather([[self._host(t) for t in part] for part in out], [self._host(t) for t in own])
        )

    def scatter(self, out: list[Tensor], parts: Any, opts: Any) -> Any:
        return self._done(
            self._gloo.scatter([self._host(t) for t in out], [[self._host(t) for t in p] for p in parts], opts)
        )

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()


class _Done(dist._Work):
    """Work that is over."""

    def wait(self, timeout: Any = None) -> bool:
        """At once."""
        return True


@contextlib.contextmanager
def _stream(stream: Any) -> Iterator[None]:
    yield


@cache
def start() -> None:
    """Make the device and the backend known to torch in this process."""
    build()
    torch.utils.rename_privateuse1_backend("sim")
    module: Any = types.ModuleType("torch.sim")
    module.is_available, module.device_count = lambda: True, lambda: 1
    module.current_device, module.set_device = lambda: 0, lambda device: None
    module._is_in_bad_fork, module.is_initialized = lambda: False, lambda: True
    module.Stream, module.Event, module.stream = Stream, Event, _stream
    module.current_stream = lambda device=None: Stream()
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module("sim", module)
    dist.Backend.register_backend("simccl", SimGroup, devices=["sim"])
