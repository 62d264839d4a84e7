"""The step that a model is in, from one of its forwards to the next: told apart on all ranks, and left by an exception.

A rank may leave a step that the others are in: by an exception that its program catches. The numbers of steps, which
travel with each collective, bring them together again; what this rank knows of an exception it tells at once, so that
peers that wait for it need not wait for its next forward.
"""

import sys
from collections.abc import Sequence

import torch
from torch import nn

from dshard.collectives import ShardGroup, begin, end, give_up, is_torn, num_started
from dshard.runtime.unit import Unit, groups_of

__all__ = ["Iteration"]


class Iteration:
    """Of one model."""

    def __init__(self) -> None:
        self._num_started = 0  # collectives, when it began
        self._awaits_backward = False
        self._num_forwards = 0  # since the last backward, without one of their own; besides the last
        self._num_seen = 0  # of them, ahead of the last backward
        self._num_expected = 0  # of them, if it was as many twice
        self._is_quiet = False  # whether it began without synchronization of gradients
        self._is_shared = False  # whether the forward is one that all ranks run
        self._handled = 0  # identity of the exception that the program was handling when the forward began

    def begin(self, root: nn.Module, units: Sequence[Unit]) -> bool:
        """A forward begins a step; gives whether the last one was left within its forward or backward.

        The last one counts if anything came of it, or if no backward followed. The latter may mean an exception in
        between, of which nothing is known here: a loss. Ranks may run forwards by themselves where nothing is
        gathered, and backwards where gradients are not reduced.
        """
        groups = groups_of(units)
        is_training = root.training and torch.is_grad_enabled() and not any(unit.num_pins for unit in units)
        gathers = not all(unit.is_whole for unit in units if unit.params)
        was_quiet = self._is_quiet or any(unit.was_quiet for unit in units)
        self._is_quiet = any(not unit.settings.requires_sync for unit in units)
        for unit in units:
            unit.was_quiet = False
        self._num_forwards += int(self._awaits_backward)
        if self._awaits_backward and self._num_forwards > self._num_expected and not was_quiet:
            self.leave("no backward followed its forward", groups)
        is_left = is_torn(groups)
        begin(groups, is_new=self._awaits_backward or num_started(groups) != self._num_started)
        self._num_started = num_started(groups)
        self._awaits_backward, self._is_shared = is_training and gathers, is_training or gathers
        handled = sys.exc_info()[1]
        self._handled = id(handled) if handled is not None else 0
        return is_left

    def end_forward(self, groups: Sequence[ShardGroup]) -> None:
        """It ended, by a result or an exception."""
        error = sys.exc_info()[1]
        if error is not None and id(error) != self._handled and self._is_shared:
            self.leave(error, groups, is_torn=True)

    def end_backward(self, groups: Sequence[ShardGroup]) -> None:
        """A backward of it came to its end."""
        end(groups)
        self._num_expected = self._num_forwards if self._num_forwards == self._num_seen else 0
        self._num_seen, self._num_forwards = self._num_forwards, 0
        self._awaits_backward = False

    def leave(self, error: BaseException | str, groups: Sequence[ShardGroup], *, is_torn: bool = False) -> None:
        """Give the step up, because of an exception.

        Args:
            error: The exception, or what is known of it.
            groups: The ranks of the model.
            is_torn: Whether it came within a forward or backward.

        Communicates:
            A header to each peer; nobody waits.
        """
        is_torn |= self._awaits_backward
        self._awaits_backward = False
        why = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        give_up(why, groups if is_torn else ())
