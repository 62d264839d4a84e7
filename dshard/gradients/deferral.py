"""Gradients that are reduced once for several backwards, with the last of them."""


class Deferral:
    """When a unit reduces whose gradients stay whole until the optimizer's step (`zero1`).

    How many backwards make a step is what the last step showed. Until one did, every backward reduces, so that ranks
    which did not use a parameter have its gradient, too; if there were fewer of them, the gradients are reduced when
    they are read.
    """

    def __init__(self) -> None:
        self._num_backwards = 0  # since gradients were dropped
        self._num_expected: int | None = None

    def note_backward(self, *, is_first: bool) -> None:
        """A backward brings gradients; `is_first` where none were there."""
        if is_first:
            self._num_expected, self._num_backwards = self._num_backwards or None, 0
        self._num_backwards += 1

    @property
    def is_due(self) -> bool:
        """Whether the gradients leave with this backward."""
        return self._num_expected is None or self._num_backwards >= self._num_expected
