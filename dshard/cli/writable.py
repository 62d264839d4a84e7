"""Folders and files that a command will write to."""

from __future__ import annotations

import os
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


def write_whole(path: Path, text: str) -> None:
    """Replaces a file by a text, at once, or leaves it as it was.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(path.name + ".part")
    try:
        draft.write_text(text)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
