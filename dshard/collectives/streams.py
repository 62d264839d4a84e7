"""Programs that compute in several streams of a device: what was made in one of them may be used in another."""

from collections.abc import Iterable
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
