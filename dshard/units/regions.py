"""Parts of a model that some ranks run and others do not: what the units in them are to the rest of the model."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dshard.errors import StateError

if TYPE_CHECKING:
    from dshard.units.unit import Unit


@dataclass(slots=True)
class RankRegions:
    """What is known of a model's regions (`dshard.run_by_some`), equal on all ranks.

    Args:
        open_label: Of the region whose forward runs, and that some rank runs; else None.
        units: Units that have been part of one: ranks may differ in which of their parameters have gradients.
        in_backward: Units of regions that the running backward has come to.
        unreduced: Units whose gradients some ranks may have, and that have not been reduced since.
        held: Units that stay gathered until the backward ends.
    """

    open_label: str | None = None
    units: "set[Unit]" = field(default_factory=set)
    in_backward: "set[Unit]" = field(default_factory=set)
    unreduced: "set[Unit]" = field(default_factory=set)
    held: "list[Unit]" = field(default_factory=list)
    num_passed: "Counter[Unit]" = field(default_factory=Counter)  # by forwards, whose backwards are to come

    has_gradient: bool = False  # whether a module behind another one, outside of regions, has taken a gradient

    def begin_forward(self) -> None:
        """The model starts a forward."""
        self.open_label, self.has_gradient = None, False

    def note_gradient(self) -> None:
        """A module takes an input that has a gradient."""
        self.has_gradient |= self.open_label is None

    def note_passed(self, units: "Sequence[Unit]") -> None:
        """A forward has passed a region of some units."""
        self.num_passed.update(units)

    def is_last(self, unit: "Unit") -> bool:
        """A backward has passed a region of a unit; whether it comes to no other one."""
        self.num_passed[unit] -= 1
        return self.num_passed[unit] <= 0

    def check_gather(self, unit: "Unit") -> None:
        """Raise where a rank gathers in a region what the others do not."""
        if self.open_label is not None and not unit.num_pins:
            raise StateError(
                f"{self.open_label}: in the block all ranks gather the parameters of the module that it names, but "
                f"this rank uses those of '{unit.label}', which ranks that do not run it know nothing of. Use them "
                "outside of the block, or pass a module that holds them, too."
            )

    def end_backward(self) -> None:
        """The backward has ended, or raised."""
        held, self.held = self.held, []
        for unit in held:
            unit.num_pins -= 1
        self.in_backward.clear()
        self.num_passed.clear()
