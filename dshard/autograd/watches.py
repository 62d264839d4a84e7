"""How far a backward has come, told by the inputs of modules: one that has its gradient has been passed."""

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["InputWatches", "in_backward"]


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


class InputWatches:
    """Hooks on inputs of the modules of units; `Unit.num_watched` of them are left, and `is_unwatched` if one lacks."""

    def __init__(self) -> None:
        self._on_leaves: list[Any] = []

    def watch(self, unit: Any, module: nn.Module, inputs: Any) -> None:
        """Notice when the backward has passed the module of a unit: when an input of it has its gradient."""
        if not torch.is_grad_enabled() or (in_backward() and unit.num_watched):
            return  # the latter: a checkpoint runs a forward again that is watched already
        value = _first_with_gradient(inputs)
        if value is None:
            unit.is_unwatched = True
            return
        handle = value.register_hook(partial(_passed, unit, module is unit.modules[0]))
        unit.num_watched += 1
        if value.is_leaf:  # else the hook goes with the graph
            self._on_leaves.append(handle)
            unit.is_unwatched = True  # autograd finishes leaves first, ahead of the weights' gradients

    def forget(self, units: Sequence[Any]) -> None:
        """The backward is over for all units."""
        for handle in self._on_leaves:
            handle.remove()
        self._on_leaves.clear()
        for unit in units:
            unit.num_watched, unit.is_unwatched = 0, False


def _first_with_gradient(value: Any) -> Tensor | None:
    """The first tensor in some arguments, however nested, that takes a gradient."""
    if isinstance(value, Tensor):
        return value if value.requires_grad else None
    if is_dataclass(value) and not isinstance(value, type):
        value = vars(value) if hasattr(value, "__dict__") else {}
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return next((found for item in items if (found := _first_with_gradient(item)) is not None), None)


def _passed(unit: Any, is_first: bool, grad: Tensor) -> None:
    """The backward has passed a forward of one of a unit's modules; `is_first` for the first of them."""
    unit.num_watched -= 1
    if unit.num_watched <= 0:
        unit.observer.on_passed(unit)
    elif is_first:  # another forward of the same modules is to come: gathered anew, as the forward did
        unit.observer.on_backward_done(unit)
