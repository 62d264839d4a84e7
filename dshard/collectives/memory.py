"""Memory that is used again: fresh pages of large buffers cost a CPU more than the bytes that fill them."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["BufferPool", "Take", "fresh"]

_UNALIASED = 2  # references to a storage: the buffer's own, and that of the call that asks
Take = Callable[[int, torch.device], Tensor]


def fresh(num_bytes: int, device: torch.device) -> Tensor:
    """New memory: `num_bytes` of uint8."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class BufferPool:
    """Flat buffers of bytes that are handed out again once nothing refers to their memory.

    What it keeps and what is in use together never exceed what was in use at one time, in this step or the last.
    Devices other than the CPU have an allocator that caches; there, every buffer is new.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []  # the longest unused first
        self._kept_bytes = 0
        self._out_bytes = 0
        self._peak_bytes = 0  # most in use at one time since the last `mark`
        self._last_peak_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes that wait to be used again."""
        return self._kept_bytes

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """A buffer of `num_bytes` bytes with any content; give it back when done."""
        if device.type != "cpu":
            return fresh(num_bytes, device)
        self._out_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._out_bytes)
        for i in range(len(self._kept) - 1, -1, -1):
            if self._kept[i].numel() == num_bytes:
                buffer = self._kept.pop(i)
                self._kept_bytes -= num_bytes
                fills = torch._C._get_deterministic_fill_uninitialized_memory()
                if fills and torch.are_deterministic_algorithms_enabled():
                    buffer.fill_(0xFF)  # NaN in every float format, as `torch.empty` does then
                return buffer
        self._trim()
        return fresh(num_bytes, device)

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back; one whose memory somebody still refers to is left to them."""
        if buffer.device.type != "cpu":
            return
        self._out_bytes -= buffer.numel()
        if torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) > _UNALIASED:
            return
        self._kept.append(buffer)
        self._kept_bytes += buffer.numel()
        self._trim()

    def mark(self) -> None:
        """A step begins: memory that neither it nor the last one needs is let go from now on."""
        self._last_peak_bytes, self._peak_bytes = self._peak_bytes, self._out_bytes
        self._trim()

    def clear(self) -> None:
        """Let all memory go that waits to be used again."""
        self._kept.clear()
        self._kept_bytes = 0

    def _trim(self) -> None:
        limit = max(self._peak_bytes, self._last_peak_bytes)
        while self._kept and self._kept_bytes + self._out_bytes > limit:
            self._kept_bytes -= self._kept.pop(0).numel()
