"""The mode in which the runtime computes, whatever the caller's, and the ranges that a profiler sees."""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import profiler

_NOTHING: AbstractContextManager[Any] = nullcontext()


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


class Watcher(Protocol):
    """Who looks at what is gathered and reduced while it is, as a profiler does."""

    def watch(self, what: str, label: str, model: object) -> AbstractContextManager[Any]:
        """A context for something that is done for a unit; `model` stands for the model that it is of."""


class Watchers:
    """Those of this process."""

    present: ClassVar[list[Watcher]] = []


def profiled(what: str, label: str, model: object) -> AbstractContextManager[Any]:
    """A range `dshard::<what> <label>` where a profiler is on, or somebody watches; else no more than a look."""
    if Watchers.present:
        if len(Watchers.present) == 1 and not profiler._is_profiler_enabled:
            return Watchers.present[0].watch(what, label, model)
        stack = ExitStack()
        for watcher in Watchers.present:
            stack.enter_context(watcher.watch(what, label, model))
        if profiler._is_profiler_enabled:
            stack.enter_context(profiler.record_function(f"dshard::{what} {label}"))
        return stack
    if profiler._is_profiler_enabled:
        return profiler.record_function(f"dshard::{what} {label}")
    return _NOTHING


class outside_autograd:  # noqa: N801 - a context manager, named as torch names its own
    """No gradients, no inference tensors, and none of a transform of `torch.func`, which hide their memory.

    `inference_mode(False)` and `no_grad()` in a quarter of their time.
    """

    __slots__ = ("_inference", "_transforms", "_was_enabled")

    def __enter__(self) -> None:
        self._inference: Any = None
        self._transforms: Any = None
        if peek_interpreter_stack() is not None:
            self._transforms = torch._C._DisableFuncTorch()
            self._transforms.__enter__()
        if torch.is_inference_mode_enabled():
            self._inference = torch.inference_mode(mode=False)
            self._inference.__enter__()
        self._was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # noqa: FBT003 - it takes no name

    def __exit__(self, *raised: object) -> None:
        torch._C._set_grad_enabled(self._was_enabled)
        if self._inference is not None:
            self._inference.__exit__(*raised)
        if self._transforms is not None:
            self._transforms.__exit__(*raised)
