"""Folders that a command will write to."""

from __future__ import annotations

import tempfile
from pathlib import Path

from dshard.cli.usage import UsageError


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
