"""Headers as gloo's messages, with few values in the same message."""

import struct
import weakref
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from dshard.collectives import _c10d
from dshard.collectives._c10d import ProcessGroup
from dshard.collectives.arena import Arena
from dshard.collectives.futex import Peer
from dshard.collectives.memory import BufferPool
from dshard.layout import HEADER_BYTES, INLINE_BYTES

_SIZES = struct.Struct("<II")  # behind the header: the channel of values, and how many bytes there are
_VALUES_AT = HEADER_BYTES + 16
_ROWS_BYTES = 1 << 20  # for one message of each peer


def _memory(num_bytes: int) -> tuple[bytearray, Tensor]:
    """Zeros, to be written to from both sides."""
    memory = bytearray(num_bytes)
    return memory, torch.frombuffer(memory, dtype=torch.uint8)


class Packed:
    """Values that are sent in the message of their header.

    Args:
        num_bytes: How many.
        channel: A number that tells messages apart.
    """

    __slots__ = ("_memory", "message", "values")

    def __init__(self, num_bytes: int, channel: int) -> None:
        self._memory, self.message = _memory(_VALUES_AT + num_bytes)
        self.values = torch.frombuffer(self._memory, dtype=torch.uint8, offset=_VALUES_AT)  # to be filled
        _SIZES.pack_into(self._memory, HEADER_BYTES, channel, num_bytes)

    def behind(self, header: bytes) -> Tensor:
        """The message."""
        self._memory[:HEADER_BYTES] = header
        return self.message


class _Sending:
    """A message on its way, whose memory must stay."""

    __slots__ = ("_message", "_work")

    def __init__(self, message: Tensor, work: Any) -> None:
        self._message, self._work = message, work

    def wait(self, *limit: timedelta) -> None:
        """Wait until it has arrived."""
        self._work.wait(*limit)


class _Message:
    """A header that comes as a message, and values that may come with it.

    Args:
        work: Its arrival.
        row: Where it goes.
        rows: Where to leave that memory to others, once it was read.
    """

    __slots__ = ("_row", "_rows", "_work", "channel", "header", "is_here", "num_bytes", "offer", "offset")

    def __init__(self, work: Any, row: tuple[bytearray, Tensor], rows: list[tuple[bytearray, Tensor]]) -> None:
        self._work, self._rows, self.is_here = work, rows, False
        self._row: tuple[bytearray, Tensor] | None = row
        self.header, self.channel, self.num_bytes, self.offset = b"", 0, 0, 0
        self.offer: _Message | None = None

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait for it."""
        self._work.wait(*(() if limit is None else (limit,)))
        assert self._row is not None, "a message is waited for once"
        memory = self._row[0]
        self.header = bytes(memory[:HEADER_BYTES])
        self.channel, self.num_bytes = _SIZES.unpack_from(memory, HEADER_BYTES)
        if self.num_bytes:
            self.offer = self
        else:
            self.release()

    def values(self) -> Tensor:
        """Those that came with it."""
        assert self._row is not None, "values are read before they are released"
        return torch.frombuffer(self._row[0], dtype=torch.uint8, offset=_VALUES_AT, count=self.num_bytes)

    def release(self) -> None:
        """Its memory is not needed any more."""
        row, self._row, self.offer = self._row, None, None
        if row is not None:
            self._rows.append(row)


class ByMessages:
    """Every header is a message, together with the values where these are few; else they are messages of their own.

    Args:
        group: The process group, which is not kept alive.
    """

    arena: Arena | None = None

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self.pool = weakref.ref(group), BufferPool()
        self.inline_bytes = self._most_bytes = min(INLINE_BYTES, _ROWS_BYTES // _c10d.size_of(group))
        self._rows: list[tuple[bytearray, Tensor]] = []  # for what comes, to be used again

    def _alive(self) -> ProcessGroup:
        group = self._group()
        assert group is not None, "a process group is gone whose collectives go on"
        return group

    def say(self, header: bytes, peer: int, values: Packed | None = None) -> Any:
        """Start to send a header, and what goes with it."""
        message = torch.frombuffer(bytearray(header), dtype=torch.uint8) if values is None else values.behind(header)
        return _Sending(message, _c10d.send(message, peer, _c10d.HEADERS, self._alive()))

    def listen(self, peer: int) -> _Message:
        """Be ready for the next header of a peer, which may be shorter than what is made ready for it."""
        row = self._rows.pop() if self._rows else _memory(_VALUES_AT + self._most_bytes)
        _SIZES.pack_into(row[0], HEADER_BYTES, 0, 0)
        return _Message(_c10d.receive(row[1], peer, _c10d.HEADERS, self._alive()), row, self._rows)

    def collect(self) -> None:
        """Nothing is kept."""

    def is_awaited(self, *, unread: bool = True) -> bool:
        """Nothing is read late."""
        return False

    @property
    def processes(self) -> dict[int, Peer]:
        """None is known."""
        return {}
