"""The step that a model is in, and what an exception in it means: for the next one, and for the other ranks."""

import sys

import torch
from torch import nn

from dshard import collectives
from dshard.autograd import outside_autograd
from dshard.units.context import ModelContext
from dshard.units.unit import groups_of


class Iteration:
    """Counts the steps of one model, and the exceptions that have ended forwards and backwards of it.

    Where all ranks have had an exception, all begin the next step as they began the first. Where one alone has, its
    count is in the headers of its next collectives, which its peers refuse; by `collectives.note_caught` they can name
    it.

    Args:
        context: Of the model.
    """

    def __init__(self, context: ModelContext) -> None:
        self._context = context
        self._step = 1  # one more than backwards that have ended
        self._is_training = False
        self._num_started = 0  # collectives, when the forward began
        self._has_failed = False  # by an exception, since the last forward began
        self._handled = 0  # identity of the exception that the program was handling when the forward began

    def begin(self, root: nn.Module) -> bool:
        """A forward begins; gives whether an exception has ended the last one, or its backward."""
        units = self._context.units
        collectives.note_step()
        self._is_training = root.training and torch.is_grad_enabled() and not any(unit.num_pins for unit in units)
        self._num_started = collectives.num_started(groups_of(units))
        handled = sys.exc_info()[1]
        self._handled = id(handled) if handled is not None else 0
        has_failed, self._has_failed = self._has_failed, False
        return has_failed

    def end_forward(self) -> None:
        """It ended, by a result or an exception.

        One rank may run an evaluation by itself where nothing is gathered: an exception there is its own matter.
        """
        error = sys.exc_info()[1]
        if error is None or id(error) == self._handled:
            return
        units = self._context.units
        sharded = [unit for unit in units if unit.params and not unit.is_whole]
        has_communicated = collectives.num_started(groups_of(units)) != self._num_started
        if self._is_training or has_communicated or not all(unit.copies.is_current for unit in sharded):
            self.fail(error)

    def end_backward(self) -> None:
        """A backward came to its end."""
        self._step += 1

    def fail(self, error: BaseException | str) -> None:
        """An exception has ended the step; several places may see the same one.

        Args:
            error: The exception, or what the rank did, as a sentence without its subject.
        """
        if self._has_failed:
            return
        self._has_failed = True
        collectives.note_failure(groups_of(self._context.units))
        text = error if isinstance(error, str) else f"raised {' '.join(f'{type(error).__name__}: {error}'.split())}"
        with outside_autograd():
            collectives.note_caught(text, self._step)
