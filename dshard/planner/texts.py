"""Bytes, seconds and shares as people read them."""

__all__ = ["bytes_text", "number_text", "seconds_text", "share_text"]


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


def share_text(value: float) -> str:
    """A share as percents, of two digits at least where it is small."""
    return f"{value:.2%}" if abs(value) < 0.1 else f"{value:.0%}"
