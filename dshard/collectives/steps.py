"""Collectives that follow one another: each starts when the one before it was waited for."""

from collections.abc import Generator
from typing import Any, Generic, TypeVar

from dshard.collectives.group import Handle

T = TypeVar("T")


class Steps(Generic[T]):
    """Some collectives in flight, one after the other; the first one starts now.

    Who waits decides when the next one starts: at points of the program that are the same on all ranks.

    Args:
        steps: Yields the handle of each collective that it has started, and goes on once that was waited for; returns
            the result.
    """

    __slots__ = ("_error", "_handle", "_result", "_steps", "num_waited")

    def __init__(self, steps: Generator[Handle[Any], None, T]) -> None:
        self._steps = steps
        self._handle: Handle[Any] | None = None
        self._result: T | None = None
        self._error: BaseException | None = None
        self.num_waited = 0  # of the collectives
        self._go_on()

    def _go_on(self) -> None:
        try:
            self._handle = next(self._steps)
        except StopIteration as end:
            self._handle, self._result = None, end.value
        except BaseException as error:
            self._error = error
            raise

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to wait for."""
        return self._handle is None and self._error is None

    def advance(self, num_steps: int) -> bool:
        """Wait for the first `num_steps` collectives and start the one that follows; gives `is_done`.

        Raises:
            DivergenceError: As `Handle.wait`; again, if it is called again.
        """
        if self._error is not None:
            raise self._error
        while self._handle is not None and self.num_waited < num_steps:
            self._handle.wait()
            self.num_waited += 1
            self._go_on()
        return self._handle is None

    @property
    def result(self) -> T:
        """What came of it, once it is done."""
        assert self.is_done, "a collective is under way"
        return self._result  # type: ignore[return-value]
