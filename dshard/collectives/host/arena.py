"""Memory of this process that the other ranks of its host can read, and theirs.

One file without a name (`memfd`), which goes with the last process that has it, however that ends. Others open it as
`/proc/PID/fd/N`, and know by a number in it that it is the one that was meant. Pages come as they are first written to.
"""

import ctypes
import mmap
import os
import secrets
import struct
import threading
import weakref
from collections import deque
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
Address = tuple[int, ...]  # of a file: its process, its handle there, its size, and a number that is written in it
NO_ADDRESS: Address = (0, 0, 0, 0, 0)
_NONCE = struct.Struct("<QQ")  # at the beginning of a file
_ALIGN = 4096
_LARGE_BYTES = 1 << 20  # freed blocks from this size on give their pages back
_PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE
_MAP_FAILED = ctypes.c_void_p(-1).value
LIBC = ctypes.CDLL(None, use_errno=True)
if hasattr(LIBC, "mremap"):  # Linux, without which ranks exchange messages
    LIBC.mmap.restype = LIBC.mremap.restype = ctypes.c_void_p


def make_file(name: str, num_bytes: int) -> tuple[int, Address]:
    """Make a file of memory; gives its handle, and where others find it."""
    fd, nonce = os.memfd_create(name, os.MFD_CLOEXEC), (secrets.randbits(63), secrets.randbits(63))
    try:
        os.ftruncate(fd, num_bytes)
        os.pwrite(fd, _NONCE.pack(*nonce), 0)
    except OSError:
        os.close(fd)
        raise
    return fd, (os.getpid(), fd, num_bytes, *nonce)


def open_file(address: Address, num_bytes: int) -> int:
    """Open the file of memory of that size that another process has made; gives this process's handle.

    Raises:
        OSError: It cannot be opened.
        ValueError: There is none, or it is another file: the process runs where numbers of processes mean others.
    """
    pid, fd, _, *nonce = address
    if not pid:
        raise ValueError("it shares none")
    path = f"/proc/{pid}/fd/{fd}"
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(handle).st_size != num_bytes or os.pread(handle, _NONCE.size, 0) != _NONCE.pack(*nonce):
        os.close(handle)
        raise ValueError(f"{path} is another file than was meant")
    return handle


def map_memory(num_bytes: int, flags: int, fd: int = -1) -> int:
    """Where memory was mapped; not by Python's own mmap, which keeps another handle of the file for each.

    Raises:
        OSError: It was not.
    """
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = LIBC.mmap(None, ctypes.c_size_t(num_bytes), access, flags, fd, ctypes.c_long(0))
    if address is None or address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{num_bytes:,} bytes of memory cannot be mapped: {os.strerror(number)}")
    return int(address)


class Mapped:
    """A file of memory in this process.

    Args:
        fd: The file.
        num_bytes: Its size.
        is_private: Whether what is written to the mapping is seen through it alone.
    """

    def __init__(self, fd: int, num_bytes: int, *, is_private: bool = False) -> None:
        self.num_bytes = num_bytes
        self.address = map_memory(num_bytes, mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED, fd)
        memory = (ctypes.c_char * num_bytes).from_address(self.address)
        place, size = ctypes.c_void_p(self.address), ctypes.c_size_t(num_bytes)
        weakref.finalize(memory, LIBC.munmap, place, size).atexit = False
        self._bytes = memoryview(memory).cast("B")

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Some of it, as bytes."""
        return self._bytes[offset : offset + num_bytes]

    def array(self, offset: int, num_bytes: int) -> np.ndarray:
        """Some of it, as an array of its own: what holds it keeps the mapping."""
        return np.frombuffer(self._bytes, dtype=np.uint8, count=num_bytes, offset=offset)

    def tensor(self, offset: int, num_bytes: int) -> Tensor:
        """Some of it, as a tensor with a storage of its own: uint8, shape (bytes,)."""
        return torch.from_numpy(self.array(offset, num_bytes))


class _Known:
    """What this process has mapped, and its number."""

    pid = os.getpid()
    own: "Arena | None" = None
    others: ClassVar["weakref.WeakValueDictionary[Address, Mapped]"] = weakref.WeakValueDictionary()
    lock = threading.Lock()


def _renew_pid() -> None:
    _Known.pid = os.getpid()


os.register_at_fork(after_in_child=_renew_pid)


def own_pid() -> int:
    """`os.getpid()` without a system call: each collective asks several times whether this is a forked process."""
    return _Known.pid


class Arena(Mapped):
    """The memory that this process shares."""

    def __init__(self) -> None:
        num_bytes = os.sysconf("SC_PHYS_PAGES") * PAGE  # of addresses: pages come as they are written to
        self.fd, self.file_address = make_file("dshard", num_bytes)
        super().__init__(self.fd, num_bytes)
        self.pid = own_pid()
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(PAGE, num_bytes - PAGE)]  # offset and size, in order
        self._given: deque[tuple[int, int]] = deque()  # and not free yet
        self.used_bytes = 0

    def take(self, num_bytes: int) -> tuple[Tensor, int]:
        """Memory, uint8 of shape (bytes,), and where it lies; free once nobody refers to it."""
        size = -(-max(num_bytes, 1) // _ALIGN) * _ALIGN
        with self._lock:
            self._take_back()
            at = next((i for i, (_, room) in enumerate(self._free) if room >= size), None)
            if at is None:
                raise MemoryError(f"all {self.num_bytes:,} bytes of shared memory are in use")
            offset, room = self._free[at]
            if room > size:
                self._free[at] = offset + size, room - size
            else:
                del self._free[at]
            self.used_bytes += size
        block = self.array(offset, num_bytes)
        weakref.finalize(block, self._give, offset, size).atexit = False
        return torch.from_numpy(block), offset

    def _give(self, offset: int, size: int) -> None:
        """Take a block back that nobody refers to any more; called wherever that was, even within `take`."""
        if own_pid() != self.pid:
            return  # a forked process has let go of it
        if size >= _LARGE_BYTES:
            LIBC.fallocate(self.fd, _PUNCH, ctypes.c_long(offset), ctypes.c_long(size))
        self._given.append((offset, size))

    def _take_back(self) -> None:
        """Join what was given back with what is free beside it."""
        if not self._given:
            return
        given = [self._given.popleft() for _ in range(len(self._given))]
        self.used_bytes -= sum(size for _, size in given)
        free, self._free = sorted([*self._free, *given]), []
        for offset, size in free:
            start = offset
            if self._free and sum(self._free[-1]) == offset:
                start = self._free.pop()[0]
            self._free.append((start, offset + size - start))

    def offset_of(self, tensor: Tensor) -> int | None:
        """Where the memory of a tensor lies in it; None if elsewhere."""
        offset = tensor.data_ptr() - self.address
        return offset if 0 <= offset < self.num_bytes else None


def own_arena() -> Arena:
    """That of this process, made at its first use; a forked process has one of its own."""
    with _Known.lock:
        if _Known.own is None or _Known.own.pid != own_pid():
            _Known.own = Arena()
        return _Known.own


def map_others(address: Address) -> Mapped:
    """Map the arena of another process; raises as `open_file`, or an OSError where it cannot be mapped."""
    with _Known.lock:
        known = _Known.others.get(address)
        if known is None:
            handle = open_file(address, address[2])
            try:
                known = Mapped(handle, address[2])
            finally:
                os.close(handle)
            _Known.others[address] = known
        return known
