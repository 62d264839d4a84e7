"""Seconds and memory of `verify_sharding` on 32 ranks: `python -m tests.testing.many_ranks`.

Each row of the table in docs/testing.md is a process of its own: `... virtual full`, `... processes full,ddp`.
"""

import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

from dshard.testing import verify_sharding
from dshard.testing.verifying.invariants import DEFAULT_SETTINGS
from tests.models import LanguageModel, ResidualMlp

NUM_RANKS = 32
TOKENS = torch.arange(32).view(4, 8) % 21


def layer() -> nn.Module:
    return ResidualMlp(32, 64)


def language_model() -> nn.Module:
    return LanguageModel(layer, 32, tied=True)


def shared_kib() -> int:
    """Of all processes of this session, shared pages by their share."""
    session, total = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[3], 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "stat").read_text().rpartition(")")[2].split()[3] == session:
                total += int((folder / "smaps_rollup").read_text().split("Pss:")[1].split()[0])
        except (OSError, IndexError):
            continue  # it has ended
    return total


def measure(how: str, settings: list[str]) -> str:
    """One row."""
    most, is_done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_done.wait(0.5):
            most = max(most, shared_kib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    options = {"virtual_ranks": NUM_RANKS} if how == "virtual" else {"worlds": (NUM_RANKS,)}
    report = verify_sharding(language_model, TOKENS, settings=settings, steps=3, **options)
    seconds = time.perf_counter() - start
    is_done.set()
    watcher.join()
    assert not report.differences, report
    return f"{how:<9} {len(settings)} settings: {seconds:.0f} s, {most / 2**20:.1f} GiB"


if __name__ == "__main__":
    if len(sys.argv) == 3:
        sys.stdout.write(f"{measure(sys.argv[1], sys.argv[2].split(','))}\n")
    else:
        for how in ("virtual", "processes"):
            for chosen in ("full", ",".join(DEFAULT_SETTINGS)):
                command = [sys.executable, "-m", "tests.testing.many_ranks", how, chosen]
                subprocess.run(command, check=True, start_new_session=True)
