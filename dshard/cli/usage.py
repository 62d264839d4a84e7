"""Bad input: one clear line from one rank, exit code 2 from all of them; what fails on good input: the same with 1."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import NoReturn

EXIT_USAGE, EXIT_FAILED = 2, 1
# torchrun ends every rank as soon as one has failed: the silent ones wait this long for the speaking one's line.
_SPEAKER_HEAD_START_S = 3.0


class UsageError(Exception):
    """What the user asked for cannot be done; ends the command with one line and exit code 2.

    Args:
        message: ``{rule}, but {actual values}. {what to do}.``
        who: the command the line starts with; None for the one that runs.
    """

    code = EXIT_USAGE

    def __init__(self, message: str, *, who: str | None = None) -> None:
        super().__init__(message)
        self.who = who

    @classmethod
    def of(cls, error: Exception) -> UsageError:
        """What `dshard.plan` has raised, without its name ahead: the command says who it is."""
        said = str(error).removeprefix("plan: ")
        return cls(f"--{said}" if said.startswith("strategy: ") else said)


class RunError(UsageError):
    """What the user asked for makes sense, but this machine could not do it; the same, with exit code 1."""

    code = EXIT_FAILED


class CommandParser(argparse.ArgumentParser):
    """An argument parser that raises `UsageError` where argparse prints its usage from every rank and exits."""

    def error(self, message: str) -> NoReturn:
        """Raises `UsageError` in the name of this (sub)command."""
        raise UsageError(f"{message}. See {self.prog} --help.", who=self.prog)


def speaks() -> bool:
    """Whether this process prints for its machine: the first local rank, or one whose rank cannot be told."""
    rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    size = os.environ.get("WORLD_SIZE", "1")
    return not (rank.isdecimal() and size.isdecimal() and 0 < int(rank) < int(size))


def fail(who: str, message: str, code: int = EXIT_USAGE) -> int:
    """Prints ``{who}: {message}`` as one line on stderr if this rank speaks, and returns the exit code.

    Communicates: nothing. A silent rank waits a moment before it returns, and answers torchrun's SIGTERM with the same
    exit code.
    """
    if speaks():
        print(f"{who}: {' '.join(message.split())}", file=sys.stderr, flush=True)
        return code
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    time.sleep(_SPEAKER_HEAD_START_S)
    return code
