"""The backward of a model that runs: noticed where it uses a unit first, and ended when autograd ends it."""

import threading
import weakref
from collections.abc import Callable
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from dshard.collectives import num_noted, settle
from dshard.gradients.iteration import Iteration
from dshard.gradients.needs import Needs
from dshard.gradients.of_unit import UnitGradients
from dshard.gradients.reducer import Reducer
from dshard.gradients.watches import InputWatches
from dshard.tensor import ShardedTensor
from dshard.units.context import ModelContext
from dshard.units.schedule import Phase
from dshard.units.unit import Unit, groups_of


class Backward:
    """Begins and ends the backwards of a model, and tells what has passed in them.

    Args:
        context: Of the model.
    """

    def __init__(self, context: ModelContext) -> None:
        self._context = context
        self.reducer = context.get(Reducer)
        self.iteration = context.get(Iteration)
        self.needs = Needs(context.eviction)
        self.watches = InputWatches(self._on_passed, self._on_repeated)
        self._end: Callable[[], _End | None] = lambda: None  # of the backward that runs
        self._nested: set[Unit] = set()  # whose first gradient came in a backward within the one that runs
        self._noted: dict[str, int] = {}  # of each group, entries of the ledger when the backward began
        self._thread = 0  # in which forwards begin
        context.on_backward, context.on_outside = self.notice, self.check_failed

    def notice(self) -> None:
        """Have `end` called when the backward that is running ends, or the one that it is nested in."""
        context, task = self._context, torch._C._current_graph_task_id()
        if task in (-1, context.backward_task):
            return
        outer = self._end()
        if context.backward_task == -1 or outer is None:
            end = _End(self, task)
            self.forget_failed()
            self._end = weakref.ref(end, partial(_on_gone, weakref.ref(self)))
            if context.announce is not None:
                context.announce(Phase.BACKWARD)
            context.begin(Phase.BACKWARD)
            context.eviction.begin_backward()
            self.iteration.begin_backward()
            self.reducer.begin_backward()
            self.needs.begin_backward()
            self._noted = {group.name: num_noted(group) for group in groups_of(context.units)}
            torch.autograd.Variable._execution_engine.queue_callback(end)
        elif task != outer.task:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_nested)
        context.backward_task = task

    def receive(self, unit: Unit, slot: int, grad: Tensor, *, may_wait: bool = False) -> ShardedTensor:
        """Take the full gradient of a parameter; gives the reduced one, which may still be in flight.

        Args:
            unit: The parameter's.
            slot: Its number there.
            grad: The gradient.
            may_wait: Whether nobody else can write to `grad`, so that it may be packed later.
        """
        own, check = self.reducer.units.get(unit), self.reducer.check
        if own is None:
            own = self.reducer.units[unit] = UnitGradients(unit, self.reducer)
        if not own.is_begun:
            own.begin()
            self._on_first(unit)
        if check is not None:
            check.note(unit.params[slot].name, grad)
        return own.receive(slot, grad, may_wait=may_wait)

    def _on_first(self, unit: Unit) -> None:
        """Gather a unit of which the first gradient has arrived, if other ranks may need it; or note that they did."""
        if unit in self._context.regions.in_backward:
            return  # all ranks have gathered it
        outer = self._end()
        if outer is not None and outer.task != self._context.backward_task:
            self._nested.add(unit)
        if self.needs.meet(unit):
            self._context.eviction.make_way(unit)
            unit.copies.join(gathers=not self.needs.was_gathered(unit))

    def _on_repeated(self, unit: Unit) -> None:
        """Free a unit that will be gathered anew for another forward of its modules, unless ranks differ in them."""
        if unit not in self._context.regions.units:
            self._context.eviction.after_backward(unit)

    def _on_passed(self, unit: Unit, is_unwatched: bool) -> None:
        """Free a unit whose modules' inputs have their gradients, and let its own leave, unless some may come still."""
        if unit in self._context.regions.units:
            return  # the end of its region does so on all ranks, or that of the backward
        self._context.eviction.after_backward(unit)
        if not is_unwatched:
            self.reducer.reduce(unit)

    def _end_nested(self) -> None:
        """A backward within another one ends: that of a region that is checkpointed reentrantly, most likely."""
        nested, self._nested = sorted(self._nested, key=attrgetter("number")), set()
        for unit in nested:
            if not self.watches.is_watched(unit) and unit not in self._context.regions.units:
                self._context.eviction.after_backward(unit)
                self.reducer.reduce(unit)

    def _leave(self) -> None:
        """No backward runs any more."""
        self._context.backward_task = -1
        self._context.eviction.forget_backward()
        self.watches.forget()

    def end(self) -> None:
        """Reduce what is incomplete and free everything."""
        context, units = self._context, self._context.units
        self._leave()
        context.schedule.end()
        complete = self.reducer.complete
        try:
            for unit in sorted(context.regions.unreduced, key=attrgetter("number")):
                self.reducer.join(unit)
            context.regions.end_backward()
            self.reducer.end_backward()
            spared = self.needs.learn(complete, self.reducer.reduces_now)
            if spared:
                context.schedule.leave_out(Phase.BACKWARD, spared)
            # Only what this backward did: ranks may differ in how many backwards without communication they run.
            settle([group for group in groups_of(units) if num_noted(group) > self._noted.get(group.name, 0)])
            if self.reducer.check is not None:
                own = {p.shard_group.full_name: p.shard_group for unit in units for p in unit.params}
                self.reducer.check.settle(list(own.values()))
            self.iteration.end_backward()
        except BaseException as error:
            self.iteration.leave(error)
            self.reducer.forget_backward()
            raise
        finally:
            context.eviction.end_backward()

    def forget_failed(self) -> None:
        """Forget a backward that has not come to its end."""
        self._nested.clear()
        if self._context.backward_task != -1:
            self._leave()
            self._context.regions.end_backward()
            self.reducer.forget_backward()

    def begin_forward(self) -> None:
        """A forward begins, in the thread in which the program trains."""
        self._thread = threading.get_ident()
        self.check_failed()

    def check_failed(self) -> None:
        """Leave the step of a backward that has raised, if one has that nobody was told of.

        On an accelerator autograd runs it on a thread of its own, and may let go of it after the program has gone on.
        """
        is_outside = torch._C._current_graph_task_id() == -1
        if self._context.backward_task != -1 and is_outside and self._thread == threading.get_ident():
            self.on_failed()

    def on_gone(self) -> None:
        """Autograd has let go of what it was to call at the end: at once, or on its own thread at any time later."""
        if self._thread in (0, threading.get_ident()):
            self.on_failed()

    def on_failed(self) -> None:
        """A backward has ended with an exception: leave the step."""
        if self._context.backward_task != -1:
            self.iteration.leave("an exception in its backward")
            self.forget_failed()

    def forget(self) -> None:
        """Begin as the first step did: how far the last one came may differ between ranks."""
        self.needs.forget()
        self.watches.forget()
        self.reducer.forget_step()

    def on_regrouped(self) -> None:
        """Units are others now: what was learned of them says nothing."""
        self._context.schedule.forget()
        self.needs.forget()
        self.reducer.forget_deferrals()

    def reset(self) -> None:
        """Leave a step that an exception ended; gradients that are under way are dropped."""
        self._leave()
        self._context.schedule.end()
        self.reducer.reset()


def _on_gone(backward: "weakref.ref[Backward]", _: object) -> None:
    """Autograd has let go of what it was to call at the end of a backward."""
    known = backward()
    if known is not None:
        known.on_gone()


class _End:
    """What autograd calls at the end of a backward; it drops this as soon as the backward has ended, or raised."""

    def __init__(self, backward: Backward, task: int) -> None:
        self._backward, self.task = backward, task

    def __call__(self) -> None:
        self._backward.end()
