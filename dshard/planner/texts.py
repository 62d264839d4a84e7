"""Bytes and seconds as people read and write them."""

from dshard.errors import PlanError
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


def parse_bytes(value: int | str, name: str) -> int:
    """A number of bytes, as it is or as text like "38GiB" or "40e9".

    Raises:
        PlanError: It is none, or not above 0.
    """
    number = read_bytes(value)
    if not number:
        raise PlanError(f"plan: {name} must be a number of bytes above 0, but it is {value!r}. Pass '38GiB'.")
    return number
