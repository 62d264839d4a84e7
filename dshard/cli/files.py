"""Commands that read the files of a run: ``dshard check``, ``dshard merge`` and ``dshard explain-hang``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dshard.cli.usage import UsageError, add_command, count, named


def add_parsers(commands: Any) -> None:
    """Add the commands to the parser of ``dshard``."""
    check = add_command(commands, run_check)
    check.add_argument("folder", metavar="DIR", type=Path, help="of a checkpoint, or of several")
    check.add_argument("--repair", action="store_true", help="rewrite missing or damaged files from parity")
    merge = add_command(commands, run_merge)
    merge.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="or a folder of several: the newest")
    merge.add_argument("out", metavar="OUT", type=Path, help="a folder, or a file that ends in .safetensors")
    merge.add_argument(
        "--max-shard-bytes", type=count, default=5_000_000_000, metavar="N", help="most bytes of one file (%(default)s)"
    )
    explain = add_command(commands, run_explain_hang)
    explain.add_argument("folder", metavar="DIR", type=Path, help="that DSHARD_FLIGHT_RECORD named")


def run_check(args: argparse.Namespace) -> int:
    """Verify checkpoints, and repair them from parity.

    Reads every byte of a checkpoint, or of all in a folder, and compares it with what was saved. Exits with code 1
    where something is damaged. No ranks are needed.
      dshard check runs/train/1
      dshard check runs/train/1/step-000100 --repair
    """
    from dshard.checkpoint import check, repair

    with named("DIR"):
        for path in repair(args.folder) if args.repair else ():
            print(f"rewritten: {path}")
        reports = check(args.folder)
    findings = [finding for report in reports for finding in report.findings]
    for report in reports:
        parity = ", parity" if report.has_parity else ""
        size = f"{report.num_bytes / 1e6:.1f} MB of {report.num_ranks} ranks, {report.num_tensors} tensors{parity}"
        print(f"{'damaged' if report.findings else 'whole'}: {report.folder} (step {report.step}, {size})")
        for finding in report.findings:
            print(f"  {finding.problem}")
    if findings:
        can_repair = all(finding.is_mendable for finding in findings)
        remedy = "Pass --repair to rewrite them" if can_repair else "Use another checkpoint"
        print(f"{len(findings)} files are missing or damaged. {remedy}.")
    return 1 if findings else 0


def run_merge(args: argparse.Namespace) -> int:
    """Write a checkpoint's model for from_pretrained.

    Writes the model of a checkpoint as model.safetensors, or as several files and an index, which from_pretrained and
    safetensors.torch.load_file read. No ranks and no model are needed, and one tensor is in memory at a time.
      dshard merge runs/train/1 merged
    """
    from dshard.checkpoint import merge

    with named("CHECKPOINT to OUT"):
        merge(args.checkpoint, args.out, max_shard_bytes=args.max_shard_bytes)
    print(f"wrote {args.out}")
    return 0


def run_explain_hang(args: argparse.Namespace) -> int:
    """Say which rank waits for which, and where.

    Reads each rank's record of its last collectives, while the job hangs or after its end, and says who waits for whom,
    where, since when, and at which collective ranks diverged. No ranks are needed.
      DSHARD_FLIGHT_RECORD=flight torchrun --nproc-per-node 4 train.py
      dshard explain-hang flight

    The files of several hosts go into one folder.
    """
    from dshard.inspection.hangs import explain_hang, read_records

    with named("DIR"):
        records = read_records(args.folder)
    if not records:
        raise UsageError(
            f"DIR must hold flight records, but {args.folder} has none. Start the job with DSHARD_FLIGHT_RECORD=DIR in "
            "the environment of its ranks."
        )
    print(explain_hang(records))
    return 0
