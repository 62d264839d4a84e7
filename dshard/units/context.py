"""What the units of one model share."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from dshard.autograd import Regions
from dshard.collectives import BufferPool, SideStream
from dshard.policies import Offload
from dshard.tensor.sharded_tensor import note_forward
from dshard.units.copy_stream import CopyStream
from dshard.units.eviction import Eviction
from dshard.units.regions import RankRegions
from dshard.units.schedule import Phase, Schedule
from dshard.units.settings import ModelSettings

if TYPE_CHECKING:
    from dshard.units.unit import Unit

S = TypeVar("S")


class Forwards:
    """The forwards of a model's modules that run, and whom that concerns: mixed precision, and regions of recompute.

    Args:
        context: Of the model.
    """

    def __init__(self, context: "ModelContext") -> None:
        self._context = context
        self.num_running = 0  # nested ones too
        self.regions = Regions()
        self.is_autocasting = False  # the one that started or ended last
        self._num_told = 0  # of them, to parameters under mixed precision
        self._is_mixed = False
        self._is_plain: bool | None = None  # whether no value depends on where it is used; as soon as it is asked for
        self._device_type = "cpu"

    def on_dtypes(self) -> None:
        """Forwards compute with some parameters in other dtypes from now on: ask anew whether any does."""
        self._is_plain = None

    def note_running(self, change: int) -> None:
        """A forward of a module starts, or ends: `change` is 1 or -1."""
        num_running = self.num_running + change
        if self._is_plain and num_running >= 0:
            self.num_running = num_running
            self.is_autocasting = num_running > 0 and torch.is_autocast_enabled(self._device_type)
        else:
            self.set_running(max(0, num_running))

    def set_running(self, num_running: int) -> None:
        """So many forwards run."""
        units = self._context.units
        if self._is_plain is None:
            self._is_mixed = any(unit.is_mixed for unit in units)
            self._is_plain = all(unit.is_plain for unit in units)
            self._device_type = next((p.shard_group.device_type for unit in units for p in unit.params), "cpu")
        told = num_running if self._is_mixed else 0
        if num_running and not self.num_running and not self._is_plain:
            self.regions.begin()
        elif not num_running:
            self.regions.end()
        if told != self._num_told:
            note_forward(told - self._num_told)
            self._num_told = told
        self.num_running = num_running
        # Asked here, for within the operations that it casts for, autocast says that it is off.
        self.is_autocasting = self.num_running > 0 and torch.is_autocast_enabled(self._device_type)


class ModelContext:
    """What the units of one model share, and nothing that a single one of them knows.

    Rooms above `units` keep what they know of the model here too, by the class of it: `context.get(Reducer)`.
    """

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.root: nn.Module | None = None
        self.settings = ModelSettings()
        self.pool = BufferPool()  # memory for gathered copies and for gradients on their way
        self.schedule: Schedule[Unit] = Schedule(is_free=attrgetter("is_whole"), size_of=attrgetter("param_bytes"))
        self.forwards = Forwards(self)
        self.eviction = Eviction(self)
        self.regions = RankRegions()
        self.token = object()  # stands for the model where it must not be kept alive
        self.backward_task = -1  # autograd's number of the backward that is known to run
        self.split: Callable[[], None] | None = None  # forms units at the first use, of what the root's call took
        self.announce: Callable[[Phase], None] | None = None  # called ahead of each phase
        self.on_backward: Callable[[], object] = lambda: None  # called where a backward is found to use a unit
        self.on_outside: Callable[[], object] = lambda: None  # called where a gradient is read, or a unit gathered
        self.services: dict[type, Any] = {}  # by their class, as `get` makes them
        self._copy_streams: dict[tuple[Offload, bool], CopyStream] = {}
        self._side_streams: dict[torch.device, SideStream] = {}

    def get(self, kind: type[S]) -> S:
        """The object of a class that is made once for each model, with this as its argument."""
        known: S | None = self.services.get(kind)
        if known is None:
            make: Any = kind
            known = self.services[kind] = make(self)
        return known

    @property
    def gathered_bytes(self) -> int:
        """Bytes of gathered copies that are alive, without padding."""
        return self.eviction.num_bytes

    def adopt(self, unit: "Unit") -> None:
        """Take a unit in, from a context of its own or another's."""
        unit.model = self
        unit.number = 1 + max((u.number for u in self.units), default=0)
        self.units.append(unit)
        if unit.is_gathered:
            self.eviction.gathered[unit] = None
        self.forwards.on_dtypes()

    def reorder(self, units: "Sequence[Unit]") -> None:
        """Have the units in this order: that in which what is left at the end of a backward leaves."""
        self.units = list(units)
        for number, unit in enumerate(self.units):
            unit.number = number

    def change(self, **changes: Any) -> None:
        """Choose otherwise, by the names of `ModelSettings`."""
        settings = self.settings = replace(self.settings, **changes)
        self.schedule.depth = 1 if settings.prefetch is None else settings.prefetch

    def copy_stream(self, offload: Offload, *, inward: bool) -> CopyStream:
        """The stream of copies from a parameter's home to where it computes, or back; made at the first use."""
        known = self._copy_streams.get((offload, inward))
        if known is None:
            known = self._copy_streams[offload, inward] = CopyStream(offload)
        return known

    def side_stream(self, device: torch.device) -> SideStream:
        """The stream of gathers beside what a device computes; made at the first use."""
        known = self._side_streams.get(device)
        if known is None:
            known = self._side_streams[device] = SideStream(device)
        return known

    def before_use(self) -> None:
        """Form units, if that was left to the first use."""
        if self.split is not None:
            split, self.split = self.split, None
            split()

    def begin(self, phase: Phase) -> None:
        """A phase starts."""
        self.eviction.begin()
        self.schedule.begin(phase)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles take along: units and switches, nothing that is under way."""
        self.before_use()
        kept = {kind: known if "__getstate__" in vars(kind) else None for kind, known in self.services.items()}
        return {"units": self.units, "root": self.root, "settings": self.settings, "services": kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        kept = state.pop("services")
        self.__dict__.update(state)
        self.change()
        self.services.update((kind, known) for kind, known in kept.items() if known is not None)
        for kind in kept:
            self.get(kind)
