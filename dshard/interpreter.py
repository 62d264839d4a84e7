"""What dshard asks of CPython itself: who calls, and who refers to an object.

[Note: CPython] Torch has no other answer to some questions: whether autograd alone holds a gradient, whether the step
of an optimizer that raised is over, whether `torch.nn.init` fills a parameter. They are answered by frames and
reference counts here, and nowhere else in the engine. `tests/unit/test_interpreter.py` shows each answer where it is
needed; it fails first where a version of Python or torch answers otherwise.
"""

import sys
from types import FrameType
from typing import Any

from torch import Tensor


def num_references(thing: object) -> int:
    """Number of Python's references to an object, that by the caller's name for it included."""
    return sys.getrefcount(thing) - _BY_ASKING - _kept_by_callers()


def _kept_by_callers() -> int:
    """How many references a caller keeps to what it passes on: one while dynamo is in charge of frames, else none.

    Its hook takes Python's short way of calling functions away, by which arguments move into the called frame.
    """
    thing = object()
    return _references_in_call(thing) - sys.getrefcount(thing) - 1


def _references_in_call(thing: object) -> int:
    return sys.getrefcount(thing)


def _of_one_name() -> int:
    thing = object()
    return num_references(thing)


_BY_ASKING = 0
_BY_ASKING = _of_one_name() - 1  # versions of Python differ in whether a call's arguments count


def _seen_of_one_name() -> int:
    thing = object()
    return sys.getrefcount(thing)


_BY_LOOKING = _seen_of_one_name() - 1

_REFS_OF_HOOK = 3  # to a gradient in its hook: autograd's tuple of arguments, the call of the partial, the hook's name
_USES_OF_HOOK = 2  # in C++: autograd's and Python's
_REFS_OF_BACKWARD = 5  # to a gradient in a backward: the tuples of four calls, and the name in the loop over it
_uses_of = Tensor._use_count  # type: ignore[attr-defined]


def is_alone_in_hook(grad: Tensor) -> bool:
    """Whether nobody but autograd and the calling hook, a `functools.partial` of a function, refers to a gradient.

    Nobody else can write to it then, before it is packed.
    """
    if grad._use_count() > _USES_OF_HOOK:  # type: ignore[attr-defined]
        return False
    num_more = sys.getrefcount(grad) - _REFS_OF_HOOK - 1 - _BY_LOOKING
    return num_more <= 0 or num_more <= _kept_by_callers()


def alone_in_backward(grads: tuple[Tensor | None, ...]) -> list[bool]:
    """Of each gradient given to a function's backward, whether nobody but autograd and that call refers to it.

    Args:
        grads: The tuple that the function was given, which it passes to its caller, and that one to this. Neither has
            another name for one of them.
    """
    most = _REFS_OF_BACKWARD + _BY_LOOKING
    return [grad is not None and sys.getrefcount(grad) <= most and _uses_of(grad) <= 1 for grad in grads]


def is_referred_to(tensor: Tensor, num_known: int) -> bool:
    """Whether anybody refers to a tensor besides the calling function's name and `num_known` others of Python."""
    return num_references(tensor) > num_known + 2 + _kept_by_callers() or tensor._use_count() > 1  # type: ignore[attr-defined]


def is_kept(value: Any, num_known: int) -> bool:
    """Whether anybody refers to an object besides the calling function's name and `num_known` others."""
    return num_references(value) > num_known + 2 + _kept_by_callers()


def frame_above(num_levels: int) -> FrameType:
    """The frame of the function that called the caller, `num_levels` further up."""
    return sys._getframe(num_levels + 2)


def is_on_stack(frame: FrameType) -> bool:
    """Whether a frame, one of this thread, is still running."""
    above: FrameType | None = sys._getframe(1)
    while above is not None:
        if above is frame:
            return True
        above = above.f_back
    return False


def runs_in_function(name: str) -> bool:
    """Whether a function of that name is running, of whatever module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False


def runs_in_file(path: str | None) -> bool:
    """Whether a function of a file is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == path:
            return True
        frame = frame.f_back
    return False


def file_that_called(folder: str) -> str | None:
    """The file of the innermost function that lies in another folder; None where a thread begins within it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(folder):
        frame = frame.f_back
    return frame.f_code.co_filename if frame is not None else None


def module_that_called() -> str | None:
    """The name of the module whose code called the calling function."""
    return sys._getframe(2).f_globals.get("__name__")


def first_argument_of_forward(kind: type) -> Any:
    """The first argument, if it is a `kind`, of the innermost running function named forward that takes no `self`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # Not of modules: to look at a frame's locals keeps them alive until it ends.
        if code.co_name == "forward" and code.co_argcount and code.co_varnames[0] != "self":
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, kind):
                return first
        frame = frame.f_back
    return None
