"""The runtime of a model: when units gather and free, in forward and in backward."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from dshard.collectives import BufferPool
from dshard.runtime.reduction import GradReduction, Reducer, route_gradient
from dshard.runtime.replace import ReplacedParameter
from dshard.runtime.standins import check_interrupted
from dshard.runtime.unit import Unit
from dshard.tensor import ShardedTensor

__all__ = ["Runtime", "in_backward"]


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


class Runtime:
    """Shared by all units of a model.

    A unit whose module runs is in use from the start of that module's forward to its end. A unit that is touched
    outside of any forward of its own (another method, a loss) stays gathered until another such unit is touched. In
    backward a unit is freed when all its gradients have arrived, a frozen one when another unit is touched, and
    everything at the end.
    """

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.root: nn.Module | None = None
        self.reducer = Reducer()
        self.pool = BufferPool()
        self.reshard_after_backward = True
        self.split: Callable[[], None] | None = None  # forms units at the first use; set for a root that has just one
        self._gathered: dict[Unit, None] = {}
        self._loose: Unit | None = None  # gathered outside of a forward
        self._frozen: Unit | None = None  # gathered in backward, takes no gradient
        self._backward_task = -1
        self._leaf_watches: list[Any] = []
        self.sync_buffers: list[Callable[[], None]] = []  # at the start of each training forward
        self._num_registrations = -1
        self._take_in: Callable[[list[tuple[str, nn.Parameter]]], None] | None = None
        self._tops: list[nn.Module] = []
        self._known_plain: dict[int, nn.Parameter] = {}

    @property
    def gathered_bytes(self) -> int:
        """Bytes of gathered copies that are alive, without padding."""
        return sum(unit.full_bytes for unit in self._gathered)

    def adopt(self, unit: Unit) -> None:
        """Take a unit in, from a runtime of its own or another's."""
        unit.observer = self
        self.units.append(unit)
        if unit.is_gathered:
            self._gathered[unit] = None
        for param in unit.params:
            hook_gradient(param)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles take along: units and switches, nothing that is under way."""
        self.before_use()
        state = {name: self.__dict__[name] for name in ("units", "root", "reshard_after_backward", "_tops")}
        return {**state, "reducer": self.reducer.options, "known": list(self._known_plain.values())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self._known_plain = {id(p): p for p in state.pop("known")}
        self.reducer.options = state.pop("reducer")
        self.__dict__.update(state)

    def before_use(self) -> None:
        """Form units, if that was left to the first use."""
        if self.split is not None:
            split, self.split = self.split, None
            split()

    def on_gather(self, unit: Unit) -> None:
        """Make room where a rule says so, and note that `unit` is gathered."""
        if in_backward():
            self.start_backward()
            if self._frozen is not None and self._frozen is not unit:
                self._frozen.free()
            self._frozen = None if unit.trainable else unit
        elif not unit.num_active and not unit.is_requested:
            if self._loose is not None and self._loose is not unit and not self._loose.num_active:
                self._loose.free()
            self._loose = unit
        self._gathered[unit] = None

    def on_free(self, unit: Unit) -> None:
        """Note that `unit` is no longer gathered."""
        self._gathered.pop(unit, None)
        if self._loose is unit:
            self._loose = None

    def on_reduced(self, reduction: GradReduction) -> None:
        """Note that a reduction ended."""
        self.reducer.on_finished(reduction)

    def on_backward_done(self, unit: Unit) -> None:
        """Free a unit of which all gradients have arrived, or whose modules' inputs have theirs."""
        if self.reshard_after_backward:
            unit.free()

    def watch_inputs(self, unit: Unit, inputs: Any) -> None:
        """Have `unit` freed when the backward has passed its module: when an input of it has its gradient."""
        if not torch.is_grad_enabled():
            return
        for value in inputs:
            if isinstance(value, Tensor) and value.requires_grad:
                handle = value.register_hook(partial(_passed, unit))
                unit.num_watched += 1
                if value.is_leaf:  # else the hook goes with the graph
                    self._leaf_watches.append(handle)
                return

    def _forget_watches(self) -> None:
        for handle in self._leaf_watches:
            handle.remove()
        self._leaf_watches.clear()
        for unit in self.units:
            unit.num_watched = 0

    def start_backward(self) -> Reducer:
        """Have `end_backward` called when the backward that is running ends."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._backward_task):
            self._backward_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        return self.reducer

    def end_backward(self) -> None:
        """Reduce what is incomplete and free everything."""
        self._backward_task = -1
        self._frozen = None
        self._forget_watches()
        self.reducer.end_backward()
        if self.reshard_after_backward:
            for unit in list(self._gathered):
                unit.free()

    def reset(self) -> None:
        """Forget a forward or backward that an exception ended: free all copies, drop gradients that are under way."""
        self._backward_task = -1
        self._frozen = None
        self._forget_watches()
        self.reducer.reset()
        for unit in self.units:
            unit.num_active = 0
            unit.free()

    def enter_forward(self, unit: Unit) -> None:
        """A module of `unit` starts its forward."""
        check_interrupted(None, unit.params)
        self.before_use()
        if torch.is_grad_enabled() and self.root in unit.modules:
            self._take_in_plain_parameters()
            for sync in self.sync_buffers if self.root is not None and self.root.training else ():
                sync()
        unit.num_active += 1

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

    def note_plain_parameters(
        self, modules: Sequence[nn.Module], take_in: Callable[[list[tuple[str, nn.Parameter]]], None]
    ) -> None:
        """Remember the plain parameters that are meant to be there: those to ignore, and not yet sharded ones.

        Args:
            modules: What was sharded.
            take_in: Shards those that come later.
        """
        self._tops = list(modules)
        self._take_in = take_in
        self._known_plain = {id(p): p for _, p in self._plain_parameters()}

    def _plain_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trainable parameters below the root that are not sharded."""
        for prefix, module in dict.fromkeys(pair for top in self._tops for pair in top.named_modules()):
            for name, param in module._parameters.items():
                if param is not None and not isinstance(param, ShardedTensor) and param.requires_grad:
                    yield f"{prefix}.{name}" if prefix else name, param

    def _take_in_plain_parameters(self) -> None:
        """Shard trainable parameters that came after `fully_shard`: nothing would reduce their gradients."""
        if self._num_registrations == Registrations.count:
            return
        self._num_registrations = Registrations.count
        found = {id(p): (name, p) for name, p in self._plain_parameters() if id(p) not in self._known_plain}
        if found and self._take_in is not None and not _in_functional_call():
            self._take_in(list(found.values()))

    def reshards(self, unit: Unit) -> bool:
        """Whether `unit` is freed between forward and backward; by default all but the root's own unit."""
        if unit.reshard_after_forward is not None:
            return unit.reshard_after_forward
        return self.root not in unit.modules


class Registrations:
    """Counts the parameters that modules are given, so that a model is searched only after one was."""

    count: ClassVar[int] = 0

    @classmethod
    def note(cls, module: nn.Module, name: str, param: Any) -> Any:
        """Torch's hook for a parameter that is registered; a replaced one is followed."""
        cls.count += 1
        return param._replacement if isinstance(param, ReplacedParameter) else None


register_module_parameter_registration_hook(Registrations.note)


def adopt_leaf(param: ShardedTensor) -> None:
    """Take care of the gradients of a leaf that autograd is about to use for the first time.

    That is a parameter whose `requires_grad` was switched on later, or a leaf that no `fully_shard` made: a deep
    copy, or `nn.Parameter(sharded_tensor)`. The latter becomes a unit of its own.
    """
    param._cell.is_shared = True
    if param._source is None and param._home is not None:
        unit, slot = param._home
        if isinstance(unit, Unit) and unit.params[slot] is param:  # `module.to(...)` swapped it
            param._source, param._slot, param._home = unit, slot, None
    source = param._source
    if not isinstance(source, Unit) or source.params[param._slot] is not param:
        unit = Unit([param], [], label=param.name, reshard_after_forward=None, observer=Runtime())
        unit.observer.adopt(unit)  # type: ignore[attr-defined]
    hook_gradient(param)


def hook_gradient(param: ShardedTensor) -> None:
    """Have the gradients of a parameter reduced, from the first time that it takes any."""
    if param.requires_grad and param.is_leaf and param._grad_hook is None:
        # `swap_tensors` leaves a dict of hooks behind that autograd no longer knows; start from a new one.
        known = param._backward_hooks or {}
        others = [hook for hook in known.values() if getattr(hook, "func", None) is not route_gradient]
        param._backward_hooks = None
        param._grad_hook = param.register_hook(partial(route_gradient, param))
        for hook in others:
            param.register_hook(hook)


def hook_forward(module: nn.Module) -> None:
    """Tell the runtime of each forward of a module that units belong to."""
    module.register_forward_pre_hook(_before_forward, prepend=True)
    module.register_forward_hook(_after_forward, always_call=True)


def _in_functional_call() -> bool:
    """Whether `torch.func.functional_call` has put other tensors in the places of parameters."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "functional_call":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _passed(unit: Unit, grad: Tensor) -> None:
    unit.num_watched -= 1
    if unit.num_watched <= 0:
        unit.observer.on_backward_done(unit)


def _units_at(module: nn.Module) -> list[Unit]:
    """Units of which `module` is one of the modules; a copy, for the first use may form new ones."""
    return list(module.__dict__["_dshard_units"])


def _before_forward(module: nn.Module, args: Any) -> None:
    for unit in _units_at(module):
        unit.observer.enter_forward(unit)
        unit.observer.watch_inputs(unit, args)


def _after_forward(module: nn.Module, args: Any, output: Any) -> None:
    for unit in _units_at(module):
        unit.observer.exit_forward(unit, module)
