"""What dynamo is kept from: functions that run as they are, around graphs and between them."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
_frames = torch._C._dynamo.eval_frame
_SKIPPED = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)


_ALL_SKIPPED = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def skipped(function: F) -> F:
    """Have dynamo leave a function alone, and all that it calls: one that autograd calls in a backward.

    That may run within a function that is compiled: the graph breaks there, and frames below are looked at.
    """
    _frames.set_code_exec_strategy(function.__code__, _ALL_SKIPPED)
    return function


def is_between_graphs() -> bool:
    """Whether what runs is part of something that torch.compile was called for: what it gives may go into a graph."""
    return Pause.depth > 0 or _frames.get_eval_frame_callback() not in (None, False)


class Pause:
    """Keeps dynamo out of what runs between two functions outside of graphs: one begins it, and another ends it."""

    depth: ClassVar[int] = 0  # of functions that run outside of graphs, and that torch.compile has called
    is_wanted: ClassVar[bool] = False
    _withheld: ClassVar[Any] = None  # what dynamo is to be called by again

    @classmethod
    def callback_after(cls, callback: Any) -> Any:
        """Return the callback to give back to dynamo when a function outside of graphs ends; None during a pause."""
        if cls.is_wanted and callback is not None:
            cls._withheld = callback
            return None
        if not cls.is_wanted and cls._withheld is not None:
            callback, cls._withheld = cls._withheld, None
        return callback


def outside_of_graphs(function: F) -> F:
    """Have a function run as it is, also where torch.compile calls it: as `torch.compiler.disable`, without its import.

    Its caller is the second frame up from it.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        callback = _frames.set_eval_frame(None)
        Pause.depth += callback is not None
        try:
            return function(*args, **kwargs)
        finally:
            Pause.depth -= callback is not None
            _frames.set_eval_frame(Pause.callback_after(callback))

    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    run._torchdynamo_disable_msg = "dshard runs it around graphs"  # type: ignore[attr-defined]
    _frames.set_code_exec_strategy(run.__code__, _SKIPPED)  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]
