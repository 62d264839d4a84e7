"""The device "sim" of `device.cpp`, and the backend "simccl", to torch. All of it is per process: call `start` first.

Needs a C++ compiler and ninja.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dshard.collectives import _c10d

CAN_BUILD = shutil.which("c++") is not None and shutil.which("ninja") is not None
MODES = "random", "lazy", "others first", "eager"


@cache
def build() -> Any:
    """Compile the device, once per machine and state of its sources, and load it."""
    here = Path(__file__).parent
    sources = [here / name for name in ("simulator.cpp", "device.cpp", "group.cpp")]
    texts = [path.read_bytes() for path in (*sources, here / "simulator.h")]
    state = hashlib.sha1(b"".join([torch.__version__.encode(), *texts]), usedforsecurity=False).hexdigest()[:12]
    name = f"dshard_accelerator_{state}"
    folder = Path(tempfile.gettempdir()) / f"{name}_of_{os.getuid()}"
    folder.mkdir(exist_ok=True)
    with (folder / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # is free again when its holder is killed, unlike the lock file of `load`,
        (folder / "lock").unlink(missing_ok=True)  # for which all others would wait without end
        if not (is_built := folder / "built").exists():
            from torch.utils import cpp_extension  # brings setuptools, which most processes can do without

            flags = ["-O1", "-std=c++20"]
            extension = cpp_extension.load(
                name, list(map(str, sources)), extra_cflags=flags, build_directory=str(folder)
            )
            is_built.touch()
            return extension
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.so")
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


def build_apart() -> None:
    """Compile the device in a process of its own: this one remains as others are."""
    code = "from tests.accelerator.device import build; build()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400, cwd=Path(__file__).parents[2])


class Stream(torch.Stream):
    """As `torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> "Stream":
        return super().__new__(cls, device="sim:0", priority=priority, **kwargs)


class Event(torch.Event):
    """As `torch.cuda.Event`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Event":
        return super().__new__(cls, device="sim")


class _InStream:
    """As `torch.cuda.stream`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            self._stream.__exit__(*error)


def _make_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    inner = None if build().is_dry() else dist.ProcessGroupGloo(store, rank, size, timeout)
    return build().make_group(inner, rank, size)


@contextmanager
def dry_world(size: int, *, rank: int = 0, mode: str = "eager") -> Iterator[Any]:
    """This process alone as one rank of many that issues everything and computes nothing; gives the extension.

    Numbers of a few bytes alone are computed, for ranks compare such; other ranks say what this one says. What else the
    host reads is zero, or anything. Attention and RMS norms are one kernel each, as on a GPU, until the process ends.

    Args:
        size: Of the world.
        rank: Of this process.
        mode: "eager" for a device that has done all that was issued; "lazy" for one on which memory that another stream
            was recorded to use is in use until the host has waited for that.
    """
    device = start()
    device.configure(0, mode, False, True)
    device.take_kernels_of_a_gpu()
    dist.init_process_group("cpu:simccl,sim:simccl", store=dist.HashStore(), rank=rank, world_size=size)
    try:
        yield device
    finally:
        dist.destroy_process_group()
        device.configure(0, "random", True, False)


@cache
def start() -> Any:
    """Make the device and the backend known to torch in this process; gives the extension."""
    device = build()
    torch.utils.rename_privateuse1_backend("sim")
    module: Any = types.ModuleType("torch.sim")
    module.is_available, module.device_count = lambda: True, lambda: 1
    module.current_device, module.set_device = lambda: 0, lambda _: None
    module._is_in_bad_fork, module.is_initialized = lambda: False, lambda: True
    module.Stream, module.Event, module.stream = Stream, Event, _InStream
    module.current_stream = lambda _=None: torch.accelerator.current_stream()
    module.default_stream = module.current_stream
    module.device = lambda _: contextlib.nullcontext()
    module.synchronize = lambda _=None: device.synchronize()
    module.manual_seed_all = module.manual_seed = lambda _: None
    module.get_rng_state, module.set_rng_state = lambda _=None: torch.get_rng_state(), lambda s, _=None: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.memory_allocated = lambda _=None: device.stats().get("allocated_bytes", 0)
    module.memory_reserved = lambda _=None: device.stats().get("reserved_bytes", 0)
    module.max_memory_allocated = lambda _=None: device.stats().get("peak_allocated_bytes", 0)
    module.max_memory_reserved = lambda _=None: device.stats().get("peak_reserved_bytes", 0)
    module.reset_peak_memory_stats = lambda _=None: device.reset_peaks()
    module.empty_cache = device.empty_cache
    torch._register_device_module("sim", module)
    dist.Backend.register_backend("simccl", _make_group, devices=["sim"])
    _c10d.WITH_MEANS.add("simccl")
    torch.autograd.profiler._is_profiler_enabled = True  # ranges then name what a unit's tasks are for
    return device
