"""Files of plans: what is wrong with one is said by its path."""

import os
import uuid
from pathlib import Path

from dshard.errors import PlanError

__all__ = ["read_text", "write_text"]

_WAY_OUT = "Pass what Plan.save or dshard plan --out wrote."


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        PlanError: It is not there, cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PlanError(
            f"{path}: must be a plan as JSON, but there is no such file. Pass a path that exists."
        ) from None
    except OSError as error:
        raise PlanError(
            f"{path}: must be a plan as JSON, but it cannot be read: {error.strerror}. {_WAY_OUT}"
        ) from error
    except ValueError as error:
        raise PlanError(f"{path}: must be a plan as JSON, but it is no text ({error}). {_WAY_OUT}") from error


def write_text(path: Path, text: str) -> None:
    """Write a file whole, or leave what was there; ranks that write the same one at a time do not meet.

    Raises:
        PlanError: It cannot be written.
    """
    path = path.resolve()
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        if path.exists() and not path.is_file():  # a terminal or a pipe, which nothing can take the place of
            path.write_text(text, encoding="utf-8")
        else:
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise PlanError(
            f"{path}: must be a file that can be written, but writing says: {error.strerror}. Pass another path, or "
            "make room."
        ) from error
