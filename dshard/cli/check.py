"""``dshard check``: reads every byte of checkpoints and compares it with what was saved."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dshard.cli.usage import RunError, UsageError

_DESCRIPTION = """\
Reads every byte of a checkpoint, or of all in a folder, and compares it with what was saved. No ranks are needed.
  dshard check runs/train/run-001
  dshard check runs/train/run-001/step-000100 --repair
"""


def add_parser(commands: Any) -> None:
    """Adds this subcommand to the parser of ``dshard``."""
    parser = commands.add_parser(
        "check",
        help="verify checkpoints, and repair them from parity",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="of a checkpoint, or of several")
    parser.add_argument(
        "--repair", action="store_true", help="write anew what is missing or damaged, from the rows of parity"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Checks, and prints a line for each checkpoint.

    Raises:
        UsageError: there is no checkpoint, or its manifest cannot be read.
        RunError: something is damaged.

    Communicates: nothing.
    """
    from dshard.checkpoint import check, repair
    from dshard.errors import CheckpointError

    try:
        if args.repair:
            for path in repair(args.folder):
                print(f"written anew: {path}")
        reports = check(args.folder)
    except CheckpointError as error:
        raise UsageError(f"DIR {error}") from error
    except OSError as error:
        raise RunError(
            f"DIR must be readable, but {error.filename}: {error.strerror}. Check its permissions."
        ) from error
    findings = [(report, finding) for report in reports for finding in report.findings]
    for report in reports:
        parity = ", parity" if report.has_parity else ""
        size = f"{report.num_bytes / 1e6:.1f} MB of {report.num_ranks} ranks, {report.num_tensors} tensors{parity}"
        print(f"{'damaged' if report.findings else 'whole'}: {report.folder} (step {report.step}, {size})", flush=True)
        for finding in report.findings:
            print(f"  {finding.problem}", flush=True)
    if findings:
        mendable = all(finding.is_mendable for _, finding in findings)
        remedy = "Pass --repair to write it anew" if mendable else "Use another checkpoint"
        raise RunError(
            f"checkpoints must be as they were saved, but {len(findings)} files are missing or damaged. {remedy}."
        )
    return 0
