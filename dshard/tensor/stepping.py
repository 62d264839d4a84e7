"""Whether an optimizer's step is running: what it computes with is equal on all ranks."""

from types import FrameType
from typing import ClassVar

import torch

from dshard.interpreter import is_on_stack


class _Step:
    """The frame in which the step of an optimizer runs, if one does.

    A step that raised leaves its frame here; so the frame counts only while it is on the stack of the caller.
    """

    frame: ClassVar[FrameType | None] = None
    graph_task: ClassVar[int] = -1


def begin(frame: FrameType) -> None:
    """An optimizer steps, in a frame."""
    _Step.frame = frame
    _Step.graph_task = torch._C._current_graph_task_id()


def end() -> None:
    """The optimizer has stepped."""
    _Step.frame = None


def is_stepping() -> bool:
    """Whether the caller runs inside of `Optimizer.step`, and not in the forward or backward of its closure."""
    if _Step.frame is None or torch.is_grad_enabled() or torch._C._current_graph_task_id() != _Step.graph_task:
        return False
    if is_on_stack(_Step.frame):
        return True
    _Step.frame = None
    return False
