"""What is done around the step of each optimizer."""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import Any, ClassVar

import torch
from torch import optim
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dshard.collectives import await_settled
from dshard.compiling import Pause, outside_of_graphs
from dshard.interpreter import frame_above
from dshard.optimizer.deferred import Deferral, await_steps
from dshard.optimizer.owners import begin_whole, end_whole, whole_of
from dshard.optimizer.replace import repoint_optimizer
from dshard.optimizer.rows import params_of
from dshard.optimizer.swap import check_interrupted, closure_of, end_swap, is_part
from dshard.tensor.sharded_tensor import SHARDED, ShardedTensor
from dshard.tensor.storage import ShardStorage, begin_step, end_step, is_in_step, shards_of
from dshard.units.unit import Unit

Listener = Callable[[Optimizer], object]
_STORAGE, _GRAD, _SOURCE = attrgetter("shard_storage"), attrgetter("grad"), attrgetter("gather_source")


class _Steps:
    """Who listens, in this process."""

    are_watched: ClassVar[bool] = False
    before: ClassVar[list[Listener]] = []
    numbers: ClassVar[Iterator[int]] = itertools.count()
    after: ClassVar[list[Listener]] = []
    known: ClassVar["weakref.WeakSet[Optimizer]"] = weakref.WeakSet()  # that have stepped
    count: ClassVar["_Count | None"] = None  # of the step that runs, or of one that raised
    depth: ClassVar[int] = 0  # of steps of that optimizer within its step, as `super().step()` of a class


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
    if is_part(optimizer):
        return
    if _Steps.count is not None and _Steps.count.optimizer is optimizer and is_in_step():
        _Steps.depth += 1
        return
    _Steps.depth = 0
    Pause.is_wanted = False  # of a step that raised
    end_whole(optimizer)
    check_interrupted(optimizer, ())
    await_steps(optimizer)
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
def _enter(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Behind all hooks of the program, ahead of the step itself."""
    if _Steps.depth:
        return None
    await_settled()
    begin_step(frame_above(1))
    written = _written(optimizer)
    _Steps.count = _Count.of(optimizer, written)
    written = written if closure_of(args, kwargs) is None else []  # else it computes first
    units = _units_of(written)
    _await_readers(written, units)
    whole = whole_of(optimizer)
    if whole is not None or type(optimizer) is optim.LBFGS:  # whose graphs would hold views of sharded tensors
        Pause.is_wanted = True
    if whole is None:
        Deferral.begin(optimizer, args, kwargs)
    else:
        Deferral.leave_out(optimizer)
    for pool in {id(unit.model.pool): unit.model.pool for unit in units}.values():
        pool.settle()  # of what gradients, which are there by now, were reduced from: the step needs memory, too
    return None if whole is None else begin_whole(optimizer, whole, args, kwargs)


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
        own = list(map(_STORAGE, written))
        given = params_of(optimizer)
        if len(own) == len(given):
            return cls(optimizer, own, [])
        known = set(map(id, own))
        storages = [param.shard_storage for param in given if type(param) in SHARDED]
        others = [each for each in storages if id(each) not in known and each.tensor is not None]
        return cls(optimizer, own, [(each, each.resolve()._version) for each in others])

    def end(self) -> None:
        """The step has ended."""
        moved = [storage for storage, version in self.others if storage.resolve()._version != version]
        for storage in (*self.written, *moved):
            storage.num_writes += 1
        # Fused kernels do not count their writes, nor do those of other libraries that write by addresses.
        torch.autograd.graph.increment_version(shards_of(self.written))
        if "grad_scale" in self.optimizer.__dict__:  # they take a scaler's scale out of gradients
            grads: list[Any] = [grad for param in _written(self.optimizer) if type(grad := param.grad) in SHARDED]
            torch.autograd.graph.increment_version([grad.shard_storage.resolve() for grad in grads])


def _written(optimizer: Optimizer) -> list[ShardedTensor]:
    """Parameters that it is about to write."""
    params = params_of(optimizer)
    sharded = list(compress(params, map(SHARDED.__contains__, map(type, params))))
    return list(compress(sharded, map(is_not, map(_GRAD, sharded), repeat(None))))


def _units_of(params: Sequence[ShardedTensor]) -> list[Unit]:
    sources = dict.fromkeys(map(_SOURCE, params))
    return [unit for unit in sources if isinstance(unit, Unit)]


def _await_readers(written: Sequence[ShardedTensor], units: Sequence[Unit]) -> None:
    """Have nobody read the shards that are about to be written, where others may read them; else each write asks."""
    for unit in units:
        unit.make_way()
    storages = [storage for storage in map(_STORAGE, written) if storage.home is not None]
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
    if _Steps.depth:
        return
    Pause.is_wanted = False
    end_step()
    end_whole(optimizer)
    end_swap(optimizer)
    count, _Steps.count = _Steps.count, None
    if count is not None and count.optimizer is optimizer:
        count.end()
    Deferral.end(optimizer)


@outside_of_graphs
def _end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The last that is done, or nearly."""
    if is_part(optimizer):
        return
    if _Steps.depth:
        _Steps.depth -= 1
        return
    optimizer._optimizer_step_pre_hooks.pop(_HOOK_ID, None)
    optimizer._optimizer_step_post_hooks.pop(_HOOK_ID, None)
    for listener in tuple(_Steps.after):  # one may end itself
        listener(optimizer)
