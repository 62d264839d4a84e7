"""The step of offloaded parameters beside the next forward: each unit's ahead of its use, in a thread of the host.

An optimizer that steps at home reads and writes all memory of the host that holds parameters, gradients and states,
while the device has nothing to do. So `Optimizer.step()` takes down what is to be done, and returns. One thread steps
the units in the order in which the last forward used them, each by the optimizer's own `step`; shards, gradients and
states await that as gradients await their reduction. Whoever uses one, by a gather, a checkpoint or a write, waits for
the step of its unit.
"""

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial, wraps
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from dshard.collectives import SendRow
from dshard.compiling import is_between_graphs
from dshard.errors import StateError
from dshard.interpreter import is_kept, is_referred_to
from dshard.optimizer.swap import (
    alike,
    begin_swap,
    forget_gradients,
    may_swap,
    settings_of,
    standin_of,
    wrapped_state,
)
from dshard.tensor.sharded_tensor import SHARDED, OffloadedShardedTensor
from dshard.tensor.storage import DeferredStep, HomeRow, Scaling, ShardStorage
from dshard.units.context import Phase
from dshard.units.unit import Unit

_LOG = logging.getLogger("dshard")
_LIE_APART = "a gradient that the optimizer reads is sharded in another way than its parameter"


class Deferral:
    """What the step of an optimizer, which is about to begin, leaves to a later time.

    Args:
        optimizer: The optimizer.
        why_none: Why it can leave nothing; "" if it can.
    """

    pending: ClassVar["Deferral | None"] = None  # of the step that runs, or of one that raised

    def __init__(self, optimizer: Optimizer, why_none: str) -> None:
        self.optimizer, self._why_none = optimizer, why_none
        self.is_told = self.is_logged = False  # what one of its steps raised
        self._steps: dict[Unit, _UnitStep] = {}
        self._pinned: list[dict[str, Any]] = []  # groups of which one setting is set until the step has ended
        self.settings: list[dict[str, Any]] = []  # of the groups, as they are now
        for number, group in enumerate(optimizer.param_groups):
            for place, param in enumerate(group["params"]):
                self._take(number, place, param)

    @classmethod
    def begin(cls, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Let shards stand in for parameters, as `begin_swap`, but for those that can be stepped later."""
        cls.forget()
        has_offloaded = OffloadedShardedTensor.num_made > 0
        deferral = cls(optimizer, _why_none(optimizer, args, kwargs)) if has_offloaded else None
        if deferral is None or not deferral._steps:
            begin_swap(optimizer, args, kwargs)
            return
        cls.pending = deferral
        left_out = {id(param) for step in deferral._steps.values() for param in step.params}
        deferral.settings = settings_of(optimizer)
        deferral._pin(left_out)
        if not begin_swap(optimizer, args, kwargs, left_out, deferral._unpin):
            for unit, step in deferral._steps.items():
                unit.stepped_at_once |= {param.name: _LIE_APART for param in step.params}
            cls.forget()

    @classmethod
    def leave_out(cls, optimizer: Optimizer) -> None:
        """Note that the step of an optimizer whose parameters have owners leaves nothing to a later time."""
        if OffloadedShardedTensor.num_made:
            cls(optimizer, f"{type(optimizer).__name__} steps whole parameters, each on its owner")

    def _take(self, group: int, place: int, param: Tensor) -> None:
        """Step a parameter of one of the optimizer's groups later, if it can be."""
        if type(param) is not OffloadedShardedTensor or not isinstance(unit := param.gather_source, Unit):
            return
        unit.stepped_at_once.pop(param.name, None)
        grad: Any = param.grad
        if grad is None:
            return
        if why := self._why_none or _why_at_once(param, self.optimizer):
            unit.stepped_at_once[param.name] = why
            return
        scaling = grad.shard_storage.take_scaling()
        shard = standin_of(param)
        if scaling is not None:  # until the step has begun
            grad.shard_storage.begin_await(scaling)
        if shard is None:
            unit.stepped_at_once[param.name] = _LIE_APART
            return
        self._steps.setdefault(unit, _UnitStep(unit, self)).add(group, place, param, shard)

    def _pin(self, left_out: Container[int]) -> None:
        """Have parameters on a device, in groups with some at home, be stepped one by one as these are: to those bits.

        So does torch where `foreach` is not set, which it would not if it saw those on the device alone.
        """
        for group in self.optimizer.param_groups:
            is_left = [id(param) in left_out for param in group["params"]]
            if any(is_left) and not all(is_left) and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = False
                self._pinned.append(group)

    def _unpin(self) -> None:
        for group in self._pinned:
            group["foreach"] = None
        self._pinned = []

    @classmethod
    def end(cls, optimizer: Optimizer) -> None:
        """The step has ended, and the optimizer has its parameters back: begin what it has left."""
        optimizer.__dict__["_dshard_has_stepped"] = True
        deferral, cls.pending = cls.pending, None
        if deferral is not None and deferral.optimizer is optimizer:
            for unit in _in_order(list(deferral._steps)):
                deferral._steps[unit].start()

    @classmethod
    def forget(cls) -> None:
        """A step raised, or cannot leave anything to later."""
        deferral, cls.pending = cls.pending, None
        if deferral is not None:
            deferral._unpin()
            for step in deferral._steps.values():
                forget_gradients(step.shards)


def await_steps(optimizer: Optimizer) -> None:
    """Wait for what an optimizer has left to later.

    Raises:
        StateError: That raised.
    """
    states: Any = optimizer.__dict__.get("state")
    if type(states) is _States:
        states.settle()


def _why_none(optimizer: Optimizer, args: Any, kwargs: Any) -> str:
    """Why a step leaves nothing to a later time; "" if it may.

    It may where it is torch's own, within its hooks, and nobody keeps the dict of states that is there.
    """
    name = type(optimizer).__name__
    if not may_swap(optimizer, args, kwargs):
        return f"{name} is no elementwise optimizer of torch.optim, or the step has a closure or is differentiable"
    if is_between_graphs():
        return "the step is compiled"
    code = getattr(type(optimizer).step, "__code__", None)
    if code is None or code.co_filename != Optimizer.profile_hook_step.__code__.co_filename:
        return f"{name}.step is another one than torch's"
    states = optimizer.__dict__["state"]
    if type(states) is not _States and is_kept(states, 1):
        return "the program holds a reference to optimizer.state"
    return ""


def _why_at_once(param: OffloadedShardedTensor, optimizer: Optimizer) -> str:
    """Why a parameter's step cannot wait; "" if nobody can look at it, its gradient or its states unnoticed."""
    offload, grad, unit = param.offload, param.grad, param.gather_source
    if offload is None or not offload.defers_step:
        return "CPUOffloadPolicy(defer_step=False)"
    if offload.home.type != "cpu":
        return f"they are offloaded to {offload.home}, and not to the CPU"
    if not isinstance(unit, Unit) or not isinstance(grad, OffloadedShardedTensor):
        return "the program has put tensors of its own into their .grad"
    state = optimizer.state
    if param not in state and (state or "_dshard_has_stepped" not in optimizer.__dict__):
        return "the first step makes their optimizer states"  # and tells of what is wrong with the optimizer
    named = state.get(param, {})
    if is_kept(named, 1):
        return "the program holds a reference to their optimizer states (optimizer.state[param], a state_dict())"
    sharded: list[ShardStorage] = []
    for value in named.values():
        if type(value) in SHARDED:
            sharded.append(value.shard_storage)
        elif isinstance(value, Tensor) and is_referred_to(value, 1):
            return "the program holds a reference to their step counts"  # and would see one too many
    own = param.shard_storage
    if own.is_exposed and not unit.copies.is_held(own):
        own.is_exposed = False
    for each in sharded:
        if each.is_exposed and not each.is_held(own_refs=0, storage_refs=1):
            each.is_exposed = False
    if any(each.is_exposed or each.home is not None for each in (own, grad.shard_storage, *sharded)):
        return "the program holds their shards, or those of their gradients or states, from to_local()"
    return ""


def _in_order(units: Sequence[Unit]) -> list[Unit]:
    """Units in the order of their next use."""
    position: dict[int, int] = {}
    for model in {id(unit.model): unit.model for unit in units}.values():
        for unit in model.schedule.order(Phase.FORWARD):
            position.setdefault(id(unit), len(position))
    return sorted(units, key=lambda unit: position.get(id(unit), len(position)))


class _UnitStep(DeferredStep):
    """The step of one unit's parameters.

    Args:
        unit: The unit.
        deferral: That it is a part of.
    """

    def __init__(self, unit: Unit, deferral: Deferral) -> None:
        self._unit, self._label, self._deferral = unit, unit.label, deferral
        self._rows: list[tuple[SendRow, torch.dtype]] = []  # in which the unit's shards travel, in another dtype
        self._home_rows: list[HomeRow] = []  # in which gradients came home
        self._groups: dict[int, dict[int, Tensor]] = {}  # shards, by the optimizer's groups, and places in them
        self._params: dict[Tensor, OffloadedShardedTensor] = {}  # of each shard
        self._scalings: list[tuple[Tensor, Scaling]] = []  # of gradients, that are still to be done
        self._has_ended = threading.Event()
        self._error: Exception | None = None  # that the optimizer's step raised

    @property
    def params(self) -> Iterable[OffloadedShardedTensor]:
        """The parameters that it steps."""
        return self._params.values()

    @property
    def shards(self) -> Iterable[Tensor]:
        """Those that stand in for them."""
        return self._params

    def add(self, group: int, place: int, param: OffloadedShardedTensor, shard: Tensor) -> None:
        """Have a parameter be stepped.

        Args:
            group: Number of the optimizer's group that it is in.
            place: Its number there.
            param: The parameter.
            shard: That stands in for it, with the gradient's.
        """
        self._groups.setdefault(group, {})[place] = shard
        self._params[shard] = param

    def start(self) -> None:
        """Take down what the optimizer is to do, and have that done; what is read and written by it awaits it."""
        states = _States.of(self._deferral.optimizer)
        seen: Any = defaultdict(dict)
        storages: list[ShardStorage] = []
        for shard, param in self._params.items():
            grad: Any = param.grad
            storages += (param.shard_storage, grad.shard_storage)
            row = grad.shard_storage.home_row
            if row is not None and self not in row.users:
                row.users.append(self)
                self._home_rows.append(row)
            if (scaling := grad.shard_storage.take_scaling()) is not None:
                self._scalings.append((grad.shard_storage.resolve(), scaling))
            for name, value in dict.get(states, param, {}).items():
                if type(value) in SHARDED:
                    value.origin = None  # the step writes to it, and may not count that
                    storages.append(value.shard_storage)
                    value = value.shard_storage.resolve()
                seen[shard][name] = value
        optimizer = alike(self._deferral.optimizer, self._deferral.settings, self._groups, seen)
        torch.autograd.graph.increment_version(list(self.params))
        self._rows = self._unit.copies.rows_to_cast({id(param.shard_storage) for param in self.params})
        states.awaited.append(self)
        for storage in storages:
            storage.begin_await(self)
        _Thread.submit(partial(self._run, optimizer, states))

    def _run(self, optimizer: Optimizer, states: "_States") -> None:
        """Step, in the thread for it. Nobody looks at states until it has ended."""
        step: Any = type(optimizer).step
        before = {shard: dict(named) for shard, named in optimizer.state.items()}
        try:
            with torch.no_grad():
                for grad, scaling in self._scalings:
                    torch._foreach_mul_([grad], scaling.factor)
            getattr(step, "__wrapped__", step)(optimizer)  # without hooks, which have run
            for shard, named in optimizer.state.items():
                old, param = before.get(shard, {}), self._params[shard]
                for name in [name for name, value in named.items() if old.get(name) is not value]:
                    kept = dict.setdefault(states, param, {})
                    kept[name] = wrapped_state(kept.get(name), named[name], param, shard.shape)
            self._cast()
        except Exception as error:
            self._error = error
            if not self._deferral.is_logged:  # the program may end without a use that would raise it
                self._deferral.is_logged = True
                _LOG.error("%s", self._told(error))
        finally:
            forget_gradients(self._params)
            for row in self._home_rows:
                row.users.remove(self)
            optimizer.param_groups, optimizer.state = [], defaultdict(dict)  # whoever asks sees who holds a shard
            self._home_rows = []
            self._groups, self._params, self._rows, self._scalings = {}, {}, [], []
            self._has_ended.set()

    def _cast(self) -> None:
        """Cast what travels, into the memory of gradients: nobody refers to these most often, until the next are there.

        Where somebody does, what travels is cast on the device.
        """
        free = [row for row in self._home_rows if self._rows and row.is_free_for(self)]
        for row, dtype in self._rows:
            num_bytes = row.row.numel() * dtype.itemsize
            found = next((each for each in free if each.memory.nbytes() >= num_bytes), None)
            if found is not None:
                free.remove(found)
                row.cast_into(torch.empty(0, dtype=dtype).set_(found.memory, 0, (row.row.numel(),), (1,)))

    def wait(self) -> None:
        """Wait until it has ended.

        Raises:
            StateError: The optimizer's step raised; said once for all units that it steps.
        """
        self._has_ended.wait()
        error, deferral = self._error, self._deferral
        if error is None or deferral.is_told:
            return
        deferral.is_told = True
        raise StateError(self._told(error)) from error

    def _told(self, error: Exception) -> str:
        who = type(self._deferral.optimizer).__name__
        return (
            f"{self._label}: the step of its optimizer ({who}), which was deferred, raised "
            f"{type(error).__name__}: {error}. Some parameters have moved, others have not. Load a checkpoint; "
            "CPUOffloadPolicy(defer_step=False) has it raise in step()."
        )


def _num_threads() -> int:
    """On how many cores a step computes: as many as the program, or where torchrun has set that to 1, its share."""
    num_threads, num_sharing = torch.get_num_threads(), os.environ.get("LOCAL_WORLD_SIZE", "")
    is_torchruns = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    if num_threads > 1 or not is_torchruns or not num_sharing.isdecimal():
        return num_threads
    return max(1, len(os.sched_getaffinity(0)) // max(1, int(num_sharing)))


class _States(defaultdict[Any, Any]):
    """The states of an optimizer, of which some may await steps: whoever looks into it waits.

    Attributes:
        awaited: Steps that have begun, or are to.
    """

    awaited: list[DeferredStep]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.awaited = []

    @classmethod
    def of(cls, optimizer: Optimizer) -> "_States":
        """Those of an optimizer, put in the place of what it has if need be."""
        states: Any = optimizer.state
        if type(states) is not cls:
            states = cls(dict, states)
            optimizer.state = states
        return states

    def settle(self) -> None:
        """Wait for all that is awaited."""
        for step in tuple(self.awaited):
            step.wait()  # while other threads see that they have to
            with suppress(ValueError):
                self.awaited.remove(step)

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


def _settled(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(self: _States, *args: Any, **kwargs: Any) -> Any:
        self.settle()
        return method(self, *args, **kwargs)

    return run


for _name in (
    *("__contains__", "__copy__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__or__"),
    *("__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "copy", "get", "items", "keys", "pop", "popitem"),
    *("setdefault", "update", "values"),
):
    setattr(_States, _name, _settled(getattr(defaultdict, _name)))


class _Thread:
    """In which deferred steps run, one behind the other."""

    executor: ClassVar[ThreadPoolExecutor | None] = None
    num_cores: ClassVar[int] = 0  # that it computes on
    submitted: ClassVar[list["Future[None]"]] = []

    @classmethod
    def submit(cls, function: Callable[[], None]) -> None:
        """Have a function called; the end of the program waits for it."""
        cls.submitted = [known for known in cls.submitted if not known.done()]
        try:
            cls.submitted.append(cls._begun().submit(function))
        except RuntimeError:  # there are no more threads, or the interpreter ends
            function()

    @classmethod
    def _begun(cls) -> ThreadPoolExecutor:
        """The thread, which computes on as many cores as it should now."""
        if cls.executor is None:
            cls.executor, cls.num_cores = ThreadPoolExecutor(1, thread_name_prefix="dshard steps"), 0
        if (num_cores := _num_threads()) != cls.num_cores:
            own = torch.get_num_threads()
            cls.executor.submit(torch.get_num_threads).result()  # a thread's first look takes what was set for all
            cls.executor.submit(torch.set_num_threads, num_cores).result()
            torch.set_num_threads(own)  # which threads that begin later take over, too
            cls.num_cores = num_cores
        return cls.executor

    @classmethod
    def rest(cls) -> None:
        """Wait until it has nothing to do."""
        wait(cls.submitted)

    @classmethod
    def forget(cls) -> None:
        """It is not there in a forked process."""
        cls.executor, cls.submitted = None, []


os.register_at_fork(before=_Thread.rest, after_in_child=_Thread.forget)
