"""Starts ``dshard train`` as a user does, with a model small enough for a test."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests import warm

REPO = Path(__file__).resolve().parents[2]
RANK_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
TINY = (
    "--layers",
    "2",
    "--width",
    "32",
    "--heads",
    "2",
    "--block-size",
    "32",
    "--sample-tokens",
    "4",
    "--device",
    "cpu",
)
TEXT = b"def add(a, b):\n    return a + b\n\n\nclass Empty:\n    pass\n\n\n" * 200


def _environment(environ):
    env = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(REPO))))
    env["OMP_NUM_THREADS"] = "1"
    env["PYTHONWARNINGS"] = "ignore"
    return env | (environ or {})


def start(*args, ranks=0, environ=None, cwd=None, script=None):
    """Runs ``dshard train``, or a script in its place, alone (ranks=0) or on ranks, as below torchrun."""
    program = ["-m", "dshard", "train"] if script is None else [script]
    return warm.run([*program, *args], ranks=ranks, env=_environment(environ), cwd=cwd, timeout_s=240)


def start_below_torchrun(*args, ranks):
    """Runs ``dshard train`` below torchrun itself; returns the completed process."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, "-m", "dshard", "train", *map(str, args)]
    return subprocess.run(command, env=_environment(None), capture_output=True, text=True, timeout=240, check=False)


def own_lines(stderr):
    """The lines of stderr that are ours rather than torchrun's."""
    return [line for line in stderr.splitlines() if line.startswith("dshard train: ")]


def read_history(path):
    """A history file's rows."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
