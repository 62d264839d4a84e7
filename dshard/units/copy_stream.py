"""Copies between a parameter's two devices, beside what the device computes.

Its shards are at home, most often in the CPU's memory; what is gathered of them, and gradients until they are reduced,
are on the compute device. Dtypes are converted there, behind the way in and ahead of the way home: that moves more
bytes than a conversion on the host would, but the host, which starts all the device's work, only starts copies.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dshard.collectives import GatherPlan
from dshard.policies import Offload


@dataclass(frozen=True, slots=True)
class _Staged:
    """Shards on the compute device.

    Args:
        shards: The shards.
        row: The memory that they lie in, one behind the other.
        arrival: Whose `synchronize` waits until home may be written to again.
    """

    shards: list[Tensor]
    row: Tensor
    arrival: Any


class CopyStream:
    """One direction between two devices.

    Args:
        offload: The two.
    """

    def __init__(self, offload: Offload) -> None:
        self.offload = offload
        has_streams = offload.compute.type not in ("cpu", "meta")
        device: Any = torch.get_device_module(offload.compute) if has_streams else None
        self._device, self._stream = device, device.Stream(offload.compute) if has_streams else None

    @contextmanager
    def open(self) -> Iterator[None]:
        """What is started inside runs after what was started before, and beside what is started later.

        Memory that is taken inside may be used outside: the next scope starts after that.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(self._device.current_stream(self.offload.compute))
        with self._device.stream(self._stream):
            yield

    def copy_in(self, shards: Sequence[Tensor], row: Tensor | None, plan: GatherPlan) -> _Staged:
        """Start to copy shards from home, within `open`.

        Args:
            shards: At home; they must not change before the arrival.
            row: The memory of a `SendRow` that they lie in, if they do: then it is one copy.
            plan: Of their bucket.
        """
        device = self.offload.compute
        if row is not None:
            moved = torch.empty(row.shape, dtype=row.dtype, device=device)
            moved.copy_(row, non_blocking=True)
        else:
            moved = torch.empty(plan.send_numel, dtype=shards[0].dtype, device=device)
            torch._foreach_copy_(plan.slots(moved), [shard.reshape(-1) for shard in shards], non_blocking=True)
        parts = [part.view(shard.shape) for part, shard in zip(plan.slots(moved), shards, strict=True)]
        return _Staged(parts, moved, self._mark())

    def copy_out(self, row: Tensor) -> tuple[Tensor, Any]:
        """Start to copy a row home; gives what it becomes there, and whose `synchronize` waits for it."""
        home = torch.empty(row.shape, dtype=row.dtype, device=self.offload.home, pin_memory=self.offload.pins)
        with self.open():
            home.copy_(row, non_blocking=True)
            if self._stream is not None:
                row.record_stream(self._stream)  # nobody waits here, as a gather's use does, before it is let go
            return home, self._mark()

    def _mark(self) -> Any:
        return self._stream.record_event() if self._stream is not None else _There()


class _There:
    """The arrival of what was copied at once."""

    def synchronize(self) -> None:
        """Nothing to wait for."""
