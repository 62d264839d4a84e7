"""Two NCCL ranks, on one device or two. Skipped where there is no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).with_name("two_ranks.py")


def test_every_program_does_on_nccl_what_it_does_on_gloo(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        str(SCRIPT),
        "--out",
        str(tmp_path),
    ]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=900, check=True)
    for rank in range(2):
        lines = [json.loads(line) for line in (tmp_path / f"two_ranks_{rank}.jsonl").read_text().splitlines()]
        assert lines
        assert [line for line in lines if line["outcome"] != "ok"] == []
