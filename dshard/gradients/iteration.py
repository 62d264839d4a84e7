"""The step that a model is in, from one of its forwards to the next: told apart on all ranks, and left by an exception.

A rank may leave a step that the others are in: by an exception that its program catches. The numbers of steps, which
travel with each collective, bring them together again; what this rank knows of an exception it tells at once, so that
peers that wait for it need not wait for its next forward.
"""

import sys
from collections.abc import Sequence

import torch
from torch import nn

from dshard import collectives
from dshard.autograd import outside_autograd
from dshard.collectives import ShardGroup, TimesLeft
from dshard.errors import DivergenceError
from dshard.units.context import ModelContext
from dshard.units.unit import groups_of


class Iteration:
    """The step that one model is in.

    Args:
        context: Of the model.
    """

    def __init__(self, context: ModelContext) -> None:
        self._context = context
        self._groups: Sequence[ShardGroup] = ()
        self._left: TimesLeft | None = None  # how often this rank had left a step when the last forward began
        self._is_training = False
        self._is_pending = False  # whether a forward to be trained has begun no step yet, as nothing was gathered
        self._awaits_backward = False
        self._num_forwards = 0  # since the last backward, without one of their own; besides the last
        self._num_seen = 0  # of them, ahead of the last backward
        self._num_expected = 0  # of them, as many as were there twice
        self._is_quiet = False  # whether the forward began without synchronization of gradients
        self._is_local = False  # whether a backward would gather nothing
        self._handled = 0  # identity of the exception that the program was handling when the forward began

    def begin(self, root: nn.Module) -> bool:
        """A forward begins; gives whether a step was left since the last one began.

        A forward that no backward followed may mean an exception in between, of which nothing is known here: a loss.
        Ranks may run forwards by themselves where nothing is gathered, and backwards where gradients are not reduced.

        Raises:
            DivergenceError: This rank has left a step for one that peers are in, where it could not follow them.
        """
        units = self._context.units
        groups = self._groups = groups_of(units)
        self._check_whole(type(root).__name__, groups)
        was_quiet, is_quiet, is_pinned = self._is_quiet, False, False
        for unit in units:
            was_quiet |= unit.was_quiet
            is_quiet |= not unit.settings.requires_sync
            is_pinned |= unit.num_pins > 0
            unit.was_quiet = False
        self._drop_left(groups)
        self._num_forwards += int(self._awaits_backward)
        is_first = self._awaits_backward and self._num_forwards > self._num_expected
        if is_first and _are_everyone(groups) and not (was_quiet and self._is_local):
            self.leave("no backward followed a forward: an exception in a loss, or a branch on rank-local data")
        before, self._left = self._left, collectives.times_left(groups)
        self._is_training = root.training and torch.is_grad_enabled() and not is_pinned
        self._is_quiet, self._is_pending, self._awaits_backward = is_quiet, False, False
        handled = sys.exc_info()[1]
        self._handled = id(handled) if handled is not None else 0
        collectives.announce(groups)
        return before is not None and before.for_new != self._left.for_new

    def _drop_left(self, groups: Sequence[ShardGroup]) -> None:
        """Await nothing more of a forward whose step was left since, as by an exception in another model's."""
        if self._left is not None and self._left.at_all != collectives.times_left(groups).at_all:
            self._is_pending = self._awaits_backward = False

    def _check_whole(self, who: str, groups: Sequence[ShardGroup]) -> None:
        """Give up a step that others have begun, where this rank was torn out of the one before: all lose one more."""
        if collectives.is_torn(groups):
            collectives.begin(groups)
            with outside_autograd():
                collectives.give_up("it was within a forward or backward when others began the next", groups)
            error = DivergenceError(
                f"{who}: all ranks must begin a forward alike, but this one was within the forward or backward before "
                "it when others had begun it. Catch this error, call zero_grad() and go on with the next batch, as "
                "they do."
            )
            error.left_step = True
            raise error

    def end_forward(self) -> None:
        """It ended, by a result or an exception."""
        error = sys.exc_info()[1]
        was_idle = collectives.withdraw(self._groups)
        sharded = [unit for unit in self._context.units if unit.params and not unit.is_whole]
        if error is not None and id(error) != self._handled:
            if self._is_training or not was_idle or not all(unit.copies.is_current for unit in sharded):
                self._is_pending = was_idle
                self.leave(error)
        elif self._is_training:
            self._is_pending, self._awaits_backward = was_idle, bool(sharded)
            self._is_local = all(unit.is_gathered for unit in sharded)
        else:
            collectives.end(self._groups)

    def begin_backward(self) -> None:
        """A backward begins, maybe of it."""
        self._drop_left(self._groups)
        if self._is_pending:
            collectives.announce(self._groups)
            self._is_pending = False

    def end_backward(self) -> None:
        """A backward of it came to its end."""
        self._is_pending = collectives.withdraw(self._groups)
        collectives.end(self._groups)
        if self._num_forwards == self._num_seen:
            self._num_expected = max(self._num_expected, self._num_seen)
        self._num_seen, self._num_forwards = self._num_forwards, 0
        self._awaits_backward = False

    def leave(self, error: BaseException | str) -> None:
        """Give the step up, because of an exception.

        Args:
            error: The exception, or what is known of it.

        Communicates:
            A header to each peer; nobody waits.
        """
        groups = self._groups or groups_of(self._context.units)
        self._drop_left(groups)
        if collectives.withdraw(groups) or self._is_pending:  # of a step that the others are in, or come to
            collectives.begin(groups)
        self._is_pending = self._awaits_backward = False
        with outside_autograd():
            collectives.give_up(error if isinstance(error, str) else f"{type(error).__name__}: {error}", groups)


def _are_everyone(groups: Sequence[ShardGroup]) -> bool:
    """Whether all ranks of the program train the model: stages of a pipeline may differ in their forwards."""
    return max((group.world_size for group in groups), default=0) == collectives.world_size()
