"""Programs that compute in several streams of a device: what was made in one of them may be used in another."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Stream = Any  # torch's; None on devices that have none


def stream_on(device: torch.device) -> Stream:
    """The stream that is current on a device."""
    return None if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device)


def follow(stream: Stream, before: Stream, tensors: Iterable[Tensor] = ()) -> None:
    """Have a stream come behind what another one was given until now, whose memory it is to use.

    Args:
        stream: That goes on.
        before: The other one; nothing happens where it is the same.
        tensors: In memory of `before`, which takes it back only when `stream` has come so far.
    """
    if stream is None or before is None or stream == before:
        return
    stream.wait_stream(before)
    for tensor in tensors:
        tensor.record_stream(stream)


class MadeIn:
    """The stream in which something was made, and those that have come behind it.

    Args:
        device: Where; None for what is on none.
    """

    __slots__ = ("_behind", "_device", "stream")

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self.stream: Stream = stream_on(device) if device is not None else None
        self._behind: list[Stream] = []

    def follow(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Have the stream that is current come behind it, the first time; `tensors` gives what was made."""
        if self.stream is None:
            return
        assert self._device is not None
        stream = stream_on(self._device)
        if stream != self.stream and stream not in self._behind:
            self._behind.append(stream)
            follow(stream, self.stream, tensors())


class SideStream:
    """A stream for gathers of what was written long ago: they need not come behind all that computes meanwhile.

    It comes behind each `mark`, so one is needed between a write to shards and their gather here, and one behind the
    last use of memory that was taken here, ahead of the next gather.

    Args:
        device: That has streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._streams = device, torch.get_device_module(device)
        self._stream = self._streams.Stream(device)
        self._marks: dict[Stream, Any] = {}  # the last one of each stream

    @contextmanager
    def open(self) -> Iterator[None]:
        """What is started inside comes behind the marks, and behind nothing else."""
        marks, self._marks = self._marks, {}
        for mark in marks.values():
            self._stream.wait_event(mark)
        with self._streams.stream(self._stream):
            yield

    def mark(self) -> None:
        """What comes here from now on is behind all that the current stream was given until now."""
        stream = stream_on(self._device)
        self._marks[stream] = stream.record_event()
