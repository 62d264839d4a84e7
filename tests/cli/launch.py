"""Names that tests of commands share."""

from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
RANK_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
