"""Asynchronous saves: copy the shards while the next forward and backward run, and write the copy.

Shards change in an optimizer's step and nowhere else in a training, so there is a forward and a backward's time to copy
them; a step that comes sooner waits. Who writes to a shard otherwise before it was copied makes the save fail, for the
shard's version tells of it. Each group of ranks has one asynchronous save at a time.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dshard.checkpoint.agreement import together
from dshard.checkpoint.files import Piece
from dshard.collectives import ShardGroup
from dshard.errors import CheckpointError
from dshard.optimizer.steps import before_steps

_LOG = logging.getLogger("dshard")
_SLACK_BYTES = 1 << 16  # random states do not always take as many bytes
_NICENESS = 10  # of the thread when it writes: training goes first
_PENDING: "dict[str, PendingSave]" = {}  # by the name of the ranks' group
_MEMORY: dict[str, Tensor] = {}  # of snapshots, by the name of the ranks' group
_OPEN: "weakref.WeakSet[Snapshot]" = weakref.WeakSet()  # that are still being copied
_WATCHED: list[Callable[[], None]] = []  # removes the hook ahead of steps


class Snapshot:
    """Copies of pieces on the host, made by another thread after the snapshot was taken.

    Args:
        pieces: What to copy. Those that are no shards are copied at once.
        key: Of whose last snapshot the memory is used again.
    """

    def __init__(self, pieces: Sequence[Piece], key: str) -> None:
        self._device = next((p.values.device for p in pieces if p.values.device.type != "cpu"), None)
        self._pieces = list(pieces)
        self._versions = [piece.values._version for piece in pieces]
        self._is_copied = threading.Event()
        size = sum(_aligned(piece.num_bytes) for piece in pieces)
        memory = _MEMORY.pop(key, None)
        if memory is None or memory.numel() < size:
            memory = None  # ahead of what takes its place
            memory = torch.empty(
                size + _SLACK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=self._device is not None
            )
        _MEMORY[key] = memory
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
        """Copy the shards; called in the thread that writes them.

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
                        f"{piece.name}: only an optimizer's step, which waits, may write to a tensor while an "
                        "asynchronous save copies it, but something else wrote to this one. Do that after the next "
                        "step, or save with asynchronous=False."
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
    """Return a part of the memory for each piece."""
    found, start = [], 0
    for piece in pieces:
        raw = memory[start : start + piece.num_bytes]
        found.append(raw.view(piece.values.dtype).view(piece.values.shape))
        start += _aligned(piece.num_bytes)
    return found


def _wait_for_copies(_: Any) -> None:
    """Wait before an optimizer's step for all copies that are being made."""
    for snapshot in list(_OPEN):
        snapshot.wait()


class PendingSave:
    """A save whose files this rank is writing in a thread.

    Args:
        target: Where the checkpoint will be.
        group: The ranks that write it.
        action: Writes this rank's part.
    """

    def __init__(self, target: Path, group: ShardGroup, action: Callable[[], None]) -> None:
        self.path = target
        self._group, self._action = group, action
        self._error: Exception | None = None
        self._is_agreed = False
        self._thread = threading.Thread(target=self._run, name="dshard-save")  # a process that ends waits for it
        _PENDING[group.full_name] = self
        try:
            self._thread.start()
        except RuntimeError:  # no more threads: the caller writes, for others wait for this part
            self._run()

    def _run(self) -> None:
        try:
            self._action()
        except Exception as error:
            self._error = error
            _LOG.error("%s: the asynchronous save failed: %s", self.path, error)

    def done(self) -> bool:
        """Return whether this rank has finished or failed; on rank 0, whether the checkpoint is published too."""
        return not self._thread.is_alive()

    def result(self) -> Path:
        """Wait until the checkpoint is in its place; to be called on all ranks. The next save calls it.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: It could not be written. On every rank alike.

        Communicates:
            An all-reduce of 8 bytes, the first time.
        """
        if self._is_agreed:
            self.settle()
            return self.path
        self._is_agreed = True
        try:
            together(self._group, self.settle, f"{self.path}: every rank must write its part of the checkpoint")
        except CheckpointError as error:
            self._error = error
            raise
        return self.path

    def settle(self) -> None:
        """Wait as `result` does, but raise on this rank alone: the caller raises it on the others."""
        if self._thread.ident is not None:
            self._thread.join()
        if _PENDING.get(self._group.full_name) is self:
            del _PENDING[self._group.full_name]
        if self._error is not None:
            raise self._error


def pending_save(group: ShardGroup) -> PendingSave | None:
    """Return the group's asynchronous save that nobody has waited for yet, if there is one."""
    return _PENDING.get(group.full_name)
