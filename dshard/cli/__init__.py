"""The console command ``dshard``: each module adds its subcommands to the parser, with a function that runs them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

import dshard
from dshard.cli import calibrate, files, planning, programs
from dshard.cli.usage import UsageError
from dshard.errors import DShardError

__all__ = ["main"]


def parser_of() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="dshard", description="Sharded data-parallel training with PyTorch.")
    version = f"%(prog)s {dshard.__version__}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print both versions and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (files, programs, planning, calibrate):
        module.add_parsers(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; None takes them from ``sys.argv``.

    Returns:
        0 after success; 1 where a check found something; 2 after bad input, or where a file cannot be read or written:
        then one line on stderr says so. Argparse exits by itself, with code 2.
    """
    args = parser_of().parse_args(argv)
    try:
        code: int = args.run(args)
    except (UsageError, DShardError, OSError) as error:
        text = " ".join(str(error).split()).removeprefix("plan: ")  # errors of dshard.plan begin so
        print(f"dshard {args.command}: {text}", file=sys.stderr)
        return 2
    return code
