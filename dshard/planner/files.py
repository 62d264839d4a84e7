"""Files of plans, figures and pictures: read without waiting, written whole; what is wrong is said by the path."""

import io
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from dshard.errors import PlanError

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
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe that nobody writes to would wait
        with open(opened, encoding="utf-8") as file:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise PlanError(f"{path}: must be {what} as JSON, but it is no regular file. {way_out}")
            return file.read()
    except FileNotFoundError:
        raise PlanError(
            f"{path}: must be {what} as JSON, but there is no such file. Pass a path that exists."
        ) from None
    except PlanError:
        raise
    except OSError as error:
        raise PlanError(
            f"{path}: must be {what} as JSON, but it cannot be read: {error.strerror}. {way_out}"
        ) from error
    except ValueError as error:
        raise PlanError(f"{path}: must be {what} as JSON, but it is no text ({error}). {way_out}") from error


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
