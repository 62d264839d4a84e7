"""Which parameters `torch.autocast` casts: learned from use, to gather them in the dtype that it casts to."""

import torch


class LearnedCasts:
    """What autocast does to the parameters of a unit.

    A parameter that is used as it is too, an embedding that is the head at the same time, stays in its own dtype.

    Args:
        num_params: Of the unit.
    """

    def __init__(self, num_params: int) -> None:
        self._used_as_they_are: set[int] = set()
        self._dtypes: list[torch.dtype | None] = [None] * num_params

    def note_cast(self, slot: int, dtype: torch.dtype) -> None:
        """Parameter `slot` was cast to `dtype`."""
        if slot not in self._used_as_they_are:
            self._dtypes[slot] = dtype

    def note_use(self, slot: int) -> None:
        """Parameter `slot` was used as it is, under autocast."""
        self._used_as_they_are.add(slot)
        self._dtypes[slot] = None

    @property
    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        """The dtype to gather each parameter in, under autocast; None for its own."""
        return tuple(self._dtypes)
