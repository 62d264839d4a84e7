"""A rank that dies while it writes an asynchronous save is named at once, and not waited for until a timeout."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
import dshard
from dshard.checkpoint.saving import Job

dist.init_process_group("gloo", timeout=timedelta(seconds=600))
model = dshard.fully_shard(torch.nn.Linear(8, 8), sync="broadcast")
if dist.get_rank() == 1:
    Job.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
pending = dshard.checkpoint.save(sys.argv[1], model, asynchronous=True)
if dist.get_rank() == 1:
    time.sleep(60)
while not pending.done():
    time.sleep(0.05)
os._exit(7)
"""


@pytest.mark.slow
def test_rank_0_names_the_one_that_died_and_leaves_nothing(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "saved")]
    ranks = [
        subprocess.Popen(command, env={**common, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        for rank in range(2)
    ]
    _, said = ranks[0].communicate(timeout=60)
    ranks[1].communicate(timeout=60)
    assert [each.returncode for each in ranks] == [7, -9]
    assert "all ranks must write their shards, but rank 1 (pid " in said
    assert "was killed, or ended without a word" in said
    assert list(tmp_path.iterdir()) == []
