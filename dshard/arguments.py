"""Checks that public functions make of their arguments on their first lines.

    recurse = arguments.boolean("set_reshard_after_backward", "recurse", recurse)

Each check takes the name of the function, the name of the argument and its value, and returns the value as the function
uses it: numbers of NumPy and of 0-d tensors become Python's. A bool is no number, and NaN is never allowed. A wrong
value raises an `ArgumentError` that names the function, the argument, the value, what is allowed, and what to pass.
"""

import math
import os
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from dshard.errors import ArgumentError, DShardError

T = TypeVar("T")
_MAX_SHOWN = 80
_PASSED_ON = (DShardError, torch.OutOfMemoryError, MemoryError)  # these say enough, and callers handle them
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
_DTYPES |= {name: name for name in ("bfloat16", "float16", "float32")}


def wrong(who: str, name: str, value: Any, allowed: str, way: str, *, inside: str = "it") -> ArgumentError:
    """Make the error for a wrong argument.

    Args:
        who: The function.
        name: The argument.
        value: The wrong value: the argument, or something in it.
        allowed: What the argument may be, in words after "must be".
        way: What to pass, as a sentence.
        inside: The place of the value within the argument, such as "number 3 of it".
    """
    return ArgumentError(f"{who}: {name} must be {allowed}, but {inside} is {shown(value)}. {way}")


def shown(value: Any) -> str:
    """Shorten a value for a message, without communication and without many digits."""
    if isinstance(value, Tensor) and (hasattr(value, "placements") or value.numel() > 1 or value.is_meta):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, nn.Module):
        return f"a module {type(value).__name__}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a broken __repr__ must not hide the error that names the value
        text = f"a {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def nearest(value: Any, texts: Collection[str]) -> str:
    """Find the text that a misspelt one is likely to mean; the first of them if it resembles none."""
    close = get_close_matches(value.lower(), list(texts), n=1, cutoff=0.5) if isinstance(value, str) else []
    return close[0] if close else next(iter(texts))


def _or_none(allowed: str, is_optional: bool) -> str:
    comma = "," if ", " in allowed or " or " in allowed else ""
    return f"{allowed}{comma} or None" if is_optional else allowed


def expect(
    is_right: bool, who: str, name: str, value: T, allowed: str, way: str, *, or_none: bool = False, inside: str = "it"
) -> T:
    """Return a value that is right, or None where that is allowed.

    Raises:
        ArgumentError: It is neither.
    """
    if is_right or (or_none and value is None):
        return value
    raise wrong(who, name, value, _or_none(allowed, or_none), way, inside=inside)


def instance(who: str, name: str, value: T, kind: type, way: str, *, or_none: bool = False) -> T:
    """Check that an argument is an object of a class."""
    article = "an" if kind.__name__[0] in "AEIO" else "a"
    return expect(isinstance(value, kind), who, name, value, f"{article} {kind.__name__}", way, or_none=or_none)


def fields(made: Any, check: Callable[..., Any], *names: str, **how: Any) -> None:
    """Check fields of a dataclass that is being made, which may be frozen, and keep what the check returns.

    Args:
        made: The object, in its `__post_init__`.
        check: A check of this file.
        names: The fields.
        how: More arguments of the check.
    """
    who = type(made).__name__
    for name in names:
        value = getattr(made, name)
        found = check(who, name, value, **how)
        if found is not value:
            object.__setattr__(made, name, found)


def plain_scalar(value: Any) -> Any:
    """Take the number out of a 0-d array or tensor; return anything else as it is."""
    is_single = getattr(value, "shape", None) == () and hasattr(value, "item") and not hasattr(value, "placements")
    if not is_single or (isinstance(value, Tensor) and value.is_meta):
        return value
    return value.item()


def boolean(who: str, name: str, value: Any) -> bool:
    """Check that an argument is a bool."""
    if value is True or value is False:
        return value
    found = value if type(value) is bool else plain_scalar(value)
    expect(isinstance(found, bool), who, name, value, "a bool", "Pass True or False.")
    return bool(found)


def is_count(value: Any, least: int = 1) -> bool:
    """Whether a value is an integer of at least `least`, below 2**63."""
    found = value if type(value) is int else plain_scalar(value)
    return isinstance(found, Integral) and not isinstance(found, bool) and least <= int(found) < 2**63


def count(who: str, name: str, value: Any, *, least: int = 1, way: str | None = None, or_none: bool = False) -> Any:
    """Check that an argument is an integer of at least `least`, below 2**63."""
    if type(value) is int and least <= value < 2**63:
        return value
    allowed = f"an integer of at least {least}"
    found = plain_scalar(value)
    expect(is_count(found, least), who, name, value, allowed, way or f"Pass {max(1, least)}.", or_none=or_none)
    return None if value is None else int(found)


def number(
    who: str,
    name: str,
    value: Any,
    is_right: Callable[[float], bool],
    allowed: str,
    way: str,
    *,
    or_none: bool = False,
) -> Any:
    """Check that an argument is a number for which `is_right` holds."""
    if type(value) is float and is_right(value):  # thousands of costs come this way
        return value
    found = value if type(value) in (int, float) else plain_scalar(value)
    try:
        is_number = isinstance(found, Real) and not isinstance(found, bool) and is_right(float(found))
    except OverflowError:  # an integer beyond any float
        is_number = False
    expect(is_number, who, name, value, allowed, way, or_none=or_none)
    if value is None:
        return None
    return int(found) if isinstance(found, Integral) else float(found)


def above_0(who: str, name: str, value: Any, *, or_none: bool = False) -> Any:
    """Check that an argument is a finite number above 0."""
    allowed = "a finite number above 0"
    return number(who, name, value, lambda x: 0 < x < math.inf, allowed, "Pass 1.0.", or_none=or_none)


def from_0(
    who: str,
    name: str,
    value: Any,
    allowed: str = "a finite number, 0 or more",
    way: str = "Pass 0.",
    *,
    or_none: bool = False,
) -> Any:
    """Check that an argument is a finite number of at least 0, such as seconds or bytes."""
    if type(value) is int and 0 <= value < 2**63:
        return value
    return number(who, name, value, _is_from_0, allowed, way, or_none=or_none)


def _is_from_0(value: float) -> bool:
    return 0 <= value < math.inf


def text(who: str, name: str, value: Any, *, or_none: bool = False) -> Any:
    """Check that an argument is a str."""
    return expect(isinstance(value, str), who, name, value, "text", "Pass a str.", or_none=or_none)


def choice(who: str, name: str, value: Any, *choices: str | None) -> Any:
    """Check that an argument is one of some texts; None may be among the choices."""
    if isinstance(value, str | None) and value in choices:
        return value
    texts = [each for each in choices if each is not None]
    raise wrong(who, name, value, f"one of {choices}", f"Pass {nearest(value, texts)!r}.")


def is_path(value: Any) -> bool:
    """Whether a value can name a file."""
    where = os.fspath(value) if isinstance(value, (str, os.PathLike)) else ""
    return isinstance(where, str) and where != "" and "\0" not in where


def path(who: str, name: str, value: Any, *, or_none: bool = False) -> Any:
    """Check that an argument is a path that can name a file."""
    way = "Pass the path of a file."
    return expect(is_path(value), who, name, value, "a path, as text or a Path", way, or_none=or_none)


def function(who: str, name: str, value: Any, of: str, way: str, *, or_none: bool = False) -> Any:
    """Check that an argument can be called, and is no class."""
    is_right = callable(value) and not isinstance(value, type)
    return expect(is_right, who, name, value, f"a function of {of}", way, or_none=or_none)


def is_device(value: Any) -> bool:
    """Whether a value is a device of torch, or its text."""
    try:
        return isinstance(value, torch.device) or (isinstance(value, str) and torch.device(value) is not None)
    except RuntimeError:
        return False


def dtype(who: str, name: str, value: Any, *, or_none: bool = False) -> Any:
    """Check that an argument is a floating-point dtype."""
    is_right = isinstance(value, torch.dtype) and value.is_floating_point
    return expect(is_right, who, name, value, "a floating-point dtype", dtype_way(value), or_none=or_none)


def dtype_way(value: Any) -> str:
    """Say which dtype to pass in the place of another value, such as 'bf16'."""
    return f"Pass torch.{_DTYPES[nearest(value, _DTYPES)]}."


def module(who: str, name: str, value: Any, *, or_none: bool = False) -> Any:
    """Check that an argument is an `nn.Module`."""
    is_right = isinstance(value, nn.Module)
    return expect(is_right, who, name, value, "an nn.Module", "Pass the model.", or_none=or_none)


def is_of(value: Any, name: str) -> bool:
    """Whether a value is of a class of dshard's, by the name of the class: it lies above this file, or loads late."""
    return any(c.__name__ == name and c.__module__.startswith("dshard.") for c in type(value).__mro__)


def is_sharded(value: Any) -> bool:
    """Whether a value is a module that `fully_shard` was called on."""
    return is_of(value, "FSDPModule")


def sharded_module(who: str, name: str, value: Any) -> Any:
    """Check that an argument is a module that `fully_shard` was called on."""
    allowed = "a module that fully_shard was called on"
    return expect(is_sharded(value), who, name, value, allowed, "Call fully_shard on it first.")


def items(value: Any) -> tuple[Any, ...] | None:
    """The values in a list, a tuple or another iterable; None for text, mappings, tensors, and what is no iterable."""
    if isinstance(value, (str, bytes, Mapping, Tensor)):
        return None
    try:
        return tuple(value)
    except TypeError:
        return None


def several(
    who: str, name: str, value: Any, is_right: Callable[[Any], bool], allowed: str, way: str, *, least: int = 0
) -> tuple[Any, ...]:
    """Check that an argument is an iterable of values for each of which `is_right` holds; return them as a tuple."""
    found = value if type(value) is tuple else items(value)
    if found is None or len(found) < least:
        raise wrong(who, name, value, allowed, way)
    for place, each in enumerate(found):
        if not is_right(each):
            raise wrong(who, name, each, allowed, way, inside=f"number {place} of it")
    return found


def by_name(
    who: str, name: str, value: Any, is_right: Callable[[Any], bool], allowed: str, way: str, *, or_none: bool = False
) -> Any:
    """Check that an argument is a mapping with texts as keys, and values for each of which `is_right` holds."""
    expect(isinstance(value, Mapping), who, name, value, allowed, way, or_none=or_none)
    for key, each in value.items() if value is not None else ():
        expect(isinstance(key, str), who, name, key, _or_none(allowed, or_none), way, inside="a key of it")
        expect(is_right(each), who, name, each, _or_none(allowed, or_none), way, inside=f"for {key!r} it")
    return value


def sharded_modules(who: str, name: str, value: Any) -> tuple[Any, ...]:
    """Check that an argument is a list of modules that `fully_shard` was called on; return a tuple."""
    allowed = "a list of modules that fully_shard was called on"
    return several(who, name, value, is_sharded, allowed, "Pass [model].")


def optimizers(who: str, name: str, value: Any) -> tuple[Any, ...] | None:
    """Check that an argument is an optimizer, several or None; return a tuple or None."""
    if value is None or isinstance(value, Optimizer):
        return None if value is None else (value,)
    allowed = "an optimizer of torch.optim, or several, or None"
    way = "Leave it out: states move ahead of its next step."
    return several(who, name, value, lambda each: isinstance(each, Optimizer), allowed, way)


def call_given(who: str, argument: str, function: Callable[..., T], *args: Any, about: str = "", **kwargs: Any) -> T:
    """Call a function that a program passed as an argument.

    Args:
        who: The function of dshard's that it was passed to.
        argument: The name of the argument.
        function: The function to call.
        args: Its arguments.
        about: What the call is for, such as "for layers.0.weight".
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
