"""The copy from which an asynchronous save writes: made while the next forward and backward run.

Shards change in an optimizer's step and nowhere else in a training, so there is a forward and a backward's time to copy
them; a step that comes sooner waits. Who writes to a shard otherwise before it was copied makes the save fail, for the
shard's version tells of it.
"""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dshard.checkpoint.shard_file import Piece
from dshard.errors import CheckpointError
from dshard.optimizer.step_hooks import before_steps

_SLACK_BYTES = 1 << 16  # random states do not always take as many bytes
_NICENESS = 10  # of the thread when it writes: training goes first
_OPEN: "weakref.WeakSet[Snapshot]" = weakref.WeakSet()  # whose copies are being made
_WATCHED: list[Callable[[], None]] = []  # what ends that steps wait for them, from the first on


class Snapshot:
    """Copies of pieces on the host, complete some time after the snapshot was taken.

    Args:
        pieces: What to copy. Those that are no shards are copied at once.
        memory: Of an earlier snapshot, to be used again; shape (bytes,), uint8.
    """

    def __init__(self, pieces: Sequence[Piece], memory: Tensor | None = None) -> None:
        self._device = next((p.values.device for p in pieces if p.values.device.type != "cpu"), None)
        self._pieces = list(pieces)
        self._versions = [piece.values._version for piece in pieces]
        self._is_copied = threading.Event()
        size = sum(_aligned(piece.num_bytes) for piece in pieces)
        if memory is None or memory.numel() < size:
            memory = None  # ahead of what takes its place
            memory = torch.empty(
                size + _SLACK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=self._device is not None
            )
        self.memory = memory
        self._copies = _cut(memory, pieces)
        self._stream: Any = None
        if self._device is not None:
            module = torch.get_device_module(self._device.type)
            self._stream = module.Stream(self._device)
            self._stream.wait_stream(module.current_stream(self._device))
        with torch.no_grad():
            for i, piece in enumerate(pieces):
                if not piece.is_shard:
                    self._copies[i].copy_(piece.values)
        _OPEN.add(self)
        if not _WATCHED:
            _WATCHED.append(before_steps(_wait_for_copies))

    def copy(self) -> list[Piece]:
        """Make the copies, in another thread than the one that trains.

        Returns:
            The pieces, on the host.

        Raises:
            CheckpointError: A shard was written to meanwhile.
        """
        try:
            stream = self._stream
            module: Any = torch.get_device_module(self._device.type) if self._device is not None else None
            with torch.no_grad(), module.stream(stream) if module is not None else nullcontext():
                for piece, copy in zip(self._pieces, self._copies, strict=True):
                    if piece.is_shard:
                        copy.copy_(piece.values, non_blocking=True)
            if stream is not None:
                stream.synchronize()
            for piece, version in zip(self._pieces, self._versions, strict=True):
                if piece.is_shard and piece.values._version != version:
                    raise CheckpointError(
                        f"{piece.name}: what is saved asynchronously may be written to by an optimizer's step, which "
                        "waits, but something else wrote to it before it was copied. Do that after the next step, or "
                        "save with asynchronous=False."
                    )
        finally:
            self._is_copied.set()
            _OPEN.discard(self)
        copied = [replace(p, values=c) for p, c in zip(self._pieces, self._copies, strict=True)]
        self._pieces.clear()
        with suppress(OSError, AttributeError):
            if threading.current_thread() is not threading.main_thread():
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        return copied

    def wait(self) -> None:
        """Wait until the copies are made."""
        self._is_copied.wait()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


def _cut(memory: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """A place in memory for each piece."""
    found, start = [], 0
    for piece in pieces:
        raw = memory[start : start + piece.num_bytes]
        found.append(raw.view(piece.values.dtype).view(piece.values.shape))
        start += _aligned(piece.num_bytes)
    return found


def _wait_for_copies(_: Any) -> None:
    """Wait, ahead of an optimizer's step, for the copies that are being made."""
    for snapshot in list(_OPEN):
        snapshot.wait()
