"""Forwards that run again in backward: what activation checkpointing recomputes is a forward, too.

A recomputation calls a function in the midst of a forward, below the modules that tell of one. So it is noted, while
the forward runs, which checkpointed regions lie in it, and their recomputations are made to tell.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.autograd.function import BackwardCFunction

from dshard.interpreter import first_argument_of_forward

_hooks = torch._C._autograd
_OF_CHECKPOINT = "torch.utils.checkpoint"
_RAN_IN_FORWARD = "_dshard_ran_in_forward"  # of an autograd function's context


class _Forwards(Protocol):
    """What is told of forwards."""

    def note_running(self, change: int) -> None:
        """A forward starts, or ends: `change` is 1 or -1."""


class _AsForward:
    """A function that is a forward when it is called again.

    Args:
        forwards: What is told.
        function: The function.
    """

    __slots__ = ("forwards", "function")

    def __init__(self, forwards: _Forwards, function: Callable[..., Any]) -> None:
        self.forwards, self.function = forwards, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards.note_running(1)
        try:
            return self.function(*args, **kwargs)
        finally:
            self.forwards.note_running(-1)


class Regions:
    """The checkpointed regions of a forward.

    Both kinds of `torch.utils.checkpoint` are found where a parameter is used in them: those that are not reentrant by
    the hooks that they have autograd save tensors with, reentrant ones by the context of their autograd function, as
    are functions of other libraries that keep what they recompute as `ctx.run_function`.
    """

    __slots__ = ("_around", "_is_recorded", "_seen")

    def __init__(self) -> None:
        self._around: list[Any] = []
        self._seen: object = None  # the innermost hook, as long as no other one comes
        self._is_recorded = False

    def begin(self) -> None:
        """A forward starts; regions around it are no part of it."""
        self._is_recorded = torch.is_grad_enabled()
        self._around = _frames() if _hooks._top_saved_tensors_default_hooks(True) is not None else []  # noqa: FBT003

    def end(self) -> None:
        """The forward ended."""
        self._around, self._seen, self._is_recorded = [], None, False

    def note_use(self, forwards: _Forwards) -> None:
        """A parameter is used in the forward that is running."""
        top = _hooks._top_saved_tensors_default_hooks(True)  # noqa: FBT003 - it takes no name
        if top is not None and top[0] is not self._seen:
            self._seen = top[0]
            for frame in _frames():
                if not any(frame is other for other in self._around):
                    frame.recompute_fn = _as_forward(frame.recompute_fn, forwards)
        if self._is_recorded and not torch.is_grad_enabled():
            ctx = first_argument_of_forward(BackwardCFunction)
            if ctx is not None and note_function(ctx, forwards, ran_in_forward=True):
                function = getattr(ctx, "run_function", None)
                if callable(function):
                    ctx.run_function = _as_forward(function, forwards)


def _as_forward(function: Callable[..., Any], forwards: _Forwards) -> Callable[..., Any]:
    """The function that tells of a forward, of several models maybe."""
    known = function
    while isinstance(known, _AsForward):
        if known.forwards is forwards:
            return function
        known = known.function
    return _AsForward(forwards, function)


def _frames() -> list[Any]:
    """Torch's records of the checkpointed regions that are open, innermost first."""
    found, popped = [], []
    while (top := _hooks._top_saved_tensors_default_hooks(True)) is not None:  # noqa: FBT003
        popped.append(top)
        pack = top[0]
        names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
        if getattr(pack, "__module__", "") == _OF_CHECKPOINT and "frame" in names:
            found.append((pack.__closure__ or ())[names.index("frame")].cell_contents)
        _hooks._pop_saved_tensors_default_hooks()
    for pair in reversed(popped):
        _hooks._push_saved_tensors_default_hooks(*pair)
    return [frame for frame in found if hasattr(frame, "recompute_fn")]


def runs_again_for_saved() -> bool:
    """Whether a region runs again, in backward, of a checkpoint that is not reentrant: for what it had saved."""
    pack = _hooks._top_saved_tensors_default_hooks(True)  # noqa: FBT003 - it takes no name
    return pack is not None and getattr(pack[0], "__module__", "") == _OF_CHECKPOINT


def note_function(ctx: Any, forwards: _Forwards, *, ran_in_forward: bool) -> bool:
    """Note of an autograd function whether it runs in a forward; gives whether that is new."""
    known = ctx.__dict__.setdefault(_RAN_IN_FORWARD, {})
    is_new = forwards not in known
    known.setdefault(forwards, ran_in_forward)
    return is_new


def note_exact_use(forwards: _Forwards) -> None:
    """A parameter is used outside of any forward, and not recorded: maybe in an autograd function."""
    ctx = first_argument_of_forward(BackwardCFunction)
    if ctx is not None:
        note_function(ctx, forwards, ran_in_forward=False)


def ran_in_forward(forwards: _Forwards) -> bool | None:
    """Whether the autograd function whose backward runs had run in a forward; None where that is not known."""
    known: dict[_Forwards, bool] = getattr(torch._C._current_autograd_node(), _RAN_IN_FORWARD, {})
    return known.get(forwards)
