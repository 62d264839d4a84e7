"""How modules and parameters tell the runtime what happens to them."""

from typing import Any

from torch import nn

from dshard.runtime.reduction import hook_gradient
from dshard.runtime.runtime import Runtime
from dshard.runtime.unit import Unit
from dshard.tensor import ShardedTensor

__all__ = ["adopt_leaf", "hook_forward"]


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


def hook_forward(module: nn.Module) -> None:
    """Tell the runtime of each forward of a module that units belong to."""
    module.register_forward_pre_hook(_before_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(_after_forward, always_call=True)


def _units_at(module: nn.Module) -> list[Unit]:
    """Units of which `module` is one of the modules; a copy, for the first use may form new ones."""
    return list(module.__dict__["_dshard_units"])


def _before_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
    for unit in _units_at(module):
        unit.observer.enter_forward(unit)
        unit.observer.watch_inputs(unit, (args, kwargs))


def _after_forward(module: nn.Module, args: Any, output: Any) -> None:
    for unit in _units_at(module):
        unit.observer.exit_forward(unit, module)
