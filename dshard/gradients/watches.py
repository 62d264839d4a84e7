"""How far a backward has come, told by the inputs of modules: one that has its gradient has been passed."""

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dshard.autograd import in_backward
from dshard.units.unit import Unit


class InputWatches:
    """Hooks on inputs of the modules of units.

    Args:
        on_passed: Called with a unit when a backward has passed all forwards of its modules, and whether one of them
            had no input to tell of it: some gradients of it may be still to come then.
        on_repeated: Called with a unit when one forward of its modules was passed, and another is to come.
    """

    def __init__(self, on_passed: Callable[[Unit, bool], object], on_repeated: Callable[[Unit], object]) -> None:
        self._on_passed, self._on_repeated = on_passed, on_repeated
        self._on_leaves: list[Any] = []
        self._num_watched: dict[Unit, int] = {}  # inputs that will tell
        self._unwatched: set[Unit] = set()  # a module of them ran without such an input

    def is_watched(self, unit: Unit) -> bool:
        """Whether an input of a unit's modules is to tell still that the backward has passed it."""
        return self._num_watched.get(unit, 0) > 0

    def watch(self, unit: Unit, module: nn.Module, inputs: Any) -> bool:
        """Notice when the backward has passed the module of a unit: when an input of it has its gradient.

        Gives whether there is such an input.
        """
        if not torch.is_grad_enabled() or (in_backward() and self._num_watched.get(unit)):
            return False  # the latter: a checkpoint runs a forward again that is watched already
        value = _first_with_gradient(inputs)
        if value is None:
            self._unwatched.add(unit)
            return False
        handle = value.register_hook(partial(self._passed, unit, module is unit.modules[0]))
        self._num_watched[unit] = self._num_watched.get(unit, 0) + 1
        if value.is_leaf:  # else the hook goes with the graph
            self._on_leaves.append(handle)
            self._unwatched.add(unit)  # autograd finishes leaves first, ahead of the weights' gradients
        return True

    def forget(self) -> None:
        """The backward is over for all units."""
        for handle in self._on_leaves:
            handle.remove()
        self._on_leaves.clear()
        self._num_watched.clear()
        self._unwatched.clear()

    def _passed(self, unit: Unit, is_first: bool, grad: Tensor) -> None:
        """The backward has passed a forward of one of a unit's modules; `is_first` for the first of them."""
        left = self._num_watched[unit] = self._num_watched.get(unit, 0) - 1
        if left <= 0:
            self._on_passed(unit, unit in self._unwatched)
        elif is_first:  # another forward of the same modules is to come: gathered anew, as the forward did
            self._on_repeated(unit)


def _first_with_gradient(value: Any) -> Tensor | None:
    """The first tensor in some arguments, however nested, that takes a gradient."""
    if isinstance(value, Tensor):
        return value if value.requires_grad else None
    if is_dataclass(value) and not isinstance(value, type):
        value = vars(value) if hasattr(value, "__dict__") else {}
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return next((found for item in items if (found := _first_with_gradient(item)) is not None), None)
