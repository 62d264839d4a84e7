"""Which forwards of a model run, and whom that concerns: parameters under mixed precision, and regions of recompute."""

import torch

from dshard.autograd.recompute import Regions
from dshard.tensor.mixed import note_forward
from dshard.units.unit import Unit

__all__ = ["Running"]


class Running:
    """Counts the forwards of a model's modules."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.num_running = 0  # forwards of modules, nested ones too
        self.regions = Regions()
        self.is_autocasting = False
        self._num_told = 0  # of them, to parameters under mixed precision
        self._is_mixed: bool | None = None  # as soon as it is asked for
        self._device_type = "cpu"

    def on_dtypes(self) -> None:
        """Forwards compute with some parameters in other dtypes from now on: ask anew whether any is mixed."""
        self._is_mixed = None

    def note_running(self, change: int) -> None:
        """A forward of a module starts, or ends: `change` is 1 or -1."""
        num_running = self.num_running + change
        if self._is_mixed is False and num_running >= 0:
            self.num_running = num_running
            self.is_autocasting = num_running > 0 and torch.is_autocast_enabled(self._device_type)
        else:
            self._set_running(max(0, num_running))

    def _set_running(self, num_running: int) -> None:
        if self._is_mixed is None:
            self._is_mixed = any(unit.is_mixed for unit in self.units)
            self._device_type = next((p.shard_group.device_type for unit in self.units for p in unit.params), "cpu")
        told = num_running if self._is_mixed else 0
        if not self._num_told and told:
            self.regions.begin()
        elif not told:
            self.regions.end()
        if told != self._num_told:
            note_forward(told - self._num_told)
            self._num_told = told
        self.num_running = num_running
        # Asked here, for within the operations that it casts for, autocast says that it is off.
        self.is_autocasting = self.num_running > 0 and torch.is_autocast_enabled(self._device_type)
