"""Calls of functions that a program passed: an error of theirs names the argument that they were passed as."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dshard.errors import ArgumentError, DShardError

T = TypeVar("T")
_PASSED_ON = (DShardError, torch.OutOfMemoryError, MemoryError)  # these say enough, and callers handle them


def call_given(who: str, argument: str, function: Callable[..., T], *args: Any, about: str = "", **kwargs: Any) -> T:
    """Call a function that a program passed as an argument of dshard's.

    Args:
        who: The function of dshard's that it was passed to.
        argument: The name of the argument.
        function: What was passed.
        args: Its arguments.
        about: What it was called for, such as "for layers.0.weight".
        kwargs: Its arguments by name.

    Raises:
        ArgumentError: It raised; with the exception as its cause. Errors of dshard's, and those of memory that runs
            out, are passed on as they are.
    """
    try:
        return function(*args, **kwargs)
    except _PASSED_ON:
        raise
    except Exception as error:
        where = f" {about}" if about else ""
        raise ArgumentError(
            f"{who}: {argument} must be a function that can be called as documented, but it raised"
            f"{where}: {type(error).__name__}: {error}. Look at that function."
        ) from error
