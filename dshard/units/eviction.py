"""Which gathered copies of a model are there, and when each of them goes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from dshard.autograd import in_backward
from dshard.units.schedule import Phase, to_drop

if TYPE_CHECKING:
    from dshard.units.context import ModelContext
    from dshard.units.unit import Unit


class Eviction:
    """Frees the units of a model: nothing else does, but programs that ask for it.

    A unit whose module runs is in use from the start of that module's forward to its end; then it goes, unless its
    settings, the budget, or the order of the last backward say that it stays; without gradients, unless its settings or
    the budget do: decoding token by token would gather it each time. A unit that is touched outside of any forward of
    its own (another method, a loss) stays until another such unit is touched. In backward a unit goes when all its
    gradients have arrived or the backward has passed its modules, a frozen one when another is touched, and everything
    at the end. What was gathered ahead and is not what comes next goes at once.

    Args:
        context: Of the model.
    """

    def __init__(self, context: "ModelContext") -> None:
        self._context = context
        self.gathered: dict[Unit, None] = {}  # fresh or not
        self._ahead: dict[Unit, None] = {}  # of those, gathered ahead, and not touched since
        self._loose: Unit | None = None  # gathered outside of a forward
        self._frozen: Unit | None = None  # gathered in backward, takes no gradient
        self._in_graph: tuple[int, Unit | None] = -1, None  # the last one that the backward of a graph used, and which
        self.touched: set[Unit] = set()  # by operations of this rank in the backward that runs
        self.seen: set[Unit] = set()  # gathered at some time in it, ahead of its use maybe, or left from the forward

    @property
    def num_bytes(self) -> int:
        """Bytes of gathered copies that are alive, without padding."""
        return sum(unit.full_bytes for unit in self.gathered)

    def before_touch(self, unit: "Unit") -> None:
        """Make room where a rule says so: `unit` is used for the first time in this phase, or since it was gathered."""
        if unit.num_pins and self.is_in_region(unit):
            return  # other ranks do not use it
        if in_backward():
            self._context.on_backward()
            self.touched.add(unit)
            self.make_way(unit)
            if self._frozen is not None and self._frozen is not unit:
                self.after_backward(self._frozen)
            self._frozen = None if unit.trainable else unit
            return
        self.make_way(unit)
        if not unit.num_active and not unit.is_requested:
            if self._loose is not None and self._loose is not unit and not self._loose.num_active:
                self._loose.release()
            self._loose = unit

    def make_way(self, unit: "Unit") -> None:
        """Drop what was gathered ahead if another unit is used today: it would be one too many."""
        if self._ahead and unit not in self._ahead and not unit.is_gathered:
            for other in list(self._ahead):
                other.release()

    def after_touch(self, unit: "Unit") -> None:
        """Note the use of `unit`, and start to gather what the last step used next."""
        self._ahead.pop(unit, None)
        if unit.is_whole and in_backward():
            self._context.on_backward()
        if unit.num_pins:
            return  # a scope that holds everything says nothing of an order
        expected = self._context.schedule.touch(unit)
        for other in [u for u in self._ahead if u not in expected]:
            other.release()  # the order is another one today
        for other in expected:
            if other.prefetch():
                self._ahead[other] = None

    def forget_touch(self, unit: "Unit") -> None:
        """A region has ended, in which some ranks have touched `unit`: to all of them its next use is the first one."""
        self._ahead.pop(unit, None)
        unit.copies.forget_touch()

    def note_gather(self, unit: "Unit") -> None:
        """`unit` starts to gather; a backward that has raised unnoticed is left first: this is of its step no more."""
        if self._context.backward_task != -1:
            self._context.on_outside()
        self.gathered[unit] = None
        if in_backward():
            self.seen.add(unit)

    def note_free(self, unit: "Unit") -> None:
        """`unit` has dropped its copies."""
        if in_backward():
            self.seen.add(unit)
        self.gathered.pop(unit, None)
        self._ahead.pop(unit, None)
        if self._loose is unit:
            self._loose = None

    def begin(self) -> None:
        """A phase starts: what was gathered ahead in the last one was not used in it."""
        for unit in list(self._ahead):
            unit.release()

    def begin_backward(self) -> None:
        """A backward starts."""
        self.touched.clear()
        self.seen.clear()

    def after_forward(self, unit: "Unit", module: nn.Module) -> None:
        """A module of `unit` ended its forward, by a result or an exception; the root's ends all others' too."""
        context = self._context
        for candidate in list(self.gathered) if module is context.root else [unit]:
            if candidate.num_active or (candidate is unit and module is not unit.modules[-1]):
                continue
            if not torch.is_grad_enabled():
                if not self._outlives_evaluation(candidate):
                    candidate.release()
            elif self.reshards(candidate) and not self._is_next(candidate):
                candidate.reshard()
        if isinstance(context.settings.memory_budget, int):
            self._fit_into(context.settings.memory_budget)

    def is_in_region(self, unit: "Unit") -> bool:
        """Whether what happens to `unit` now is a matter of its region, in which ranks may differ."""
        regions = self._context.regions
        return regions.open_label is not None or (in_backward() and unit in regions.in_backward)

    def after_region(self, units: "Sequence[Unit]") -> None:
        """The forward has passed a region of some units, on all ranks."""
        for unit in units:
            if not torch.is_grad_enabled():
                if not self._outlives_evaluation(unit):
                    unit.release()
            elif self.reshards(unit):
                unit.reshard()

    def _outlives_evaluation(self, unit: "Unit") -> bool:
        """Whether `unit` is kept by a forward without gradients, for the next one: until it is written, or trained.

        So is what takes no memory of this rank's. What stays with the root is, if all else is: no backward follows that
        would use it at once.
        """
        told = unit.settings.reshard_after_forward
        if told is False or type(told) is int:
            return told is False
        has_budget = isinstance(self._context.settings.memory_budget, int)
        if unit.is_once_per_host and not has_budget:
            return True
        if told is not None:
            return False
        if has_budget:
            return True
        if self.reshards(unit):
            return False
        others = [other.settings.reshard_after_forward for other in self._context.units if other is not unit]
        return bool(others) and all(other is False for other in others)

    def reshards(self, unit: "Unit") -> bool:
        """Whether `unit` is freed when its forward ends; by default all but the root's own unit are.

        With a memory budget, that decides instead for units that were not told.
        """
        if unit.settings.reshard_after_forward is not None:
            return bool(unit.settings.reshard_after_forward)
        if self._context.settings.memory_budget not in (None, "auto"):
            return False
        return self._context.root not in unit.modules

    def _is_next(self, unit: "Unit") -> bool:
        """Whether a unit that was formed for the root alone is the one that the last backward began with.

        It would be gathered again at once: the most bytes that are there at one time are the same.
        """
        schedule, root = self._context.schedule, self._context.root
        if unit.settings.reshard_after_forward is not None or not schedule.knows(Phase.BACKWARD):
            return False
        formed = root.__dict__.get("_dshard_formed", ()) if root is not None else ()
        return schedule.distance(unit) == 0 and unit in formed

    def _fit_into(self, budget_bytes: int) -> None:
        """Drop the copies that are used last, of units that were not told, until the others fit.

        The use that counts is that of the backward; in evaluation that of this forward, or of the next one.
        """
        schedule = self._context.schedule
        known = schedule.in_forwards() if schedule.phase is Phase.EVAL else None
        kept = [
            (unit, unit.full_bytes, schedule.distance(unit) if known is None else known.get(unit, 2 * len(known)))
            for unit in self.gathered
            if unit.settings.reshard_after_forward is None and not unit.is_requested
            if not unit.num_active and unit not in self._ahead
        ]
        for unit in to_drop(kept, budget_bytes):
            unit.free()

    def keep_for_backward(self, unit: "Unit") -> None:
        """A graph uses `unit`: it is kept, if it is to stay until backward; else the next one's use frees it."""
        if not unit.num_active and self._context.settings.memory_budget is None and not self.reshards(unit):
            unit.is_requested = True

    def use_in_graph(self, unit: "Unit", task: int) -> None:
        """The backward of a compiled graph, autograd's number `task`, uses `unit`: the one before it may go.

        Within a graph no gradient tells that backward has passed a unit: all of them come when the graph ends.
        """
        last_task, last = self._in_graph
        if last is not None and last is not unit and last_task == task and not last.num_active:
            self.after_backward(last)
        self._in_graph = task, unit

    def after_backward(self, unit: "Unit") -> None:
        """The backward that is running has no further use for `unit`."""
        if unit.settings.reshard_after_backward:
            unit.free()

    def forget_backward(self) -> None:
        """The backward is over, by its end or an exception."""
        self._frozen = None

    def end_backward(self) -> None:
        """The backward has ended: nothing stays but what is to."""
        for unit in list(self.gathered):
            self.after_backward(unit)
