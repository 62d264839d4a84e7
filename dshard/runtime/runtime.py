"""The runtime of a model: what its forwards begin and end."""

from collections.abc import Callable

import torch
from torch import nn

from dshard.agreement import broadcast_buffers
from dshard.autograd import in_backward
from dshard.collectives import settle
from dshard.gradients.backward import Backward
from dshard.gradients.hook import hook_gradient
from dshard.gradients.iteration import Iteration
from dshard.optimizer.steps import check_interrupted, watch_steps
from dshard.runtime.budget import agreed_free_bytes
from dshard.runtime.late import LateParameters
from dshard.tensor.meshes import group_of
from dshard.tensor.subclass_shards import refuse_compiled_autograd
from dshard.units.context import ModelContext
from dshard.units.schedule import Phase
from dshard.units.unit import Unit, groups_of

_MAX_UNSETTLED = 1000  # collectives of forwards alone, after which ranks compare what they did


class Runtime:
    """What a model does at the start and the end of its forwards, and of those of its modules.

    Args:
        context: Of the model.
    """

    def __init__(self, context: ModelContext) -> None:
        watch_steps()
        self.context = context
        self.backward = context.get(Backward)
        self.late = context.get(LateParameters)
        self.on_training_forward: Callable[[], None] | None = None  # called when one starts, outside of graphs
        self.plan_report: object = None  # what watches the first steps under a plan
        self._iteration = context.get(Iteration)

    def adopt(self, unit: Unit) -> None:
        """Take a unit in, from a model of its own or another's."""
        self.context.adopt(unit)
        for param in unit.params:
            hook_gradient(param)

    def enter_forward(self, unit: Unit) -> None:
        """A module of `unit` starts its forward."""
        root = self.context.root
        if root is not None and root in unit.modules and not unit.num_active and not in_backward():
            self._start_forward(root)
        check_interrupted(None, unit.params)
        unit.num_active += 1
        if unit.extensions is not None and not unit.extensions.are_met:
            unit.copies.gather()  # what its parameters are gathered as decides of what class their views are
            unit.copies.wait()

    def _start_forward(self, root: nn.Module) -> None:
        """The model starts a forward."""
        context, is_recorded = self.context, torch.is_grad_enabled()
        refuse_compiled_autograd(type(root).__name__)
        self.backward.begin_forward()
        context.regions.begin_forward()
        phase = Phase.FORWARD if is_recorded else Phase.EVAL
        if context.announce is not None:
            context.announce(phase)
        context.begin(phase)
        if self._iteration.begin(root):
            self._forget_order(phase)
        check_interrupted(None, [param for unit in context.units for param in unit.params])
        context.pool.mark()
        settle(groups_of(context.units), _MAX_UNSETTLED)
        if not is_recorded:
            return
        if self.on_training_forward is not None:
            self.on_training_forward()
        self.late.take_in()
        for sync in context.settings.buffers if root.training else ():
            broadcast_buffers(sync.modules, group_of(sync.mesh))
        if context.settings.memory_budget == "auto" and context.schedule.knows(Phase.BACKWARD):
            context.change(memory_budget=agreed_free_bytes(context.units))

    def _forget_order(self, phase: Phase) -> None:
        """Begin as the first step did: how far the last one came, and what it left behind, may differ between ranks."""
        self.context.schedule.forget()
        self.backward.forget()
        for unit in self.context.units:
            unit.free()
        self.context.schedule.begin(phase)

    def is_start_due(self) -> bool:
        """Whether the start of a training forward has more to do than to note it."""
        context = self.context
        syncs = bool(context.settings.buffers) and context.root is not None and context.root.training
        return syncs or self.late.is_waiting() or context.announce is not None

    def exit_forward(self, unit: Unit, module: nn.Module) -> None:
        """A module of `unit` ended its forward, by a result or an exception."""
        unit.num_active = max(0, unit.num_active - 1)
        if in_backward():
            return  # a checkpoint's second forward: the backward that follows uses the unit at once
        if module is self.context.root and not unit.num_active:
            self._iteration.end_forward()
        self.context.eviction.after_forward(unit, module)

    def reset(self) -> None:
        """Leave a step that an exception ended: free all copies, drop gradients that are under way."""
        self._iteration.leave("a call of reset_iter_state")
        self.backward.reset()
        self.context.forwards.set_running(0)
        for unit in self.context.units:
            unit.num_active = 0
            unit.free()


def current_phase() -> str:
    """What the sharded model does that began last, in lower case; "" where none does anything.

    A model whose forward has raised is held to be in it until its next one.
    """
    if in_backward():  # of which the end is no part of the schedule
        return "backward"
    schedules = (unit.model.schedule for unit in Unit.alive if unit.model.schedule.phase is not None)
    last = max(schedules, key=lambda schedule: schedule.begun_s, default=None)
    return last.phase.name.lower() if last is not None and last.phase is not None else ""


def units_of(module: nn.Module) -> list[Unit]:
    """Units whose modules are `module` or lie inside of it, in order of registration."""
    found: dict[Unit, None] = {}
    for child in module.modules():
        found.update(dict.fromkeys(child.__dict__.get("_dshard_units", ())))
    return list(found)


def context_of(module: nn.Module) -> ModelContext:
    """What the units of a sharded module's model share; forms units, if that was left to the first use."""
    context: ModelContext = module.__dict__["_dshard_units"][0].model
    context.before_use()
    return context


def runtime_of(module: nn.Module) -> Runtime:
    """The runtime of a sharded module's model; forms units, if that was left to the first use."""
    return context_of(module).get(Runtime)


def own_units(module: nn.Module) -> list[Unit]:
    """What the call of `fully_shard` on this very module took: one unit, or those that the first use formed of it."""
    context_of(module)
    return list(dict.fromkeys([*module.__dict__["_dshard_units"], *module.__dict__.get("_dshard_formed", ())]))
