"""Is a backward that began still running? Its Python frame tells."""

import sys
from collections.abc import Callable
from types import FrameType

__all__ = ["frame_of_backward", "is_running"]


def _find_frame(is_it: Callable[[FrameType], bool]) -> FrameType | None:
    """The innermost such frame of any thread: on a GPU, backward runs on a thread of its own."""
    frames, current = sys._current_frames(), None
    try:
        for current in frames.values():
            while current is not None:
                if is_it(current):
                    return current
                current = current.f_back
    finally:
        del frames, current  # one of them is this call's own: a cycle
    return None


def frame_of_backward() -> FrameType | None:
    """The frame in which autograd was started."""
    return _find_frame(lambda frame: frame.f_code.co_name == "_engine_run_backward")


def is_running(frame: FrameType) -> bool:
    """Whether a frame is on the stack of any thread."""
    return _find_frame(lambda other: other is frame) is not None
