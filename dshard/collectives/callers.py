"""Which line of the user's own program a stack is at."""

import os
from pathlib import Path
from types import FrameType

import torch

_PYTHONS_FOLDER = str(Path(os.__file__).parent)
_OWN_FOLDERS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
_IS_USERS: dict[str, bool] = {}  # by file


def users_line(frame: FrameType | None) -> str:
    """Where a stack leaves the user's own program, as file:line; empty if nowhere."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_users(file: str) -> bool:
    """Whether a file is of the program that runs, and not torch's, Python's or this library's."""
    known = _IS_USERS.get(file)
    if known is None:
        is_pythons = file.startswith(_PYTHONS_FOLDER) and "site-packages" not in file
        known = _IS_USERS[file] = not file.startswith(_OWN_FOLDERS) and "<" not in file and not is_pythons
    return known
