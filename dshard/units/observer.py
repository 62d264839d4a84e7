"""What units tell of themselves."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from dshard.autograd.recompute import Regions
from dshard.autograd.watches import InputWatches
from dshard.collectives import BufferPool
from dshard.policies import Offload
from dshard.units.copy_stream import CopyStream
from dshard.units.schedule import Schedule
from dshard.units.virtual_ranks import VirtualRanks

__all__ = ["UnitObserver"]


class UnitObserver(Protocol):
    """What a unit, and the hooks around it, tell of themselves; `Runtime` listens."""

    pool: BufferPool  # memory for gathered copies and for gradients on their way
    schedule: Schedule[Any]
    split: Callable[[], None] | None  # forms units at the first use
    backward_task: int  # autograd's number of the backward that is known to run, else -1
    num_running: int  # forwards of modules that are running
    regions: Regions  # checkpointed ones in them
    watches: InputWatches  # on inputs of modules
    virtual: VirtualRanks | None  # whose gradients are added up, if they are no processes
    is_autocasting: bool  # the one that started or ended last
    used_in_graph: tuple[int, Any]  # by the backward of a compiled graph: autograd's number of it, and which

    def copy_stream(self, offload: Offload, *, inward: bool) -> CopyStream:
        """For copies from a parameter's home to where it computes, or back."""

    def enter_graph(self, unit: Any) -> None:
        """A unit is used in a graph, within a forward that was noted."""

    def is_start_due(self) -> bool:
        """Whether the start of a training forward has more to do than to note it."""

    def before_use(self) -> None:
        """A unit is about to be used."""

    def on_touch(self, unit: Any) -> None:
        """A unit is about to be used for the first time in this phase, or since it was gathered."""

    def on_touched(self, unit: Any) -> None:
        """Its gathered copies are here."""

    def on_arrival(self, unit: Any) -> None:
        """The first gradient of a unit has arrived in the backward that is running."""

    def on_gather(self, unit: Any) -> None:
        """A unit starts to gather."""

    def on_free(self, unit: Any) -> None:
        """A unit dropped its gathered copies."""

    def on_converted(self, unit: Any) -> None:
        """A parameter of a unit has another dtype or device, and its gradient was reduced."""

    def on_dtypes(self) -> None:
        """Forwards compute with some parameters in other dtypes from now on."""

    def on_read(self, reduction: Any) -> None:
        """A gradient of a unit is read, whose reduction may not have started."""

    def on_reduced(self, reduction: Any) -> None:
        """A reduction of a unit's gradients ended."""

    def on_backward_done(self, unit: Any) -> None:
        """The backward that is running has no further use for a unit."""

    def on_passed(self, unit: Any) -> None:
        """The backward that is running has passed the modules of a unit."""

    def start_backward(self) -> Any:
        """A backward uses a unit; gives the reducer."""

    def note_running(self, change: int) -> None:
        """A forward of a module starts, or ends: `change` is 1 or -1."""

    def enter_forward(self, unit: Any) -> None:
        """A module of a unit starts its forward."""

    def exit_forward(self, unit: Any, module: nn.Module) -> None:
        """A module of a unit ended its forward."""
