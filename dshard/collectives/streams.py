"""Programs that compute in several streams of a device: what was made in one of them may be used in another."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from dshard.collectives.group import Handle

Stream = Any  # torch's; None on devices that have none


def stream_on(device: torch.device) -> Stream:
    """The stream that is current on a device."""
    return None if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device.index)


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


T = TypeVar("T")


class Steps(Generic[T]):
    """Some collectives in flight, one after the other; the first one starts now.

    Who waits decides when the next one starts: at points of the program that are the same on all ranks.

    Args:
        steps: Yields the handle of each collective that it has started, and goes on once that was waited for; returns
            the result.
    """

    __slots__ = ("_error", "_handle", "_result", "_steps", "num_waited")

    def __init__(self, steps: Generator[Handle[Any], None, T]) -> None:
        self._steps = steps
        self._handle: Handle[Any] | None = None
        self._result: T | None = None
        self._error: BaseException | None = None
        self.num_waited = 0  # of the collectives
        self._go_on()

    def _go_on(self) -> None:
        try:
            self._handle = next(self._steps)
        except StopIteration as end:
            self._handle, self._result = None, end.value
        except BaseException as error:
            self._error = error
            raise

    @property
    def is_done(self) -> bool:
        """Whether all of them were waited for."""
        return self._handle is None and self._error is None

    def advance(self, num_steps: int) -> bool:
        """Wait for the first `num_steps` collectives and start the one that follows; gives `is_done`.

        Raises:
            DivergenceError: As `Handle.wait`; again, if it is called again.
        """
        if self._error is not None:
            raise self._error
        while self._handle is not None and self.num_waited < num_steps:
            self._handle.wait()
            self.num_waited += 1
            self._go_on()
        return self._handle is None

    @property
    def result(self) -> T:
        """What came of it, once it is done."""
        assert self.is_done, "a collective is under way"
        return self._result  # type: ignore[return-value]
