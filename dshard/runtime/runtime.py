"""The runtime of a model: when units gather and free, in forward and in backward."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dshard.collectives import BufferPool
from dshard.runtime.budget import agreed_free_bytes
from dshard.runtime.late import LateParameters
from dshard.runtime.reduction import GradReduction, Reducer, hook_gradient
from dshard.runtime.schedule import Phase, Schedule, to_drop
from dshard.runtime.standins import check_interrupted
from dshard.runtime.unit import Unit

__all__ = ["Runtime", "in_backward"]


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


class Runtime:
    """Shared by all units of a model.

    A unit whose module runs is in use from the start of that module's forward to its end. A unit that is touched
    outside of any forward of its own (another method, a loss) stays gathered until another such unit is touched. In
    backward a unit is freed when all its gradients have arrived, a frozen one when another unit is touched, and
    everything at the end. The units that the last step touched next are gathered ahead.
    """

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.root: nn.Module | None = None
        self.reducer = Reducer()
        self.pool = BufferPool()
        self.schedule: Schedule[Unit] = Schedule()
        self.late = LateParameters()
        self.memory_budget: int | Literal["auto"] | None = None  # bytes to keep between forward and backward
        self.reshard_after_backward = True
        self.split: Callable[[], None] | None = None  # forms units at the first use; set for a root that has just one
        self.sync_buffers: list[Callable[[], None]] = []  # at the start of each training forward
        self._gathered: dict[Unit, None] = {}
        self._ahead: dict[Unit, None] = {}  # gathered ahead, and not touched since
        self._loose: Unit | None = None  # gathered outside of a forward
        self._frozen: Unit | None = None  # gathered in backward, takes no gradient
        self.backward_task = -1
        self._backward_frame: FrameType | None = None
        self._leaf_watches: list[Any] = []

    @property
    def gathered_bytes(self) -> int:
        """Bytes of gathered copies that are alive, without padding."""
        return sum(unit.full_bytes for unit in self._gathered)

    def adopt(self, unit: Unit) -> None:
        """Take a unit in, from a runtime of its own or another's."""
        unit.observer = self
        unit.place = 1 + max((u.place for u in self.units), default=0)
        self.units.append(unit)
        if unit.is_gathered:
            self._gathered[unit] = None
        for param in unit.params:
            hook_gradient(param)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles take along: units and switches, nothing that is under way."""
        self.before_use()
        names = ("units", "root", "reshard_after_backward", "late", "memory_budget")
        state = {name: self.__dict__[name] for name in names}
        return {**state, "options": (self.reducer.options, self.schedule.depth)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.reducer.options, self.schedule.depth = state.pop("options")
        self.__dict__.update(state)

    def before_use(self) -> None:
        """Form units, if that was left to the first use."""
        if self.split is not None:
            split, self.split = self.split, None
            split()

    def on_touch(self, unit: Unit) -> None:
        """Make room where a rule says so: `unit` is about to be used."""
        if in_backward():
            self.start_backward()
            if self._frozen is not None and self._frozen is not unit:
                self._frozen.free()
            self._frozen = None if unit.trainable else unit
        elif not unit.num_active and not unit.is_requested:
            if self._loose is not None and self._loose is not unit and not self._loose.num_active:
                self._loose.free()
            self._loose = unit

    def on_touched(self, unit: Unit) -> None:
        """Note the use of `unit`, and start to gather what the last step used next."""
        self._ahead.pop(unit, None)
        if unit.num_pins:
            return  # a scope that holds everything says nothing of an order
        expected = self.schedule.touch(unit)
        for other in [u for u in self._ahead if u not in expected]:
            other.free()  # the order is another one today
        for other in expected:
            if other.prefetch():
                self._ahead[other] = None

    def on_gather(self, unit: Unit) -> None:
        """Note that `unit` is gathered."""
        self._gathered[unit] = None

    def on_free(self, unit: Unit) -> None:
        """Note that `unit` is no longer gathered."""
        self._gathered.pop(unit, None)
        self._ahead.pop(unit, None)
        if self._loose is unit:
            self._loose = None

    def on_reduced(self, reduction: GradReduction) -> None:
        """Note that a reduction ended."""
        self.reducer.on_finished(reduction)
        if self.backward_task == -1:  # by a read outside of a backward, whose end would do it
            self.reducer.adopt_missing()

    def on_backward_done(self, unit: Unit) -> None:
        """Free a unit of which all gradients have arrived."""
        if self.reshard_after_backward:
            unit.free()

    def on_passed(self, unit: Unit) -> None:
        """Free a unit whose modules' inputs have their gradients, and let its own leave."""
        self.on_backward_done(unit)
        if not unit.is_unwatched:
            self.reducer.reduce(unit)

    def watch_inputs(self, unit: Unit, inputs: Any) -> None:
        """Notice when the backward has passed the module of a unit: when an input of it has its gradient."""
        if not torch.is_grad_enabled() or (in_backward() and unit.num_watched):
            return  # the latter: a checkpoint runs a forward again that is watched already
        value = _first_with_gradient(inputs)
        if value is None:
            unit.is_unwatched = True
            return
        handle = value.register_hook(partial(_passed, unit))
        unit.num_watched += 1
        if value.is_leaf:  # else the hook goes with the graph
            self._leaf_watches.append(handle)
            unit.is_unwatched = True  # autograd finishes leaves first, ahead of the weights' gradients

    def _forget_watches(self) -> None:
        for handle in self._leaf_watches:
            handle.remove()
        self._leaf_watches.clear()
        for unit in self.units:
            unit.num_watched, unit.is_unwatched = 0, False

    def start_backward(self) -> Reducer:
        """Have `end_backward` called when the backward that is running ends."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self.backward_task):
            is_nested = self.backward_task != -1 and self._is_backward_running()
            if not is_nested:
                self._forget_failed_backward()
                self._backward_frame = _frame_of_backward()
                self._begin(Phase.BACKWARD)
            self.backward_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        return self.reducer

    def _is_backward_running(self) -> bool:
        """Whether the last backward that began has neither ended nor raised; the benefit of the doubt is a yes."""
        return self._backward_frame is None or _is_running(self._backward_frame)

    def _forget_failed_backward(self) -> None:
        if self.backward_task != -1:
            self.backward_task, self._backward_frame, self._frozen = -1, None, None
            self._forget_watches()
            self.reducer.forget_backward()

    def _begin(self, phase: Phase) -> None:
        """A phase starts: what was gathered ahead in the last one was not used in it."""
        for unit in list(self._ahead):
            unit.free()
        self.schedule.begin(phase)

    def end_backward(self) -> None:
        """Reduce what is incomplete and free everything."""
        self.backward_task, self._backward_frame = -1, None
        self._frozen = None
        self._forget_watches()
        self.schedule.end()
        self.reducer.end_backward()
        if self.reshard_after_backward:
            for unit in list(self._gathered):
                unit.free()

    def reset(self) -> None:
        """Forget a forward or backward that an exception ended: free all copies, drop gradients that are under way."""
        self.backward_task, self._backward_frame = -1, None
        self._frozen = None
        self._forget_watches()
        self.schedule.end()
        self.reducer.reset()
        for unit in self.units:
            unit.num_active = 0
            unit.free()

    def enter_forward(self, unit: Unit) -> None:
        """A module of `unit` starts its forward."""
        check_interrupted(None, unit.params)
        self.before_use()
        if self.root is not None and self.root in unit.modules and not unit.num_active and not in_backward():
            self._start_forward(self.root)
        unit.num_active += 1

    def _start_forward(self, root: nn.Module) -> None:
        """The model starts a forward."""
        self._forget_failed_backward()
        self._begin(Phase.FORWARD if torch.is_grad_enabled() else Phase.EVAL)
        self.pool.mark()
        if torch.is_grad_enabled():
            self.late.take_in()
            for sync in self.sync_buffers if root.training else ():
                sync()
            if self.memory_budget == "auto" and self.schedule.knows(Phase.BACKWARD):
                self.memory_budget = agreed_free_bytes(self.units)

    def exit_forward(self, unit: Unit, module: nn.Module) -> None:
        """A module of `unit` ended its forward, by a result or an exception."""
        unit.num_active = max(0, unit.num_active - 1)
        if in_backward():
            return  # a checkpoint's second forward: the backward that follows uses the unit at once
        is_root = module is self.root
        for candidate in list(self._gathered) if is_root else [unit]:
            if candidate.num_active or (candidate is unit and module is not unit.modules[-1]):
                continue
            if not torch.is_grad_enabled() or self.reshards(candidate):
                candidate.free()
        if isinstance(self.memory_budget, int) and torch.is_grad_enabled():
            self._fit_into(self.memory_budget)

    def _fit_into(self, budget_bytes: int) -> None:
        """Drop the copies that the backward uses last, until the others fit into the budget."""
        kept = [
            (unit, unit.full_bytes, self.schedule.distance(unit))
            for unit in self._gathered
            if self._is_budgeted(unit) and not unit.num_active and unit not in self._ahead
        ]
        for unit in to_drop(kept, budget_bytes):
            unit.free()

    def _is_budgeted(self, unit: Unit) -> bool:
        return self.memory_budget is not None and unit.reshard_after_forward is None and not unit.is_requested

    def reshards(self, unit: Unit) -> bool:
        """Whether `unit` is freed when its forward ends; by default all but the root's own unit are.

        With a memory budget, that decides instead for units that were not told.
        """
        if unit.reshard_after_forward is not None:
            return unit.reshard_after_forward
        if self.memory_budget is not None and self.memory_budget != "auto":
            return False
        return self.root not in unit.modules


def _first_with_gradient(value: Any) -> Tensor | None:
    """The first tensor in some arguments, however nested, that takes a gradient."""
    if isinstance(value, Tensor):
        return value if value.requires_grad else None
    if is_dataclass(value) and not isinstance(value, type):
        value = vars(value) if hasattr(value, "__dict__") else {}
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return next((found for item in items if (found := _first_with_gradient(item)) is not None), None)


def _find_frame(is_it: Callable[[FrameType], bool]) -> FrameType | None:
    """The innermost such frame of any thread: on a GPU, backward runs on a thread of its own."""
    frames, current = sys._current_frames(), None
    try:
        for current in frames.values():
            while current is not None:
                if is_it(current):
                    return current
                current = current.f_back
    finally:
        del frames, current  # one of them is this call's own: a cycle
    return None


def _frame_of_backward() -> FrameType | None:
    """The frame in which autograd was started."""
    return _find_frame(lambda frame: frame.f_code.co_name == "_engine_run_backward")


def _is_running(frame: FrameType) -> bool:
    return _find_frame(lambda other: other is frame) is not None


def _passed(unit: Unit, grad: Tensor) -> None:
    unit.num_watched -= 1
    if unit.num_watched <= 0:
        unit.observer.on_passed(unit)
