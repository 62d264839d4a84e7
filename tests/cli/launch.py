"""Names that tests of commands share."""

from pathlib import Path

from dshard.cli import main

REPO = Path(__file__).resolve().parents[2]
RANK_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def code_of(*args: object) -> int:
    """The exit code of a command that runs in this process."""
    try:
        return main([*map(str, args)])
    except SystemExit as error:  # argparse's
        return int(error.code or 0)
