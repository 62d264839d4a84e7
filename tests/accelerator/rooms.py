"""What the tests of the device do in a rank before and after each look at it."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.accelerator.device import start


@contextmanager
def simulated(mode: str = "lazy", *, seed: int = 0, idle_s: float = 1000.0, bound_s: float = 60.0) -> Iterator[Any]:
    """The device, which does nothing before it is asked for it, however long the host takes."""
    device = start()
    settle(device)
    device.configure(seed, mode, True, False)
    device.set_times(idle_s, bound_s)
    try:
        yield device
    finally:
        device.set_times(0.003, 60.0)
        settle(device)
        device.configure(0, "random", True, False)


def settle(device: Any) -> None:
    """Let everything come to its end, what fails on its way, too."""
    gc.collect()
    for _ in range(3):  # each raises but the first of what failed
        with suppress(RuntimeError):
            device.synchronize()


def error_of(call: Callable[[], object]) -> str:
    """What `call` raises, "" if nothing."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""
