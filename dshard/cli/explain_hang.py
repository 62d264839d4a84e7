"""``dshard explain-hang``: says from flight records which rank waited for which, and where."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dshard.cli.usage import UsageError

_DESCRIPTION = """\
Reads what each rank wrote of its last collectives, while the job hangs or after its end, and says who waits for whom,
where, since when, and at which collective ranks went apart. No ranks are needed.
  DSHARD_FLIGHT_RECORD=flight torchrun --nproc-per-node 4 train.py
  dshard explain-hang flight

The files of several hosts go into one folder.
"""


def add_parser(commands: Any) -> None:
    """Adds this subcommand to the parser of ``dshard``."""
    parser = commands.add_parser(
        "explain-hang",
        help="which rank waits for which, and where, from flight records",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="that DSHARD_FLIGHT_RECORD named")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints what the records say.

    Raises:
        UsageError: there is no record.

    Communicates: nothing.
    """
    from dshard.inspection.hangs import explain_hang, read_records

    try:
        records = read_records(args.folder)
    except OSError as error:
        raise UsageError(f"DIR must be readable, but {error.filename}: {error.strerror}. Check its name.") from error
    if not records:
        raise UsageError(
            f"DIR must hold flight records, but {args.folder} has none. Start the job with DSHARD_FLIGHT_RECORD=DIR in "
            "the environment of its ranks."
        )
    print(explain_hang(records))
    return 0
