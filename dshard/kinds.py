"""Kinds of arguments: each reads a value, or refuses it with what is allowed and a way out."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from dshard.arguments import nearest, shown
from dshard.errors import ArgumentError

T = TypeVar("T", bound=Callable[..., Any])


class Refused(Exception):  # noqa: N818 - never leaves `read`
    """A value is not of a kind.

    Args:
        value: What is wrong.
        place: Where that is: the argument itself, or something in it.
        way: What to do, where that can be told better than for the kind as a whole.
    """

    def __init__(self, value: Any, place: str = "it", way: str | None = None) -> None:
        super().__init__()
        self.value, self.place, self.way = value, place, way


@dataclass(frozen=True, slots=True)
class Kind:
    """What an argument may be.

    Args:
        allowed: That, in words that go after "must be".
        way: What to pass; a sentence.
        read: Gives a value as the function wants it: numbers of NumPy and of 0-d tensors as Python's. Raises `Refused`.
    """

    allowed: str
    way: str
    read: Callable[[Any], Any]


Row = Mapping[str, Kind]


def read(who: str, row: Row, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as a function wants them; those without a kind as they are.

    Args:
        who: The function.
        row: Its arguments.
        given: Their values.

    Raises:
        ArgumentError: One of them is none that is allowed.
    """
    found = dict(given)
    for name, value in given.items():
        if name in row:
            try:
                found[name] = row[name].read(value)
            except Refused as refused:
                raise _wrong(who, name, row[name], refused) from None
    return found


def _wrong(who: str, name: str, one: Kind, refused: Refused) -> ArgumentError:
    return ArgumentError(
        f"{who}: {name} must be {one.allowed}, but {refused.place} is {shown(refused.value)}. {refused.way or one.way}"
    )


def checked_by(row: Row, who: str) -> Callable[[T], T]:
    """Have a function, or the constructor of a class, read its arguments by a row ahead of anything else.

    Defaults are not read. What the function has no argument for is Python's to refuse.
    """

    def decorate(target: T) -> T:
        where: Any = target
        call = where.__init__ if isinstance(target, type) else where
        parameters = inspect.signature(call).parameters.values()
        names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]

        @functools.wraps(call)
        def checked(*args: Any, **kwargs: Any) -> Any:
            by_place = read(who, row, dict(zip(names, args, strict=False)))
            return call(*by_place.values(), *args[len(names) :], **read(who, row, kwargs))

        if isinstance(target, type):
            where.__init__ = checked
            return target
        return cast(T, checked)

    return decorate


def kind(allowed: str, way: str, is_right: Callable[[Any], bool]) -> Kind:
    """A kind of values that are taken as they are."""

    def take(value: Any) -> Any:
        if not is_right(value):
            raise Refused(value)
        return value

    return Kind(allowed, way, take)


def optional(one: Kind) -> Kind:
    """A kind, or None."""
    return Kind(_or(one.allowed, "None"), one.way, lambda value: None if value is None else one.read(value))


def either(*kinds: Kind, allowed: str | None = None) -> Kind:
    """The first of some kinds that a value is of."""

    def take(value: Any) -> Any:
        refusals = []
        for each in kinds:
            try:
                return each.read(value)
            except Refused as refused:
                refusals.append(refused)
        # What is told is what is wrong in a container, or else what a text is likely to mean.
        raise max(refusals, key=lambda refused: (refused.place != "it", refused.way is not None))

    texts = functools.reduce(_or, (each.allowed for each in kinds))
    return Kind(allowed or texts, kinds[0].way, take)


def _or(first: str, second: str) -> str:
    return f"{first}, or {second}" if ", " in first or " or " in first else f"{first} or {second}"


def one_of(*values: Any) -> Kind:
    """One of some texts, or None."""
    texts = [value for value in values if isinstance(value, str)]

    def take(value: Any) -> Any:
        if isinstance(value, str) and value in texts:
            return value
        if value is None and None in values:
            return value
        raise Refused(value, way=f"Pass {nearest(value, texts)!r}.")

    return Kind(f"one of {values}", f"Pass {texts[0]!r}.", take)


def _scalar(value: Any) -> Any:
    """The number in a 0-d array or tensor, or a scalar of NumPy's; anything else as it is."""
    is_single = getattr(value, "shape", None) == () and hasattr(value, "item") and not hasattr(value, "placements")
    if not is_single or (isinstance(value, Tensor) and value.is_meta):
        return value
    return value.item()


def number(allowed: str, way: str, is_right: Callable[[Any], bool]) -> Kind:
    """A number, of Python, NumPy or a 0-d tensor."""

    def take(value: Any) -> Any:
        found = value if type(value) in (int, float) else _scalar(value)
        if isinstance(found, bool) or not isinstance(found, Real):
            raise Refused(value)
        try:
            if isinstance(found, Integral):
                float(found)
            else:
                found = float(found)
        except OverflowError:
            raise Refused(value) from None
        if not is_right(found):
            raise Refused(value)
        return int(found) if isinstance(found, Integral) else found

    return Kind(allowed, way, take)


def count(least: int, way: str | None = None) -> Kind:
    """An integer, of Python, NumPy or a 0-d tensor; a bool is none."""

    def take(value: Any) -> Any:
        found = value if type(value) is int else _scalar(value)
        if isinstance(found, bool) or not isinstance(found, Integral) or not least <= int(found) < 2**63:
            raise Refused(value)
        return int(found)

    return Kind(f"an integer of at least {least}", way or f"Pass {max(1, least)}.", take)


def _flag(value: Any) -> bool:
    found = value if type(value) is bool else _scalar(value)
    if not isinstance(found, bool):
        raise Refused(value)
    return found


FLAG = Kind("a bool", "Pass True or False.", _flag)
TEXT = kind("text", "Pass a str.", lambda value: isinstance(value, str))
ANYTHING = kind("anything", "", lambda value: True)


def instance(types: type | tuple[type, ...], allowed: str, way: str) -> Kind:
    """An object of a class, or of several."""
    return kind(allowed, way, lambda value: isinstance(value, types))


def ours(name: str, way: str, allowed: str | None = None) -> Kind:
    """An object of a class of dshard's, which is known by its name: kinds lie below all of them."""

    def is_right(value: Any) -> bool:
        return any(each.__name__ == name and each.__module__.startswith("dshard.") for each in type(value).__mro__)

    return kind(allowed or f"a {name}", way, is_right)


def function(of: str, way: str) -> Kind:
    """Something that can be called, other than a class."""
    return kind(f"a function of {of}", way, lambda value: callable(value) and not isinstance(value, type))


def list_of(one: Kind, allowed: str, way: str, *, least: int = 0) -> Kind:
    """Several values of a kind in a list or tuple, or another iterable but text, mappings and tensors; as a tuple."""

    def take(value: Any) -> tuple[Any, ...]:
        if isinstance(value, (str, bytes, Mapping, Tensor)) or not hasattr(value, "__iter__"):
            raise Refused(value)
        try:
            each_of_it = iter(value)
        except TypeError:  # also of an array without dims, which says that it can be iterated over
            raise Refused(value) from None
        found = []
        for place, each in enumerate(each_of_it):
            try:
                found.append(one.read(each))
            except Refused as refused:
                place_in = "" if refused.place == "it" else f"{refused.place} of "
                raise Refused(refused.value, f"{place_in}number {place} of it", refused.way) from None
        if len(found) < least:
            raise Refused(value)
        return tuple(found)

    return Kind(allowed, way, take)


def mapping_of(one: Kind, allowed: str, way: str, *, keys: type = str, least: int = 0) -> Kind:
    """Values of a kind by text, or by another type."""

    def take(value: Any) -> dict[Any, Any]:
        if not isinstance(value, Mapping) or len(value) < least:
            raise Refused(value)
        wrong = [key for key in value if not isinstance(key, keys) or isinstance(key, bool)]
        if wrong:
            raise Refused(wrong[0], "a key of it")
        found = {}
        for key, each in value.items():
            try:
                found[key] = one.read(each)
            except Refused as refused:
                raise Refused(refused.value, f"for {key!r} it", refused.way) from None
        return found

    return Kind(allowed, way, take)


def _path(value: Any) -> Any:
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str) or not os.fspath(value):
        raise Refused(value)
    if "\0" in os.fspath(value):
        raise Refused(value)
    return value


MODULE = instance(nn.Module, "an nn.Module", "Pass the model.")
PATH = Kind("a path, as text or a Path", "Pass the path of a file.", _path)
_TENSOR = instance(Tensor, "a tensor", "Pass a tensor.")
_TENSORS = list_of(_TENSOR, "parameters", "Pass model.parameters().")
TENSORS = Kind(
    "a tensor, or an iterable of tensors",
    "Pass model.parameters().",
    lambda value: (value,) if isinstance(value, Tensor) else _TENSORS.read(value),
)
