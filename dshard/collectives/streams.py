"""Programs that compute in several streams of a device: what was made in one of them may be used in another."""

from collections.abc import Callable, Iterable
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
