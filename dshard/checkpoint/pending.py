"""Asynchronous saves, of which each group of ranks has one at a time."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from dshard.checkpoint.agreement import agree
from dshard.collectives import ShardGroup
from dshard.errors import CheckpointError

_LOG = logging.getLogger("dshard")
_PENDING: "dict[str, PendingSave]" = {}  # by the name of the ranks' group


class PendingSave:
    """An asynchronous save, of which this rank's part is being written.

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
        """Whether this rank's part is written, and on rank 0 the checkpoint in its place, or failed."""
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
        self._end()
        if not self._is_agreed:
            self._is_agreed = True
            try:
                agree(self._group, self._error, f"{self.path}: writing the checkpoint failed")
            except CheckpointError as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self.path

    def settle(self) -> None:
        """As `result`, without telling the other ranks: the caller tells them what went wrong on this one."""
        self._end()
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()
        if _PENDING.get(self._group.full_name) is self:
            del _PENDING[self._group.full_name]


def pending_save(group: ShardGroup) -> PendingSave | None:
    """The asynchronous save of some ranks that nobody has waited for yet, if there is one."""
    return _PENDING.get(group.full_name)
