"""One model while it runs: its forwards and backwards, parameters that come late, and graphs that are traced."""

import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from dshard import collectives
from dshard.agreement import broadcast_buffers
from dshard.autograd import in_backward
from dshard.collectives import GatherPlan, ReduceOp, ShardGroup, settle, settle_forward
from dshard.errors import DivergenceError, UnsupportedOpError
from dshard.gradients.backward import Backward, hook_gradient
from dshard.gradients.iteration import Iteration
from dshard.layout import BucketLayout, ShardLayout
from dshard.optimizer.steps import watch_steps
from dshard.optimizer.swap import check_interrupted
from dshard.runtime.late import LateParameters
from dshard.runtime.unsharding import Unshardings
from dshard.tensor.meshes import group_of
from dshard.tensor.subclass_shards import refuse_compiled_autograd
from dshard.units.context import ModelContext, Phase
from dshard.units.unit import Unit, groups_of

_SHARE = 0.8  # of the free memory: the rest is for what a later step needs more


def agreed_free_bytes(units: Sequence[Unit]) -> int:
    """Bytes for gathered copies on the rank that has the least: four fifths of what is free.

    Communicates:
        An all-reduce of 8 bytes.
    """
    param = next(p for unit in units for p in unit.params)
    num_sharing = int(os.environ.get("LOCAL_WORLD_SIZE", param.shard_group.world_size))
    mine = torch.tensor(
        [_free_bytes(param.offload.compute if param.offload is not None else param.device, num_sharing)],
        device=param.shard_group.device_type,
    )
    least = collectives.all_reduce(
        [mine], param.shard_group, ReduceOp.MIN, label="memory_budget", everywhere=True
    ).wait()[0]
    return int(least.item() * _SHARE)


def _free_bytes(device: torch.device, num_sharing: int) -> int:
    """Free memory of a device, with what its allocator holds unused; on the CPU, an equal part of the machine's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return (found[0] if found else 0) // num_sharing


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
        self._known_forwards: set[tuple[str, int]] = set()  # of which ranks have compared the collectives

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
            unit.reshard()
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

    def end_forward(self) -> None:
        """The outermost forward of the model's modules has ended: were its collectives those of the other ranks?"""
        context = self.context
        if in_backward() or context.regions.open_label is not None:
            return
        try:
            settle_forward(groups_of(context.units), self._known_forwards, is_evaluated=not torch.is_grad_enabled())
        except DivergenceError:
            self._known_forwards.clear()
            for unit in context.units:
                unit.reshard()
            raise

    def reset(self) -> None:
        """Free all copies after an exception, and drop gradients that are under way."""
        self._iteration.fail("had an exception, after which it called reset_iter_state")
        self.backward.reset()
        self.context.forwards.set_running(0)
        self.context.get(Unshardings).reset()
        for unit in self.context.units:
            unit.num_active = 0
            unit.reshard()


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


class _Places:
    """Which parameter a shard is that a graph was given."""

    by_shard: ClassVar[dict[int, tuple[weakref.ref[Unit], int]]] = {}

    @classmethod
    def find(cls, shard: Tensor) -> tuple[Unit, int] | None:
        """The unit, and the parameter's number in it; None for what belongs to no unit."""
        found = cls._look_up(shard)
        if found is None:
            cls.by_shard = {
                id(param.shard_storage.tensor): (weakref.ref(unit), slot)
                for unit in list(Unit.alive)
                for slot, param in enumerate(unit.params)
                if param.gather_source is unit  # else of one that the first use split
            }
            found = cls._look_up(shard)
        return found

    @classmethod
    def _look_up(cls, shard: Tensor) -> tuple[Unit, int] | None:
        entry = cls.by_shard.get(id(shard))
        if entry is None:
            return None
        reference, slot = entry
        unit = reference()
        if unit is None or slot >= len(unit.params):
            return None
        param = unit.params[slot]
        is_it = param.shard_storage.tensor is shard and param.gather_source is unit
        return (unit, slot) if is_it else None


def runs_forward() -> bool:
    """Whether the forward of a sharded model runs, or a part of one again, in this process."""
    return (in_backward() and torch.is_grad_enabled()) or any(unit.is_running for unit in tuple(Unit.alive))


def gather(
    shard: Tensor,
    shape: list[int],
    stride: list[int],
    dim: int,
    group: str,
    dtype: torch.dtype,
    device: torch.device,
    is_own: bool,
) -> Tensor:
    """The full value, on `device`, of a shard that a compiled graph was given.

    Args:
        shard: This rank's.
        shape: Of the full value.
        stride: Of it.
        dim: Along which it is cut; -1 where each rank holds it whole.
        group: Name of the ranks that hold it.
        dtype: Of the full value.
        device: Where it is used.
        is_own: Give a copy that the graph may write to.

    Communicates:
        As a touch of the parameter: at most one all-gather per bucket of its unit.
    """
    found = _Places.find(shard)
    if found is not None and found[0].model.split is not None:
        found[0].model.before_use()
        found = _Places.find(shard)
    if found is None:
        return _gathered_alone(shard.to(device), shape, stride, dim, group, dtype)
    unit, slot = found
    layout, model = unit.params[slot].shard_layout, unit.model
    if layout.shape != tuple(shape) or layout.dim != (dim if dim >= 0 else None):
        raise UnsupportedOpError(
            f"{unit.params[slot].name}: a compiled graph was given a view of a sharded tensor (shape {tuple(shape)}). "
            "Make the view within the compiled function, or use full_tensor()."
        )
    task = torch._C._current_graph_task_id()
    if task != -1:
        model.eviction.use_in_graph(unit, task)
    else:
        _check_dtype(unit, slot, dtype)
        if not unit.is_running:
            _check_start(unit)
        else:
            model.eviction.keep_for_backward(unit)
    full = unit.full_of_dtype(slot, dtype)
    is_the_shard = full.untyped_storage()._cdata == shard.untyped_storage()._cdata  # of one rank; ops return no inputs
    return full.clone() if is_own or is_the_shard else full


def _check_dtype(unit: Unit, slot: int, dtype: torch.dtype) -> None:
    """Raise where a parameter has another dtype than when the graph was traced: in a forward, or outside."""
    param = unit.params[slot]
    if param.dtype != dtype:
        raise UnsupportedOpError(
            f"{param.name}: under mixed precision a graph runs where it was traced, in a forward or outside, but it "
            f"was traced with {dtype}, and the parameter is {param.dtype} here. Compile a function of its own for "
            "each place."
        )


def _check_start(unit: Unit) -> None:
    """Raise for what is due at the start of an eager forward, in a forward that is one graph."""
    if not unit.model.get(Runtime).is_start_due():
        return
    raise UnsupportedOpError(
        f"{unit.label}: torch.compile of a function that calls the model runs the model's start within the graph, but "
        "this model has to broadcast its buffers, to take in parameters that it was given after fully_shard, or to "
        "tell ranks that have no more batches (dshard.join). Compile it in place, by model.compile(), which runs that "
        "ahead of the graph."
    )


def _gathered_alone(
    shard: Tensor, shape: list[int], stride: list[int], dim: int, group: str, dtype: torch.dtype
) -> Tensor:
    """The full value of what belongs to no unit."""
    if dim < 0:
        return shard.to(dtype, copy=True)
    shard_group = ShardGroup(collectives.group_named(group), shard.device)
    layout = ShardLayout(tuple(shape), dim, shard_group.num_ranks)
    plan = GatherPlan.of(BucketLayout.of([layout]), [stride], dtype, shard_group)
    return collectives.all_gather([shard], plan, shard_group, label="a tensor of a compiled graph").wait().tensors[0]
