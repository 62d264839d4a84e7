"""What is done around each step of any optimizer, in an order that stands here, behind one pair of torch's hooks.

Torch calls hooks of all optimizers in the order in which they were registered, which would be that of imports.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dshard.optimizer.replace import repoint_optimizer
from dshard.optimizer.swap import begin_swap, check_interrupted, check_kernels, closure_of, end_swap
from dshard.tensor import stepping
from dshard.tensor.sharded_tensor import SHARDED, ShardedTensor
from dshard.units.unit import Unit

Listener = Callable[[Optimizer], object]


class _Steps:
    """Who listens, in this process."""

    are_watched: ClassVar[bool] = False
    before: ClassVar[list[Listener]] = []
    after: ClassVar[list[Listener]] = []


def watch_steps() -> None:
    """Have torch tell of the steps of all optimizers, from the first sharded model on."""
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


def num_listeners() -> tuple[int, int]:
    """How many are told before steps, and after them."""
    return len(_Steps.before), len(_Steps.after)


def _added(listeners: list[Listener], listener: Listener) -> Callable[[], None]:
    watch_steps()
    listeners.append(listener)
    return lambda: listeners.remove(listener)


def _begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepping.begin(sys._getframe(1))
    check_interrupted(optimizer, ())
    repoint_optimizer(optimizer)
    for listener in tuple(_Steps.before):
        listener(optimizer)
    written = _written(optimizer) if closure_of(args, kwargs) is None else []  # else it computes first
    units = _units_of(written)
    _await_readers(written, units)
    check_kernels(optimizer)
    begin_swap(optimizer, args, kwargs)
    for pool in {id(unit.model.pool): unit.model.pool for unit in units}.values():
        pool.settle()  # of what gradients were reduced from: the step needs memory, too


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


def _end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepping.end()
    end_swap(optimizer)
    for listener in tuple(_Steps.after):  # one may end itself
        listener(optimizer)
