"""Files of plans, figures and pictures, and frozen dataclasses as JSON values in them."""

import dataclasses
import io
import os
import secrets
import stat
import types
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from dshard.errors import PlanError
from dshard.policies import Strategy

_T = TypeVar("_T")
_WAY_OUT = "Pass what Plan.save or dshard plan --out wrote."


def read_text(path: Path, what: str = "a plan", way_out: str = _WAY_OUT) -> str:
    """The text of a file.

    Args:
        path: Of it.
        what: It must be, for messages.
        way_out: What to do otherwise.

    Raises:
        PlanError: It is not there, cannot be read, or is no text.
    """
    wrong = f"{path}: must be {what} as JSON, but"
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe that nobody writes to would wait
        with open(opened, encoding="utf-8") as file:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise PlanError(f"{wrong} it is no regular file. {way_out}")
            return file.read()
    except FileNotFoundError:
        raise PlanError(f"{wrong} there is no such file. Pass a path that exists.") from None
    except OSError as error:
        raise PlanError(f"{wrong} it cannot be read: {error.strerror}. {way_out}") from error
    except PlanError:
        raise
    except ValueError as error:
        raise PlanError(f"{wrong} it is no text ({error}). {way_out}") from error


def write_text(path: Path, text: str) -> None:
    """`write_file`, for a plan.

    Raises:
        PlanError: It cannot be written.
    """
    try:
        write_file(path, text.encode())
    except OSError as error:
        raise PlanError(
            f"{path}: must be a file that can be written, but writing says: {error.strerror}. Pass another path, or "
            "make room."
        ) from error


def write_file(path: Path, content: bytes) -> None:
    """Write a file that somebody has named whole, or leave what was there; a link is followed, as its maker meant.

    What is no file, such as a terminal, is written to as it is.

    Raises:
        OSError: It cannot be written.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            file.write(content)
        return
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def write_picture(path: Path, figure: Any, *, dpi: int) -> None:
    """Write a figure of matplotlib's as the path's suffix says.

    Raises:
        OSError: It cannot be written.
    """
    path, drawn = Path(path), io.BytesIO()
    figure.savefig(drawn, dpi=dpi, format=path.suffix.removeprefix(".").lower() or None)
    write_file(path, drawn.getvalue())


def to_record(value: Any) -> Any:
    """A dataclass, and all that it holds, as dicts, lists, numbers and text."""
    if isinstance(value, Strategy):
        return str(value)
    if dataclasses.is_dataclass(value):
        fields = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
        # A float that was given as an int, 8 for 8.0, is equal when it is read again, and is to have the same text.
        return {field.name: float(each) if field.type is float else to_record(each) for field, each in fields}
    if isinstance(value, (tuple, list)):
        return [to_record(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): to_record(each) for key, each in value.items()}
    return value


def of_record(kind: type[_T], record: Any, where: str = "plan") -> _T:
    """The dataclass that `to_record` made a record of.

    Args:
        kind: Its class.
        record: As JSON gives it.
        where: What is read, for messages.

    Raises:
        PlanError: A field is missing, unknown, or of another type.
    """
    if not isinstance(record, dict):
        raise _wrong(where, "an object", record)
    hints = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(record.keys() - fields.keys())
    missing = sorted(fields.keys() - record.keys())
    if unknown or missing:
        which = f"{unknown[0]!r} is unknown" if unknown else f"{missing[0]!r} is missing"
        raise PlanError(
            f"{where}: must have the fields {', '.join(fields)}, but {which}. Read it with the version that wrote it."
        )
    return kind(**{name: _of_value(hints[name], record[name], f"{where}.{name}") for name in fields})


def _of_value(hint: Any, value: Any, where: str) -> Any:
    """A value of the type that a field declares."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (inner,) = (arg for arg in args if arg is not type(None))
        return _of_value(inner, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(where, "a list", value)
        return tuple(_of_value(args[0], each, f"{where}[{i}]") for i, each in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise _wrong(where, "an object", value)
        return {args[0](key): _of_value(args[1], each, f"{where}[{key}]") for key, each in value.items()}
    if hint is Strategy:
        return Strategy.of(value)
    if dataclasses.is_dataclass(hint):
        return of_record(hint, value, where)  # type: ignore[arg-type]
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise _wrong(where, hint.__name__, value)
    return value


def _wrong(where: str, wanted: str, value: Any) -> PlanError:
    return PlanError(f"{where}: must be {wanted}, but it is {value!r}. Read it with the version that wrote it.")
