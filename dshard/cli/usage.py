"""Bad input of a command, and checks that several commands share."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dshard.errors import DShardError

PICTURES = (".png", ".svg", ".pdf")


class UsageError(Exception):
    """A command cannot do what it was asked for: it prints this in one line and exits with code 2.

    Args:
        message: ``{rule}, but {actual values}. {what to do}.``
    """


def count(text: str) -> int:
    """A whole number of at least 1, as a type of argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, but it is {text!r}")
    return number


def check_output(option: str, path: Path | None, suffixes: tuple[str, ...] = ()) -> None:
    """Check that a file can be written at the end, before anything starts.

    Raises:
        UsageError: Its folder is not there, its suffix is unknown, or matplotlib is missing for a picture.
    """
    if path is None:
        return
    if suffixes and path.suffix.lower() not in suffixes:
        raise UsageError(f"{option} must end in {' or '.join(suffixes)}, but it is {path}.")
    if not path.parent.is_dir() or path.is_dir():
        raise UsageError(f"{option} must be a file in a folder that exists, but it is {path}. Make its folder first.")
    if path.suffix.lower() in PICTURES and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"{option} needs matplotlib, but it is not installed. Run: pip install 'dshard[cli]'.")


def found_by(argument: str, name: str) -> Callable[[], Any]:
    """Import a function that is named as module:function; the module may be a file of the working folder.

    The import and the call are apart, for what holds for the call alone: a seed, a default device.

    Args:
        argument: Of the command, for messages.
        name: Of the function.

    Returns:
        Calls the function. An exception of it becomes a UsageError.

    Raises:
        UsageError: There is no such function, or its module raises.
    """
    module, _, function = name.partition(":")
    if not (module and function):
        raise UsageError(f"{argument} must be a module and a name in it, but it is {name!r}. Pass mymodule:factory.")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it
    with _raising(argument, name):
        found = getattr(importlib.import_module(module), function)

    def call() -> Any:
        with _raising(argument, name):
            return found()

    return call


@contextmanager
def _raising(argument: str, name: str) -> Iterator[None]:
    """Say of an exception of the block that a function which the user named has raised it."""
    try:
        yield
    except Exception as error:
        raise UsageError(f"{argument} {name} raises {type(error).__name__}: {error}.") from error


@contextmanager
def named(option: str) -> Iterator[None]:
    """Name the option in errors of the block: of the library, and of files."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{option}: {error.filename or ''} {error.strerror or error}. Pass another path.") from error
    except DShardError as error:
        raise UsageError(f"{option}: {error}") from error
