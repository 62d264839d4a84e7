"""What each public argument may be; functions read theirs by one table, ahead of any change.

A bool is no number, and NaN none that is allowed; numbers of NumPy and of 0-d tensors become Python's. The error names
the function, the argument, what is wrong in it and what is allowed.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dshard import kinds
from dshard.argument_tables.table import TABLE

__all__ = ["TABLE", "checked", "read"]

T = TypeVar("T", bound=Callable[..., Any])
_OF_MODULES = ("FSDPModule.", "DataParallelNames.", "GradientChecks.")  # whose methods are known without the class


def checked(target: T) -> T:
    """Have a function, or the constructor of a class, read its arguments by its row of the table first."""
    name = target.__qualname__
    for owner in _OF_MODULES:
        name = name.removeprefix(owner)
    return kinds.checked_by(TABLE[name], name)(target)


def read(who: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a function as it wants them.

    Raises:
        ArgumentError: One of them is none that is allowed.
    """
    return kinds.read(who, TABLE[who], given)
