"""What commands share: how one is added, checks of its options, and the error that bad input ends with."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dshard.errors import DShardError

PICTURES = (".png", ".svg", ".pdf")
FUNCTIONS = ("step", "oracle_step", "loss", "optimizer", "shard")  # of a factory, as options of `verify_sharding`


class UsageError(Exception):
    """A command cannot do what it was asked for: it prints this in one line and exits with code 2.

    Args:
        message: ``{rule}, but {actual values}. {what to do}.``
    """


def add_command(commands: Any, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """Add the command of a function ``run_NAME``, whose docstring is the help page, and return its parser."""
    page = inspect.getdoc(run) or ""
    parser: argparse.ArgumentParser = commands.add_parser(
        run.__name__.removeprefix("run_").replace("_", "-"),
        help=page.partition("\n")[0],
        description=page,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


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


def make(argument: str, name: str, *, on_meta: bool = False) -> Mapping[str, Any]:
    """Import and call a factory, named as module:function; the module may be a file of the working folder.

    Args:
        argument: Of the command, for messages.
        name: Of the function.
        on_meta: Whether tensors that the call makes have no memory; those that the import makes have.

    Returns:
        What the function returns, as a dict: "model", "sample", and any of `FUNCTIONS`.

    Raises:
        UsageError: There is no such function, it or its module raises, or it returns something else.
    """
    module, _, function = name.partition(":")
    if not (module and function):
        raise UsageError(f"{argument} must be a module and a name in it, but it is {name!r}. Pass mymodule:factory.")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it
    try:
        torch.manual_seed(0)  # for what the module draws when it is imported: every rank imports it by itself
        factory = getattr(importlib.import_module(module), function)
        torch.manual_seed(0)  # again, since a module that was imported before draws nothing
        with torch.device("meta") if on_meta else nullcontext():
            made = factory()
    except Exception as error:
        raise UsageError(f"{argument} {name} raises {type(error).__name__}: {error}.") from error
    if isinstance(made, tuple) and len(made) == 2:
        made = {"model": made[0], "sample": made[1]}
    if not (isinstance(made, Mapping) and isinstance(made.get("model"), nn.Module) and "sample" in made):
        raise UsageError(
            f"{argument} must return a model and a sample input, but {name} returns {type(made).__name__}. Return "
            "(model, sample), or a dict of them."
        )
    if unknown := [key for key in made if key not in ("model", "sample", *FUNCTIONS)]:
        raise UsageError(
            f"{argument} must return a dict of model, sample, {', '.join(FUNCTIONS)}, but {name} returns "
            f"{unknown[0]!r}. Leave it out."
        )
    return made


@contextmanager
def named(option: str) -> Iterator[None]:
    """Name the option in errors of the block: of the library, and of files."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{option}: {error.filename or ''} {error.strerror or error}. Pass another path.") from error
    except DShardError as error:
        raise UsageError(f"{option}: {error}") from error
