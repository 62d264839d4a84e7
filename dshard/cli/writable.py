"""Files and folders that a command writes to, and small files that it reads back."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from dshard.checkpoint import disk
from dshard.cli.usage import UsageError
from dshard.errors import CheckpointError

_MAX_BYTES = 1 << 28  # of a file that is read whole


def check_writable(folder: Path, option: str) -> None:
    """Makes a folder and writes into it.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"{option} must be a folder that can be written, but {folder} cannot: {error.strerror}. Pass another."
        ) from error


def write_whole(path: Path, text: str) -> None:
    """Replaces a file by a text, at once, or leaves it as it was; a link is replaced, and not what it points to.

    Raises:
        OSError: it cannot be written.
    """
    disk.write_whole(path, text.encode())


def read_whole(path: Path, *, follow: bool = False) -> bytes:
    """A file's bytes; what is no file is refused, not waited for.

    Raises:
        OSError: there is none, or it cannot be read.
        ValueError: it is a link that is not to be followed, a folder, a pipe, a device, or too large.
    """
    try:
        opened = disk.open_regular(path, follow=follow)
    except CheckpointError as error:
        raise ValueError(str(error).rstrip(".")) from error
    with open(opened, "rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"{path}: must have at most {_MAX_BYTES} bytes, but it has {os.path.getsize(path)}")
    return content


def read_json(path: Path) -> Any:
    """The JSON value of a file of ours, which is no link.

    Raises:
        OSError: there is none, or it cannot be read.
        ValueError: it is no file, or no JSON.
    """
    return json.loads(read_whole(path))
