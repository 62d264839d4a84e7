"""The step of an optimizer, as it sees shards in the places of sharded parameters."""

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor, optim
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dshard.collectives import await_settled
from dshard.compiling import Pause, outside_of_graphs
from dshard.errors import StateError
from dshard.interpreter import frame_above
from dshard.optimizer.replace import repoint_optimizer
from dshard.tensor.sharded_tensor import SHARDED, ShardedTensor
from dshard.tensor.storage import ShardStorage, begin_step, end_step
from dshard.tensor.subclass_shards import subclass_gathers
from dshard.units.unit import Unit

_NAMES = ("ASGD", "SGD", "Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "NAdam", "RAdam", "RMSprop", "Rprop")
_ELEMENTWISE = frozenset(getattr(optim, name) for name in _NAMES)


@dataclass(frozen=True, slots=True)
class _Swap:
    """An optimizer whose parameters are replaced by shards while its step runs."""

    optimizer: Optimizer
    params: list[list[Tensor]]  # of each of its groups
    state: Any
    swapped: list[ShardedTensor]  # the sharded parameters
    shards: list[Tensor]  # what stands in for each of them
    versions: list[int]  # version counters of those shards at the start
    state_values: list[Any]  # all values of the states that the optimizer sees, in order


class _Current:
    """The swap of the step that runs, or of one that raised; and one that raised and has not been told of."""

    swap: ClassVar[_Swap | None] = None
    untold: ClassVar[_Swap | None] = None


def closure_of(args: Any, kwargs: Any) -> Any:
    """What `step` was given to compute the loss anew; None if nothing."""
    return args[1] if len(args) > 1 else kwargs.get("closure") if kwargs else None


def _may_swap(optimizer: Optimizer, args: Any, kwargs: Any) -> bool:
    """Whether nobody but the optimizer itself will look at its groups during the step."""
    return (
        type(optimizer) in _ELEMENTWISE
        and closure_of(args, kwargs) is None
        and not optimizer.defaults.get("differentiable")
    )


def _standin(param: ShardedTensor) -> Tensor | None:
    """The shard of a parameter, with that of its gradient; None if the two do not lie alike, or it is no plain one."""
    storage, grad = param.shard_storage, param.grad
    shard = storage.standin
    if storage.is_pending or shard is None:
        if subclass_gathers(storage.resolve()):
            return None  # it may write by putting other tensors in itself, of which an alias would not know
        shard = storage.standin = storage.resolve().detach()  # an object of its own, for the key and the gradient
    if grad is None:
        shard.grad = None
        return shard
    if not isinstance(grad, ShardedTensor) or grad.is_view or param.is_view:
        return None
    grad_storage = grad.shard_storage
    if grad_storage.layout is not storage.layout and grad_storage.layout != storage.layout:
        return None
    shard.grad = grad_storage.tensor if not grad_storage.is_pending else grad_storage.resolve()
    return shard


def begin_swap(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Let shards stand in for the parameters of an optimizer that is about to step.

    Nothing is done if somebody else may look at them, or one has no shard that can stand in for it.
    """
    if not _may_swap(optimizer, args, kwargs):
        return
    swapped: list[ShardedTensor] = []
    shards: list[Tensor] = []
    groups: list[list[Tensor]] = []
    for group in optimizer.param_groups:
        params: list[Tensor] = []
        for param in group["params"]:
            if type(param) not in SHARDED:
                if type(param.grad) in SHARDED:
                    _forget_gradients(shards)
                    return
                params.append(param)
                continue
            shard = _standin(param)
            if shard is None:
                _forget_gradients(shards)
                return
            swapped.append(param)
            shards.append(shard)
            params.append(shard)
        groups.append(params)
    if shards:
        _swap(optimizer, groups, swapped, shards)


def _swap(optimizer: Optimizer, groups: list[list[Tensor]], swapped: list[ShardedTensor], shards: list[Tensor]) -> None:
    """Give an optimizer groups and states of shards; the hash of a tensor is its id, so ids serve as keys here."""
    of_param = dict(zip(map(id, swapped), shards, strict=True))
    values = list(chain.from_iterable(map(dict.values, optimizer.state.values())))
    sharded = [value for value in values if type(value) in SHARDED]
    for value in sharded:
        value.origin = None  # of a state that was cast as it was loaded: the step writes to it, and may not count that
    storages = [value.shard_storage for value in sharded]
    resolved = iter([storage.tensor if not storage.is_pending else storage.resolve() for storage in storages])
    seen = [next(resolved) if type(value) in SHARDED else value for value in values]
    rest = iter(seen)
    state: Any = defaultdict(dict)
    for param, named in optimizer.state.items():
        state[of_param.get(id(param), param)] = dict(zip(named, rest, strict=False))  # takes as many as there are names
    params = [group["params"] for group in optimizer.param_groups]
    versions = [shard._version for shard in shards]
    _Current.swap = _Swap(optimizer, params, optimizer.state, swapped, shards, versions, seen)
    for group, standins in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = standins
    optimizer.state = state


def _forget_gradients(shards: list[Tensor]) -> None:
    for shard in shards:
        shard.grad = None


def end_swap(optimizer: Optimizer) -> None:
    """Give an optimizer that has stepped its parameters back, if shards stood in for them."""
    swap = _Current.swap
    if swap is not None and swap.optimizer is optimizer:
        _restore(swap)


def _restore(swap: _Swap) -> None:
    """Give an optimizer its parameters back, and its state as sharded as they are."""
    _Current.swap = None
    for group, params in zip(swap.optimizer.param_groups, swap.params, strict=True):
        group["params"] = params
    seen = list(chain.from_iterable(map(dict.values, swap.optimizer.state.values())))
    if len(seen) != len(swap.state_values) or not all(map(is_, seen, swap.state_values)):
        _wrap_states(swap)
    swap.optimizer.state = swap.state
    moved: list[Tensor] = []
    for param, shard in zip(swap.swapped, swap.shards, strict=True):
        if shard.grad is not None:
            shard.grad = None
            moved.append(param)
        elif param.grad is not None:
            param.grad = None  # by zero_grad(), after a step that raised
    torch.autograd.graph.increment_version(moved)


def _wrap_states(swap: _Swap) -> None:
    """Shard the values of a state that the step made or replaced."""
    of_shard = dict(zip(map(id, swap.shards), swap.swapped, strict=True))
    for key, values in swap.optimizer.state.items():
        param = of_shard.get(id(key))
        if param is None:
            swap.state[key] = values
            continue
        old = swap.state[param]
        for name, value in values.items():
            old[name] = _wrapped(old.get(name), value, param, key.shape)


def _wrapped(old: Any, value: Any, param: ShardedTensor, shape: torch.Size) -> Any:
    """A state's value as it is kept between steps."""
    if type(old) in SHARDED:
        storage = old.shard_storage
        if storage.tensor is not value:
            storage.deliver(value)
        return old
    if isinstance(value, Tensor) and value.dim() and value.shape == shape:
        return param.like(ShardStorage(value, param.shard_layout, is_shared=True), dtype=value.dtype)
    return value


def check_interrupted(optimizer: Optimizer | None, params: Sequence[Tensor]) -> None:
    """Repair an optimizer whose step raised; if parameters had moved by then, say so once.

    Args:
        optimizer: Whose step begins, or None.
        params: What is about to be used.

    Raises:
        StateError: A step of `optimizer`, or of one that holds some of `params`, was interrupted after it had begun to
            write. Only the ranks on which it was raise.
    """
    swap = _Current.swap
    if swap is not None:
        has_moved = any(s._version != v for s, v in zip(swap.shards, swap.versions, strict=True))
        _restore(swap)
        # A fused kernel may have written to them, and counts nothing.
        torch.autograd.graph.increment_version(swap.shards)
        _Current.untold = swap if has_moved else None
    untold = _Current.untold
    if untold is None:
        return
    held = set(map(id, untold.swapped))
    if optimizer is not untold.optimizer and not any(id(p) in held for p in params):
        return
    _Current.untold = None
    raise StateError(
        f"{type(untold.optimizer).__name__}: a step must run to its end, but the last one was interrupted by an "
        "exception, and some parameters have moved while others have not. Load a checkpoint; or, to go on all the "
        "same, call zero_grad() again and continue."
    )


_OF_MATRICES = (optim.Muon, optim.Adafactor, optim.LBFGS)
Listener = Callable[[Optimizer], object]


class _Steps:
    """Who listens, in this process."""

    are_watched: ClassVar[bool] = False
    before: ClassVar[list[Listener]] = []
    numbers: ClassVar[Iterator[int]] = itertools.count()
    after: ClassVar[list[Listener]] = []
    known: ClassVar["weakref.WeakSet[Optimizer]"] = weakref.WeakSet()  # that have stepped
    count: ClassVar["_Count | None"] = None  # of the step that runs, or of one that raised


def watch_steps() -> None:
    """Have torch tell of the steps of all optimizers, from the first sharded model on.

    Torch calls these two ahead of an optimizer's own hooks, and behind them. The step itself begins behind the last of
    the program's hooks and ends ahead of the first: `_begin` puts `_enter` and `_leave` there.
    """
    if not _Steps.are_watched:
        _Steps.are_watched = True
        register_optimizer_step_pre_hook(_begin)
        register_optimizer_step_post_hook(_end)


def before_steps(listener: Listener) -> Callable[[], None]:
    """Have each optimizer that is about to step told, ahead of `begin_swap`; gives what ends that."""
    return _added(_Steps.before, listener)


def after_steps(listener: Listener) -> Callable[[], None]:
    """Have each optimizer that has stepped told, when its parameters are back; gives what ends that."""
    return _added(_Steps.after, listener)


def known_optimizers() -> list[Optimizer]:
    """Optimizers of this process that have stepped since a model was sharded, in the order of their first steps."""
    return sorted(_Steps.known, key=lambda optimizer: optimizer.__dict__.get("_dshard_number", 0))


def num_listeners() -> tuple[int, int]:
    """How many are told before steps, and after them."""
    return len(_Steps.before), len(_Steps.after)


def _added(listeners: list[Listener], listener: Listener) -> Callable[[], None]:
    watch_steps()
    listeners.append(listener)
    return lambda: listeners.remove(listener)


_HOOK_ID = -1  # torch counts from 0


@outside_of_graphs
def _begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The first that is done: what the program's own hooks see is what it is outside of the step."""
    Pause.is_wanted = False  # of a step that raised
    check_interrupted(optimizer, ())
    if optimizer not in _Steps.known:
        optimizer.__dict__["_dshard_number"] = next(_Steps.numbers)
        _Steps.known.add(optimizer)
    repoint_optimizer(optimizer)
    for listener in tuple(_Steps.before):
        listener(optimizer)
    before: Any = optimizer._optimizer_step_pre_hooks
    after: Any = optimizer._optimizer_step_post_hooks
    before[_HOOK_ID], after[_HOOK_ID] = _enter, _leave
    before.move_to_end(_HOOK_ID)
    after.move_to_end(_HOOK_ID, last=False)


@outside_of_graphs
def _enter(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Behind all hooks of the program, ahead of the step itself."""
    await_settled()
    begin_step(frame_above(1))
    written = _written(optimizer)
    _Steps.count = _Count.of(optimizer, written)
    written = written if closure_of(args, kwargs) is None else []  # else it computes first
    units = _units_of(written)
    _await_readers(written, units)
    begin_swap(optimizer, args, kwargs)
    if type(optimizer) in _OF_MATRICES:  # whose graphs would hold views of sharded tensors
        Pause.is_wanted = True
    for pool in {id(unit.model.pool): unit.model.pool for unit in units}.values():
        pool.settle()  # of what gradients were reduced from: the step needs memory, too


@dataclass(frozen=True, slots=True)
class _Count:
    """The writes of a step, counted once for each parameter, as ranks compare them at the next gather.

    Args:
        optimizer: That steps.
        written: Storages of the parameters that have a gradient.
        others: Those that have none, and their versions when the step began.
    """

    optimizer: Optimizer
    written: list[ShardStorage]
    others: list[tuple[ShardStorage, int]]

    @classmethod
    def of(cls, optimizer: Optimizer, written: Sequence[ShardedTensor]) -> "_Count":
        """Begin to count."""
        own = [param.shard_storage for param in written]
        known = set(map(id, own))
        given = (param for group in optimizer.param_groups for param in group["params"])
        storages = [param.shard_storage for param in given if type(param) in SHARDED]
        others = [each for each in storages if id(each) not in known and each.tensor is not None]
        return cls(optimizer, own, [(each, each.resolve()._version) for each in others])

    def end(self) -> None:
        """The step has ended."""
        moved = [storage for storage, version in self.others if storage.resolve()._version != version]
        for storage in (*self.written, *moved):
            storage.num_writes += 1
        # Fused kernels do not count their writes, nor do those of other libraries that write by addresses.
        torch.autograd.graph.increment_version([storage.resolve() for storage in self.written])


def _written(optimizer: Optimizer) -> list[ShardedTensor]:
    """Parameters that it is about to write."""
    given = (param for group in optimizer.param_groups for param in group["params"])
    return [param for param in given if type(param) in SHARDED and param.grad is not None]


def _units_of(params: Sequence[ShardedTensor]) -> list[Unit]:
    sources = {id(param.gather_source): param.gather_source for param in params}
    return [unit for unit in sources.values() if isinstance(unit, Unit)]


def _await_readers(written: Sequence[ShardedTensor], units: Sequence[Unit]) -> None:
    """Have nobody read the shards that are about to be written, where others may read them; else each write asks."""
    for unit in units:
        unit.make_way()
    storages = [param.shard_storage for param in written if param.shard_storage.home is not None]
    homes = {id(storage.home): storage.home for storage in storages}
    read: set[int] = set()
    for key, home in homes.items():
        if home is not None and not (home.is_quiet() if read else home.make_quiet()):  # a peer is late once for all
            read.add(key)
    for storage in storages:
        if id(storage.home) in read:
            storage.leave_home()


@outside_of_graphs
def _leave(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Behind the step itself, ahead of all hooks of the program."""
    Pause.is_wanted = False
    end_step()
    end_swap(optimizer)
    count, _Steps.count = _Steps.count, None
    if count is not None and count.optimizer is optimizer:
        count.end()


@outside_of_graphs
def _end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The last that is done, or nearly."""
    optimizer._optimizer_step_pre_hooks.pop(_HOOK_ID, None)
    optimizer._optimizer_step_post_hooks.pop(_HOOK_ID, None)
    for listener in tuple(_Steps.after):  # one may end itself
        listener(optimizer)
