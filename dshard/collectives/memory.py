"""Memory that is used again: fresh pages of large buffers cost a CPU more than the bytes that fill them."""

import mmap
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dshard.collectives.host.arena import Arena

_OWN_PAGES_BYTES = 1 << 20  # smaller buffers come from the heap
_MAX_EMPTY = 64  # buffers of a device whose tensors are kept
_UNREAD_BYTES = 1 << 16  # that peers may have still to read without being waited for
PATIENCE_S = 0.25  # with peers that have still to read, ahead of taking new memory, or of writing elsewhere
PAUSES_S = 5e-5, 1e-3  # between two looks at them: the first one, and the longest
_USES_OF = Tensor._use_count  # type: ignore[attr-defined]


def _references(tensor: Tensor) -> tuple[int, int]:
    """References to the storage of a tensor: Python's, and all."""
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata)


_ALONE = _references(torch.empty(1, device="cpu"))  # to that of a tensor which is the only one


def is_storage_held(tensor: Tensor, *, num_tensors: int = 1) -> bool:
    """Whether anybody refers to the memory of a tensor besides that tensor, or some that share it."""
    refs, uses = _references(tensor)
    return refs > _ALONE[0] or uses > _ALONE[1] + num_tensors - 1


@dataclass(slots=True, eq=False)
class _InUse:
    """How many bytes a pool has handed out: of its own, for a buffer must not keep the pool alive."""

    num_bytes: int = 0


class Patience:
    """Waits for peers that may be at something else: half as long after each time in vain.

    Args:
        limit_s: The longest wait.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = self.now_s = limit_s

    def wait(self, is_over: Callable[[], bool], is_awaited: Callable[[], bool]) -> bool:
        """Wait for a while until something is over, or a peer awaits this rank; gives whether it is over."""
        begin, pause_s = time.monotonic(), PAUSES_S[0]
        while not is_over():
            if is_awaited():
                return is_over()
            if time.monotonic() - begin > self.now_s:
                self.now_s /= 2
                return is_over()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSES_S[1])
        self.now_s = min(2 * self.now_s, self._limit_s)
        return True


class Readers:
    """The peers that have still to read what was sent through memory.

    Args:
        look: Has those counted that have read by now.
        is_awaited: Whether one of them waits for this rank meanwhile.
    """

    __slots__ = ("held", "is_awaited", "look", "num_left")

    def __init__(self, look: Callable[[], object], is_awaited: Callable[[], bool]) -> None:
        self.look, self.is_awaited = look, is_awaited
        self.num_left = 0
        self.held: list[Any] = []  # what they read

    def leave(self) -> None:
        """One of them has read."""
        self.num_left -= 1
        if self.num_left <= 0:
            self.held.clear()


class Buffer:
    """Flat bytes, and the tensors that they were cut into: who cuts them alike the next time takes the same ones.

    Args:
        memory: Shape (bytes,), uint8.
        arena: In which it lies, if in one.
    """

    __slots__ = (
        "_cut",
        "_in_use",
        "_refs",
        "_tensors",
        "arena",
        "is_on_cpu",
        "kept_since",
        "made_by",
        "memory",
        "num_bytes",
        "readers",
    )

    def __init__(self, memory: Tensor, arena: Arena | None = None) -> None:
        self.arena = arena
        self.readers: Readers | None = None  # who may read it through shared memory
        self._in_use: _InUse | None = None
        self.memory, self.num_bytes, self.is_on_cpu = memory, memory.numel(), memory.is_cpu
        self.kept_since = 0  # as `_Kept` counts
        self._cut: Any = None
        self.made_by: Callable[[Tensor], Any] | None = None  # its tensors: what `cut` was last called with
        self._tensors: tuple[Tensor, ...] = ()
        self._refs = self._references()

    def cut(self, make: Callable[[Tensor], Any]) -> Any:
        """What `make` gives of the memory, or has given the last time.

        All tensors that share the memory are its `tensors`. Nobody else may refer to the memory while it is cut anew.
        """
        if self.made_by != make:
            self._cut = make(self.memory)
            self.made_by, self._tensors = make, self._cut.tensors
            self._refs = self._references()
        return self._cut

    def hand_out(self, in_use: _InUse) -> None:
        """Count it as in use until it is handed back, or nobody refers to it: an exception drops what it interrupts."""
        in_use.num_bytes += self.num_bytes
        self._in_use = in_use

    def hand_back(self) -> None:
        """Count it as in use no longer."""
        in_use, self._in_use = self._in_use, None
        if in_use is not None:
            in_use.num_bytes -= self.num_bytes

    @property
    def is_in_use(self) -> bool:
        """Whether a pool counts it as in use."""
        return self._in_use is not None

    __del__ = hand_back

    def _references(self) -> tuple[Any, ...]:
        """How many there are to the memory, and to each tensor that it was cut into, Python's and all."""
        tensors = self._tensors
        return _references(self.memory), list(map(sys.getrefcount, tensors)), list(map(_USES_OF, tensors))

    def is_held(self) -> bool:
        """Whether anybody else refers to its memory."""
        return self._references() != self._refs


class _Kept:
    """Buffers that wait to be used again, by what they are good for.

    Attributes:
        num_bytes: Of all of them.
    """

    def __init__(self) -> None:
        self._alike: dict[Any, list[Buffer]] = {}  # the longest unused first
        self._serial = self.num_bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._alike.values()))

    def __iter__(self) -> Iterator[Buffer]:
        return chain.from_iterable(self._alike.values())

    def put(self, key: Any, buffer: Buffer) -> None:
        """Keep a buffer, which was used just now."""
        self._serial = buffer.kept_since = self._serial + 1
        self.num_bytes += buffer.num_bytes
        alike = self._alike.get(key)
        if alike is None:
            self._alike[key] = [buffer]
        else:
            alike.append(buffer)

    def take(self, key: Any, make: Callable[[Tensor], Any] | None) -> Buffer | None:
        """Of those that are good for the same, the one that was cut by `make` and used last, or else that used last."""
        alike = self._alike.get(key)
        if not alike:
            return None
        place = -1
        if alike[-1].made_by != make:
            found = (index for index in range(len(alike) - 2, -1, -1) if alike[index].made_by == make)
            place = next(found, -1)
        buffer = alike.pop(place)
        self.num_bytes -= buffer.num_bytes
        if not alike:
            del self._alike[key]
        return buffer

    def drop(self) -> None:
        """Let go of the one that was not used for longest."""
        key = min(self._alike, key=lambda key: self._alike[key][0].kept_since)
        self.num_bytes -= self._alike[key].pop(0).num_bytes
        if not self._alike[key]:
            del self._alike[key]

    def clear(self) -> None:
        """Let go of all."""
        self._alike.clear()
        self.num_bytes = 0


def _fresh(num_bytes: int, device: torch.device, arena: Arena | None = None) -> Buffer:
    """New memory: `num_bytes` of uint8, in an arena if one is given.

    Large buffers on the CPU get pages of their own: they come and go while activations fill the heap, and would leave
    holes in it that nothing else fits into.
    """
    if arena is not None:
        memory = arena.take(num_bytes)[0]
    elif device.type != "cpu" or num_bytes < _OWN_PAGES_BYTES:
        return Buffer(torch.empty(num_bytes, dtype=torch.uint8, device=device))
    else:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
    return Buffer(memory.fill_(_NANS) if _fills() else memory, arena)


_are_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
_NANS = 0xFF  # a byte that makes up a NaN in every float format


def _fills() -> bool:
    """Whether `torch.empty` fills what it gives with NaN, as in deterministic mode."""
    return _are_deterministic() and torch._C._get_deterministic_fill_uninitialized_memory()


class BufferPool:
    """Flat buffers of bytes that are handed out again once nothing refers to their memory.

    What it keeps and what is in use together never exceed what was in use at one time, in this step or the last. What
    peers still read counts as in use; rather than have more memory because of it, `take` waits for them for a while:
    for memory in an arena until they have read nearly all that was given back, so that hardly more is put out than of
    messages.
    Devices other than the CPU have an allocator that caches, and knows their streams: there memory goes back to it, and
    a buffer without memory waits to get new one, for the tensors that it was cut into cost the host more than memory.
    """

    def __init__(self) -> None:
        self._kept = _Kept()
        self._away: list[Buffer] = []  # that peers still read, or that are lent to somebody who gives nothing back
        self._empty = _Kept()  # of devices, without memory
        self._patience = Patience(PATIENCE_S)
        self._in_use = _InUse()
        self._peak_bytes = 0  # most in use at one time since the last `mark`
        self._last_peak_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes that wait to be used again."""
        return self._kept.num_bytes

    @property
    def out_bytes(self) -> int:
        """Bytes that are in use."""
        return self._in_use.num_bytes

    def take(
        self,
        num_bytes: int,
        device: torch.device,
        arena: Arena | None = None,
        *,
        make: Callable[[Tensor], Any] | None = None,
    ) -> Buffer:
        """A buffer of `num_bytes` bytes with any content, in an arena if one is given; give it back when done.

        One that was cut by `make` is preferred.
        """
        if device.type != "cpu":
            return self._refilled(num_bytes, device, make) or _fresh(num_bytes, device)
        needed = self._in_use.num_bytes + num_bytes
        if self._away:
            self._collect()
            needed = self._in_use.num_bytes + num_bytes - self._unread_bytes()
        if needed > self._peak_bytes:
            self._peak_bytes = needed
        if arena is not None:
            self.settle()
        buffer = self._kept.take((num_bytes, arena), make)
        if buffer is None and arena is None:
            self._await_readers(lambda: self.out_bytes + num_bytes > max(self._peak_bytes, self._last_peak_bytes))
            buffer = self._kept.take((num_bytes, arena), make)
        if buffer is None:
            self._trim(num_bytes)
            buffer = _fresh(num_bytes, device, arena)
        elif _are_deterministic() and _fills():
            buffer.memory.fill_(_NANS)
        buffer.hand_out(self._in_use)
        return buffer

    def _refilled(self, num_bytes: int, device: torch.device, make: Callable[[Tensor], Any] | None) -> Buffer | None:
        """A buffer of this size of a device, with memory again: as new one, of the stream that is current."""
        buffer = self._empty.take((num_bytes, device), make)
        if buffer is None:
            return None
        buffer.memory.untyped_storage().resize_(num_bytes)
        if _fills():
            buffer.memory.fill_(_NANS)
        return buffer

    def settle(self) -> None:
        """Wait for a while until peers have read what was given back, but for a little."""
        self._await_readers(lambda: self._unread_bytes() > _UNREAD_BYTES)

    def _has_unread(self) -> bool:
        """Whether peers have still to read some of what was given back."""
        return any(buffer.readers is not None for buffer in self._away)

    def _unread_bytes(self) -> int:
        return sum(buffer.num_bytes for buffer in self._away if buffer.readers is not None)

    def _await_readers(self, is_needed: Callable[[], bool]) -> None:
        """Wait for peers to read, as long as what they read is needed; for a while.

        A peer may be at something else, and never come before this rank does.
        """

        def is_over() -> bool:
            if self._has_unread() and is_needed():
                self._collect()
            return not (self._has_unread() and is_needed())

        self._patience.wait(is_over, lambda: any(b.readers is not None and b.readers.is_awaited() for b in self._away))

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back, once no peer reads it; one whose memory somebody still refers to stays theirs."""
        readers = buffer.readers
        if readers is not None:
            if readers.num_left > 0:
                readers.look()
            if readers.num_left > 0:
                self._away.append(buffer)
                return
            buffer.readers = None
        buffer.hand_back()
        if buffer.is_held():
            return
        if buffer.is_on_cpu:
            self._kept.put((buffer.num_bytes, buffer.arena), buffer)
            self._trim()
        elif buffer.memory.device.type != "meta":
            self._drain(buffer)

    def _drain(self, buffer: Buffer) -> None:
        """Give the memory of a device back to its allocator, and keep the tensors that it was cut into."""
        buffer.memory.untyped_storage().resize_(0)
        self._empty.put((buffer.num_bytes, buffer.memory.device), buffer)
        if len(self._empty) > _MAX_EMPTY:
            self._empty.drop()

    def lend(self, buffer: Buffer) -> None:
        """Take a buffer back as soon as nobody refers to its memory any more; until then it counts as in use."""
        if buffer.memory.device.type == "cpu":
            self._away.append(buffer)

    def _collect(self) -> None:
        """Take back what peers have read by now, and lent buffers that nobody refers to."""
        if not self._away:
            return
        away, self._away = self._away, []
        looked = set()  # each look is at all that was sent by one transport
        for buffer in away:
            readers = buffer.readers
            if readers is not None and readers.num_left > 0 and readers.look not in looked:
                looked.add(readers.look)
                readers.look()
            if buffer.is_held() if readers is None else readers.num_left > 0:
                self._away.append(buffer)
            else:
                self.give(buffer)

    def idle(self) -> list[Tensor]:
        """The memory that is kept, and what could be: was lent and is held no more, or was read."""
        away = [b for b in self._away if not b.is_held() and (b.readers is None or b.readers.num_left <= 0)]
        return [buffer.memory for buffer in (*self._kept, *away)]

    def mark(self) -> None:
        """A step begins: memory that neither it nor the last one needs is let go from now on."""
        self._collect()
        self._last_peak_bytes, self._peak_bytes = self._peak_bytes, self.out_bytes
        self._trim()

    def clear(self) -> None:
        """Let all memory go that waits to be used again, and forget how much was in use: sizes are others now."""
        self._collect()
        self._kept.clear()
        self._empty.clear()
        self._peak_bytes = self._last_peak_bytes = 0

    def _trim(self, num_more: int = 0) -> None:
        limit = max(self._peak_bytes, self._last_peak_bytes) - self._in_use.num_bytes - num_more
        while self._kept.num_bytes > limit and len(self._kept):
            self._kept.drop()
