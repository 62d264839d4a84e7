"""The runtime of a model: when units gather and free, in forward and in backward."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from dshard.agreement.buffers import broadcast_buffers
from dshard.autograd.watches import InputWatches, in_backward
from dshard.collectives import BufferPool, num_noted, settle
from dshard.gradients.hook import hook_gradient
from dshard.gradients.needs import Needs
from dshard.gradients.reducer import Reducer
from dshard.gradients.reduction import GradReduction
from dshard.optimizer.step_hooks import watch_steps
from dshard.optimizer.swap import check_interrupted
from dshard.policies import Offload
from dshard.runtime.budget import agreed_free_bytes
from dshard.runtime.iteration import Iteration
from dshard.runtime.late import LateParameters
from dshard.runtime.lifetimes import fit_into, is_next, reshards
from dshard.runtime.running import Running
from dshard.tensor.meshes import group_of
from dshard.units.copy_stream import CopyStream
from dshard.units.schedule import Phase, Schedule
from dshard.units.settings import ModelSettings
from dshard.units.unit import Unit, groups_of
from dshard.units.virtual_ranks import VirtualRanks

__all__ = ["Runtime"]

_MAX_UNSETTLED = 1000  # collectives of forwards alone, after which ranks compare what they did


class Runtime(Running):
    """Shared by all units of a model.

    A unit whose module runs is in use from the start of that module's forward to its end. A unit that is touched
    outside of any forward of its own (another method, a loss) stays gathered until another such unit is touched. In
    backward a unit is freed when all its gradients have arrived or the backward has passed its modules, a frozen one
    when another unit is touched, and everything at the end. The units that the last step touched next are gathered
    ahead.
    """

    def __init__(self) -> None:
        super().__init__()
        watch_steps()
        self.root: nn.Module | None = None
        self.reducer = Reducer()
        self.pool = BufferPool()
        self.schedule: Schedule[Unit] = Schedule(is_free=attrgetter("is_whole"), size_of=attrgetter("param_bytes"))
        self.late = LateParameters()
        self.settings = ModelSettings()
        self.virtual: VirtualRanks | None = None
        self.split: Callable[[], None] | None = None  # forms units at the first use; set for a root that has just one
        self.on_training_forward: Callable[[], None] | None = None  # called when one starts, outside of graphs
        self.announce: Callable[[Phase], None] | None = None  # called ahead of each
        self.plan_report: object = None  # what watches the first steps under a plan
        self._needs = Needs()
        self._gathered: dict[Unit, None] = {}
        self._ahead: dict[Unit, None] = {}  # gathered ahead, and not touched since
        self._loose: Unit | None = None  # gathered outside of a forward
        self._frozen: Unit | None = None  # gathered in backward, takes no gradient
        self.backward_task = -1
        self.used_in_graph: tuple[int, Unit | None] = -1, None
        self._noted: dict[str, int] = {}  # of each group, entries of the ledger when the backward began
        self._end: Callable[[], _End | None] = lambda: None  # of the backward that runs
        self._nested: set[Unit] = set()  # whose first gradient came in a backward within the one that runs
        self.watches = InputWatches()
        self._iteration = Iteration()
        self._copy_streams: dict[tuple[Offload, bool], CopyStream] = {}

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
        self._is_mixed = None
        for param in unit.params:
            hook_gradient(param)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles take along: units and switches, nothing that is under way."""
        self.before_use()
        return {name: self.__dict__[name] for name in ("units", "root", "late", "settings")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.__dict__.update(state)
        self.change()

    def change(self, **changes: Any) -> None:
        """Choose otherwise, by the names of `ModelSettings`."""
        settings = self.settings = replace(self.settings, **changes)
        self.schedule.depth = 1 if settings.prefetch is None else settings.prefetch
        self.reducer.max_in_flight = settings.max_input_buffers or 1
        if settings.virtual_ranks is not None and self.virtual is None:
            self.virtual = VirtualRanks(settings.virtual_ranks)

    def copy_stream(self, offload: Offload, *, inward: bool) -> CopyStream:
        """For copies from a parameter's home to where it computes, or back; made at the first use."""
        known = self._copy_streams.get((offload, inward))
        if known is None:
            known = self._copy_streams[offload, inward] = CopyStream(offload)
        return known

    def before_use(self) -> None:
        """Form units, if that was left to the first use."""
        if self.split is not None:
            split, self.split = self.split, None
            split()

    def on_touch(self, unit: Unit) -> None:
        """Make room where a rule says so: `unit` is about to be used."""
        if in_backward():
            self.start_backward()
            self._needs.meet(unit, is_touched=True)
        self._make_way(unit)
        if in_backward():
            if self._frozen is not None and self._frozen is not unit:
                self.on_backward_done(self._frozen)
            self._frozen = None if unit.trainable else unit
        elif not unit.num_active and not unit.is_requested:
            if self._loose is not None and self._loose is not unit and not self._loose.num_active:
                self._loose.release()
            self._loose = unit

    def _make_way(self, unit: Unit) -> None:
        """Drop what was gathered ahead if another unit is used today: it would be one too many."""
        if self._ahead and unit not in self._ahead and not unit.is_gathered:
            for other in list(self._ahead):
                other.release()

    def on_touched(self, unit: Unit) -> None:
        """Note the use of `unit`, and start to gather what the last step used next."""
        self._ahead.pop(unit, None)
        if unit.is_whole and in_backward():
            self.start_backward()
        if unit.num_pins:
            return  # a scope that holds everything says nothing of an order
        expected = self.schedule.touch(unit)
        for other in [u for u in self._ahead if u not in expected]:
            other.release()  # the order is another one today
        for other in expected:
            if other.prefetch():
                self._ahead[other] = None

    def on_arrival(self, unit: Unit) -> None:
        """Gather a unit of which the first gradient has arrived, if other ranks may need it; or note that they did."""
        outer = self._end()
        if outer is not None and outer.task != self.backward_task:
            self._nested.add(unit)
        if self._needs.meet(unit, is_touched=False):
            self._make_way(unit)
            unit.copies.join(gathers=not self._needs.was_gathered(unit))

    def on_gather(self, unit: Unit) -> None:
        """Note that `unit` is gathered."""
        self._gathered[unit] = None
        if in_backward():
            self._needs.note_gathered(unit)

    def on_free(self, unit: Unit) -> None:
        """Note that `unit` is no longer gathered."""
        if in_backward():
            self._needs.note_gathered(unit)
        self._gathered.pop(unit, None)
        self._ahead.pop(unit, None)
        if self._loose is unit:
            self._loose = None

    def on_regrouped(self) -> None:
        """Units are others now: what was learned of them says nothing."""
        self.schedule.forget()
        self._needs.forget()

    def on_converted(self, unit: Unit) -> None:
        """Drop what a unit has begun to reduce of gradients that were dropped since: they would be as they were."""
        self.reducer.forget(unit)

    def on_read(self, reduction: GradReduction) -> None:
        """Have all of a unit leave with a gradient that is read outside of a backward, whose end would do it."""
        if self.backward_task == -1:
            self.reducer.on_read(reduction)

    def on_reduced(self, reduction: GradReduction) -> None:
        """Note that a reduction ended."""
        self.reducer.on_finished(reduction)

    def on_backward_done(self, unit: Unit) -> None:
        """Free a unit of which all gradients have arrived."""
        if unit.settings.reshard_after_backward:
            unit.free()

    def on_passed(self, unit: Unit) -> None:
        """Free a unit whose modules' inputs have their gradients, and let its own leave."""
        self.on_backward_done(unit)
        if not unit.is_unwatched:
            self.reducer.reduce(unit)

    def start_backward(self) -> Reducer:
        """Have `end_backward` called when the backward that is running ends, or the one that it is nested in."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self.backward_task):
            outer = self._end()
            if self.backward_task == -1 or outer is None:
                end = _End(self, task)
                self._forget_failed_backward()
                self._end = weakref.ref(end, partial(_on_backward_gone, weakref.ref(self)))
                if self.announce is not None:
                    self.announce(Phase.BACKWARD)
                self._begin(Phase.BACKWARD)
                self._iteration.begin_backward()
                self.reducer.begin_backward()
                self._needs.begin_backward()
                self._noted = {group.name: num_noted(group) for group in groups_of(self.units)}
                torch.autograd.Variable._execution_engine.queue_callback(end)
            elif task != outer.task:
                torch.autograd.Variable._execution_engine.queue_callback(self._end_nested)
            self.backward_task = task
        return self.reducer

    def _end_nested(self) -> None:
        """A backward within another one ends: that of a region that is checkpointed reentrantly, most likely."""
        nested, self._nested = sorted(self._nested, key=attrgetter("place")), set()
        for unit in nested:
            if unit.num_watched <= 0:
                self.on_backward_done(unit)
                self.reducer.reduce(unit)

    def _forget_failed_backward(self) -> None:
        self._nested.clear()
        if self.backward_task != -1:
            self.backward_task, self._frozen = -1, None
            self.watches.forget(self.units)
            self.reducer.forget_backward()
            if self.virtual is not None:
                self.virtual.has_failed = self.virtual.is_open

    def on_failed_backward(self) -> None:
        """A backward has ended with an exception: leave the step."""
        if self.backward_task != -1:
            self._iteration.leave("an exception in its backward", self.units)
            self._forget_failed_backward()

    def _begin(self, phase: Phase) -> None:
        """A phase starts: what was gathered ahead in the last one was not used in it."""
        for unit in list(self._ahead):
            unit.release()
        self.schedule.begin(phase)

    def end_backward(self) -> None:
        """Reduce what is incomplete and free everything."""
        self.backward_task, self._frozen = -1, None
        self.watches.forget(self.units)
        self.schedule.end()
        complete = self.reducer.complete
        try:
            self.reducer.end_backward()
            spared = self._needs.learn(complete)
            if spared:
                self.schedule.leave_out(Phase.BACKWARD, spared)
            # Only what this backward did: ranks may differ in how many backwards without communication they run.
            settle([group for group in groups_of(self.units) if num_noted(group) > self._noted.get(group.name, 0)])
            if self.reducer.check is not None:
                own = {p.shard_group.full_name: p.shard_group for unit in self.units for p in unit.params}
                self.reducer.check.settle(list(own.values()))
            self._iteration.end_backward()
        except BaseException as error:
            self._iteration.leave(error, self.units)
            self.reducer.forget_backward()
            raise
        finally:
            for unit in list(self._gathered):
                if unit.settings.reshard_after_backward:
                    unit.free()

    def reset(self) -> None:
        """Leave a step that an exception ended: free all copies, drop gradients that are under way."""
        self._iteration.leave("a call of reset_iter_state", self.units)
        self.backward_task, self._frozen = -1, None
        self.watches.forget(self.units)
        self.schedule.end()
        self.reducer.reset()
        self._set_running(0)
        for unit in self.units:
            unit.num_active = 0
            unit.free()

    def enter_forward(self, unit: Unit) -> None:
        """A module of `unit` starts its forward."""
        if self.root is not None and self.root in unit.modules and not unit.num_active and not in_backward():
            self._start_forward(self.root)
        check_interrupted(None, unit.params)
        unit.num_active += 1
        if unit.extensions is not None and not unit.extensions.are_met:
            unit.copies.gather()  # what its parameters are gathered as decides of what class their views are
            unit.copies.wait()

    def _start_forward(self, root: nn.Module) -> None:
        """The model starts a forward."""
        self._forget_failed_backward()
        phase = Phase.FORWARD if torch.is_grad_enabled() else Phase.EVAL
        if self.announce is not None:
            self.announce(phase)
        self._begin(phase)
        if self._iteration.begin(root, self.units):
            self._forget_order()
        check_interrupted(None, [param for unit in self.units for param in unit.params])
        self.pool.mark()
        settle(groups_of(self.units), _MAX_UNSETTLED)
        if torch.is_grad_enabled():
            if self.virtual is not None and root.training:
                self.virtual.check_open(type(root).__name__, "a forward that is to be trained")
            if self.on_training_forward is not None:
                self.on_training_forward()
            self.late.take_in()
            for sync in self.settings.buffers if root.training else ():
                broadcast_buffers(sync.modules, group_of(sync.mesh))
            if self.settings.memory_budget == "auto" and self.schedule.knows(Phase.BACKWARD):
                self.change(memory_budget=agreed_free_bytes(self.units))

    def _forget_order(self) -> None:
        """Begin as the first step did: how far the last one came, and what it left behind, may differ between ranks."""
        self.schedule.forget()
        self._needs.forget()
        self.watches.forget(self.units)
        self.reducer.forget_in_flight()
        for unit in self.units:
            unit.restart_deferral()
            unit.free()
        self.schedule.begin(Phase.FORWARD if torch.is_grad_enabled() else Phase.EVAL)

    def enter_graph(self, unit: Unit) -> None:
        """A graph uses `unit`: it is kept, if it is to stay until backward; else the next one's use frees it."""
        if not unit.num_active and self.settings.memory_budget is None and not reshards(unit, self.root, None):
            unit.is_requested = True

    def is_start_due(self) -> bool:
        """Whether the start of a training forward has more to do than to note it."""
        syncs = bool(self.settings.buffers) and self.root is not None and self.root.training
        return syncs or self.late.is_waiting() or self.announce is not None

    def exit_forward(self, unit: Unit, module: nn.Module) -> None:
        """A module of `unit` ended its forward, by a result or an exception."""
        unit.num_active = max(0, unit.num_active - 1)
        if in_backward():
            return  # a checkpoint's second forward: the backward that follows uses the unit at once
        is_root, budget = module is self.root, self.settings.memory_budget
        if is_root and not unit.num_active:
            self._iteration.end_forward(self.units)
        for candidate in list(self._gathered) if is_root else [unit]:
            if candidate.num_active or (candidate is unit and module is not unit.modules[-1]):
                continue
            if not torch.is_grad_enabled():
                candidate.release()
            elif reshards(candidate, self.root, budget) and not is_next(candidate, self.root, self.schedule):
                candidate.reshard()
        if isinstance(budget, int) and torch.is_grad_enabled():
            fit_into(budget, self._gathered, self._ahead, self.schedule)


def _on_backward_gone(runtime: "weakref.ref[Runtime]", _: object) -> None:
    """Autograd has let go of what it was to call at the end of a backward."""
    known = runtime()
    if known is not None:
        known.on_failed_backward()


class _End:
    """What autograd calls at the end of a backward; it drops this as soon as the backward has ended, or raised."""

    def __init__(self, runtime: Runtime, task: int) -> None:
        self._runtime, self.task = runtime, task

    def __call__(self) -> None:
        self._runtime.end_backward()
