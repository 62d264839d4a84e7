"""``dshard merge``: writes the model of a checkpoint as ``from_pretrained`` and others read it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dshard.cli.usage import RunError, UsageError

_DESCRIPTION = """\
Writes the model of a checkpoint as model.safetensors, or as several files and an index, which from_pretrained and
safetensors.torch.load_file read. No ranks and no model are needed, and one tensor is in memory at a time.
  dshard merge runs/train/run-001 merged
"""


def add_parser(commands: Any) -> None:
    """Adds this subcommand to the parser of ``dshard``."""
    parser = commands.add_parser(
        "merge",
        help="write a checkpoint's model for from_pretrained",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="of which the newest is taken, if of several"
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="a folder, or a file that ends in .safetensors")
    parser.add_argument(
        "--max-shard-bytes", type=int, default=5_000_000_000, metavar="N", help="most bytes of one file (default: 5 GB)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Merges.

    Raises:
        UsageError: there is no checkpoint, it is damaged, or an option is none that is allowed.
        RunError: the files cannot be written.

    Communicates: nothing.
    """
    from dshard.checkpoint import merge
    from dshard.errors import ArgumentError, CheckpointError

    try:
        merge(args.checkpoint, args.out, max_shard_bytes=args.max_shard_bytes)
    except (ArgumentError, CheckpointError) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise RunError(
            f"OUT must be writable, but {error.filename}: {error.strerror}. Check it, and its disk."
        ) from error
    print(f"written: {args.out}", flush=True)
    return 0
