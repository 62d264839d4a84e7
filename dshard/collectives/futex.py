"""Waiting in the kernel for a word of shared memory to change, and for processes to end."""

import ctypes
import os
import platform
import select
import time
from collections.abc import Callable

_FUTEX = 202  # of x86-64
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1
_SLICE_S = 0.05  # between two looks at whether the peer lives
_SPINS = 40  # looks ahead of the kernel's wait: some microseconds, for a peer may need this core


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_LIBC = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Why this machine cannot wait so; empty where it can.

    What one process writes to memory another one sees in the same order on x86-64 alone; elsewhere it would take
    barriers, which Python has none of.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"it needs Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "this Python has no memfd_create or pidfd_open"
    return ""


class Word:
    """32 bits of shared memory that one process counts up, and others wait for.

    Args:
        view: The memory: of 4 bytes, aligned.
        address: Where it lies.
    """

    __slots__ = ("_address", "_view")

    def __init__(self, view: memoryview, address: int) -> None:
        self._view, self._address = view.cast("I"), address

    @property
    def value(self) -> int:
        """What it is now."""
        return int(self._view[0])

    def publish(self, value: int) -> None:
        """Set it, and wake all who wait."""
        self._view[0] = value & 0xFFFFFFFF
        _LIBC.syscall(_FUTEX, ctypes.c_void_p(self._address), _WAKE, _ALL, None, None, 0)

    def wait_while(self, value: int, limit_s: float | None, check: Callable[[], None]) -> bool:
        """Wait until it is something else; gives whether it came to that within the limit.

        Args:
            value: What it is.
            limit_s: Seconds; None for no limit.
            check: Called from time to time; may raise.
        """
        value &= 0xFFFFFFFF
        for _ in range(_SPINS):
            if self._view[0] != value:
                return True
        until = None if limit_s is None else time.monotonic() + limit_s
        a_slice = _Time(0, int(_SLICE_S * 1e9))
        while self._view[0] == value:
            _LIBC.syscall(_FUTEX, ctypes.c_void_p(self._address), _WAIT, value, ctypes.byref(a_slice), None, 0)
            if self._view[0] != value:
                break
            check()
            if until is not None and time.monotonic() > until:
                return False
        return True


class Peer:
    """A process of this host, and whether it lives.

    Args:
        pid: Its number.
    """

    __slots__ = ("_poll", "fd", "pid")

    def __init__(self, pid: int) -> None:
        self.pid, self.fd = pid, os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def has_ended(self) -> bool:
        """Whether the process is gone, or a zombie."""
        return bool(self._poll.poll(0))

    def __del__(self) -> None:
        os.close(self.fd)
