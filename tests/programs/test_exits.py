"""How programs end: quietly, with whatever is under way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
START = """
import torch
import torch.distributed as dist
from torch import nn

import dshard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
for layer in model:
    dshard.fully_shard(layer)
dshard.fully_shard(model)
"""
ENDINGS = {
    "gathers and gradients": """
model(torch.ones(2, 64)).sum().backward()
kept = model(torch.ones(2, 64)).sum()
model[0].unshard(async_op=True)
handle = model[1].unshard(async_op=True)
cycle = [model[2].unshard(async_op=True)]
cycle.append(cycle)
""",
    "a device that is waited for, by a thread that is in the store most of the time": """
import time

from dshard.collectives import watchdog

class Never:
    def query(self):
        return False

watchdog._POLL_S = watchdog._FIRST_POLL_S = 0.0
model(torch.ones(2, 64)).sum().backward()
watchdog.watch_event("what never comes", dist.group.WORLD, Never())
time.sleep(0.5)
""",
    "gathers of a group that is destroyed, in a scope": """
scope = dshard.gathered(model[0])
scope.__enter__()
model[1].unshard(async_op=True)
dist.destroy_process_group()
""",
}


LATE = """
import time

import torch
import torch.distributed as dist

import dshard

dist.init_process_group("gloo")
torch.manual_seed(0)
layer = dshard.fully_shard(torch.nn.Linear(64, 64, bias=False), reshard_after_forward=False)
with dshard.CommTrace() as trace:
    loss = layer(torch.ones(4, 64, requires_grad=True)).sum()
    if dist.get_rank() == 0:
        time.sleep(2)
    loss.backward()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_ends_without_a_word_whatever_is_under_way(tmp_path: Path, ending: str):
    ends_quietly(tmp_path, START + ENDINGS[ending])


def test_a_rank_that_ends_behind_its_last_backward_leaves_no_other_without_its_gradients(tmp_path: Path):
    ends_quietly(tmp_path, LATE)


def ends_quietly(folder: Path, program: str) -> None:
    script = folder / "program.py"
    script.write_text(program)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # Not by tests/warm.py, which lets go of a program's objects ahead of the interpreter's end.
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
