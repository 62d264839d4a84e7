"""The console command ``dshard``: one module per subcommand, each with ``add_parser`` and a ``run`` of its own."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence

import torch

import dshard
from dshard.cli import calibrate, check, explain_hang, merge, plan, simulate, trace, verify
from dshard.cli.usage import CommandParser, UsageError, fail

__all__ = ["main"]

# A new subcommand is a module with `add_parser(subparsers)`, which sets `run` as its default; name it here.
_COMMANDS = (check, merge, verify, trace, explain_hang, plan, simulate, calibrate)


def _parser() -> CommandParser:
    parser = CommandParser(prog="dshard", description="Sharded data-parallel training with PyTorch.")
    version = f"%(prog)s {dshard.__version__}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print both versions and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


def _joined(words: Sequence[str]) -> list[str]:
    """Join values such as -3GiB with their options into one word: alone argparse takes them for options."""
    found: list[str] = []
    for word in words:
        if re.match(r"-\d", word) and found and found[-1].startswith("--") and "=" not in found[-1]:
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        argv: the arguments after the program's name; None takes them from ``sys.argv``.

    Returns:
        0 after success; 2 after bad input, and 1 where a disk is full or alike: one line on stderr, from the first rank
        of each machine; 130 after Ctrl-C.

    Communicates: what the subcommand does; bad input is found before the first collective wherever that is possible.
    """
    who = "dshard"
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        args, unknown = _parser().parse_known_args(_joined(words))
        args.command_line = shlex.join(["dshard", *words])
        who = f"dshard {args.command}"
        if unknown:
            raise UsageError(f"unrecognized arguments: {' '.join(unknown)}. See {who} --help.")
        code: int = args.run(args)
    except UsageError as error:
        return fail(error.who or who, str(error), error.code)
    except KeyboardInterrupt:
        return 130
    return code
