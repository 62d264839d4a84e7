"""All reductions of a model: in which order they leave, and how many may be in flight."""

from operator import attrgetter
from typing import Protocol

from dshard.gradients.deferral import Deferral
from dshard.gradients.finite import FiniteCheck
from dshard.gradients.needs import flagged_anywhere
from dshard.gradients.of_unit import UnitGradients
from dshard.gradients.owed import check_same_gradients
from dshard.gradients.reduction import GradReduction
from dshard.units.context import ModelContext
from dshard.units.unit import Unit

_OWED = "all-reduce over replicas", "Call set_requires_all_reduce(True) ahead of the last backward of a step."
_NUMBER = attrgetter("unit.number")


class Reducer:
    """All reductions of a model: the gradients of each of its units, and what of them is in flight.

    Args:
        context: Of the model.
    """

    def __init__(self, context: ModelContext) -> None:
        self._context = context
        self.check: FiniteCheck | None = None
        self.units: dict[Unit, UnitGradients] = {}  # that have had a gradient
        self._in_flight: list[GradReduction] = []
        self._sent_before: list[GradReduction] = []  # that were in flight when the backward began
        self._incomplete: list[GradReduction] = []  # that left in the backward that is running
        self._slice: _OfSlices | None = None  # the last one to send, whose last slice may be in flight

    @property
    def max_in_flight(self) -> int:
        """Reduce-scatters whose send buffers may live at the same time, besides the one that fills.

        As many all-reduces between replicas may be in each of their steps.
        """
        return self._context.settings.max_input_buffers or 1

    def reduces_now(self, unit: Unit) -> bool:
        """Whether the backward that runs reduces the gradients of a unit, rather than add them up."""
        return self.of(unit).reduces_now

    def of(self, unit: Unit) -> UnitGradients:
        """The gradients of a unit."""
        known = self.units.get(unit)
        if known is None:
            known = self.units[unit] = UnitGradients(unit, self)
        return known

    @property
    def open(self) -> list[GradReduction]:
        """Reductions that have not left, or that owe their all-reduce."""
        return [reduction for own in self.units.values() for reduction in own.open.values()]

    def reduce(self, unit: Unit) -> None:
        """The backward has passed `unit`: its gradients leave."""
        self.of(unit).reduce()

    def join(self, unit: Unit) -> None:
        """The backward has passed the regions of `unit`: its gradients leave on all ranks, which some may not have."""
        own = self.of(unit)
        if own.reduces_now:
            self._context.regions.unreduced.discard(unit)
        own.reduce(joins=True)

    # What leaves.

    def launch(self, reduction: GradReduction, *, owes: bool, joins: bool) -> None:
        """Start a reduction; the arguments are those of `GradReduction.launch`."""
        if reduction.owes:
            reduction.rest()
        self._make_room()
        reduction.launch(owes=owes, joins=joins)
        self._in_flight.append(reduction)
        self.note_incomplete(reduction)

    def note_incomplete(self, reduction: GradReduction) -> None:
        """Note a reduction that has left if this rank has not used all of its parameters."""
        if not reduction.is_complete:
            self._incomplete.append(reduction)

    def _make_room(self) -> None:
        """Have the oldest in flight take their next step: at the launches of later ones, on all ranks alike.

        The first step is the reduce-scatter, which holds its send buffer; those of an all-reduce over replicas follow.
        """
        self.make_room_for_slice(None)
        age = len(self._in_flight)
        for reduction in self._in_flight[: max(0, age + 1 - self.max_in_flight)]:
            reduction.advance(age // self.max_in_flight)
            age -= 1

    def make_room_for_slice(self, reduction: "_OfSlices | None") -> None:
        """Have the slice that another weight has in flight arrive, before `reduction` sends one."""
        before, self._slice = self._slice, reduction
        if before is not None and before is not reduction:
            before.settle()

    def on_landed(self, reduction: GradReduction) -> None:
        """A reduction is in flight no more."""
        if reduction in self._in_flight:
            self._in_flight.remove(reduction)

    def launch_read(self, gradients: UnitGradients) -> None:
        """A gradient is read ahead of its reduction: those of its unit leave.

        If all-reduces are owed, those of the whole model: a rank's first gradient may be in another unit.
        """
        leaving = [gradients]
        if any(reduction.owes for reduction in gradients.open.values()):
            owing = sorted(self.units.values(), key=_NUMBER)
            leaving = [own for own in owing if any(reduction.owes for reduction in own.open.values())]
            owed = [own.open[key] for own in leaving for key in sorted(own.open) if own.open[key].owes]
            check_same_gradients([(reduction.group, reduction.presence()) for reduction in owed], *_OWED)
        else:
            gradients.check_deferred()
        for own in leaving:
            own.launch_read()
        self.end_together()
        self.adopt_missing()

    def reduce_all(self) -> None:
        """Reduce all gradients that were added up, on all ranks alike, and leave nothing in flight.

        Communicates:
            An all-reduce of a byte per unit for each group of ranks; and the reductions that any rank has begun.
        """
        self.begin_backward()  # forgets what was dropped
        units = sorted(self._context.units, key=attrgetter("number"))
        for unit in flagged_anywhere(units, lambda unit: bool(self.of(unit).open)):
            self.of(unit).launch_everywhere()
        for reduction in list(self._in_flight):
            reduction.finish()
        self.adopt_missing()
        self._clear()

    def end_together(self) -> None:
        """Wait for reductions that end by a collective of their own: now, step by step, on all ranks alike."""
        while ending := [r for r in self._in_flight if r.ends_together and not r.is_finished]:
            for reduction in ending:
                reduction.advance(reduction.num_waited + 1)

    def adopt_missing(self) -> None:
        """Hand out gradients of parameters that other ranks alone used."""
        incomplete, self._incomplete = self._incomplete, []
        for reduction in incomplete:
            reduction.adopt_missing()

    # Backwards.

    def begin_backward(self) -> None:
        """Forget what earlier micro-batches added up for gradients that are dropped by now, as by `zero_grad`."""
        for own in self.units.values():
            own.begin_backward()
        self._sent_before = list(self._in_flight)

    @property
    def complete(self) -> set[Unit]:
        """Units of which all gradients have arrived in the backward that is running."""
        return {unit for unit, own in self.units.items() if own.is_complete}

    def end_backward(self) -> None:
        """Reduce what has not left, unit by unit."""
        for own in sorted((own for own in self.units.values() if not own.has_left), key=_NUMBER):
            own.reduce()
        for own in self.units.values():
            own.end_backward()
        self.end_together()
        self.adopt_missing()
        for own in self.units.values():
            own.await_others()
        self._slice = None  # the last one may stay in flight until somebody reads the gradient

    def forget_backward(self) -> None:
        """Drop what a backward that raised has left behind; what earlier micro-batches added up stays."""
        if self.check is not None:
            self.check.forget()
        self._incomplete.clear()
        self._slice = None
        for own in self.units.values():
            own.forget_backward()
        for reduction in [r for r in self._in_flight if r not in self._sent_before]:
            self._in_flight.remove(reduction)
            reduction.take_back()

    # What is dropped.

    def reset(self) -> None:
        """Drop gradients that have not left yet."""
        for reduction in self.open:
            reduction.take_back()
        self._clear()

    def _clear(self) -> None:
        for own in self.units.values():
            own.clear()
        self._incomplete.clear()
        self._slice = None

    def forget_step(self) -> None:
        """Wait no more for what is in flight, ahead of what leaves later: peers may never have sent theirs."""
        self._in_flight.clear()
        self.forget_deferrals()

    def forget_deferrals(self) -> None:
        """Forget how many backwards make a step, and units that have nothing here."""
        flying = {reduction.owner() for reduction in self._in_flight}
        self.units = {unit: own for unit, own in self.units.items() if own.open or own.is_begun or own in flying}
        for own in self.units.values():
            own.deferral = Deferral()

    def forget(self, unit: Unit) -> None:
        """Drop what a unit has begun, whose gradients all are here or were dropped: it is to have other parameters."""
        if unit in self.units:
            self.units[unit].open.clear()


class _OfSlices(Protocol):
    """The reduction of a weight that travels in slices."""

    def settle(self) -> None:
        """Wait for what is in flight."""
