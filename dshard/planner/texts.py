"""Bytes and seconds as people read and write them."""

from typing import Any

from dshard import arguments
from dshard.policies import read_bytes


def seconds_text(value: float) -> str:
    """Seconds, in the largest unit of which there is one."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value / 1e-6:.4g} us"


def bytes_text(num_bytes: float) -> str:
    """Bytes, in powers of 1024."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes:.0f} B"


def number_text(value: float) -> str:
    """A count or rate without an exponent: 3.14, 98.7, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def parse_bytes(who: str, name: str, value: int | str | None, *, or_none: bool = False) -> Any:
    """Read a number of bytes, as it is or as text like "38GiB" or "40e9", that is an argument of a function.

    Raises:
        ArgumentError: It is none, or not above 0.
    """
    number = read_bytes(value)
    allowed = "a number of bytes above 0, or text such as '38GiB'"
    arguments.expect(bool(number), who, name, value, allowed, "Pass '38GiB'.", or_none=or_none)
    return number
