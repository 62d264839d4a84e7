"""`examples/train.py`, which `make train` runs: it learns, agrees with DDP, and resumes bit for bit."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train.py"
TEXT = b"def add(a, b):\n    return a + b\n\n\nclass Empty:\n    pass\n\n\n" * 200
TINY = ("--layers", 2, "--width", 32, "--heads", 2, "--block", 32, "--batch", 4, "--sample", 4, "--lr", 0.01)
RANK_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.py"
    path.write_bytes(TEXT)
    return path


def environment() -> dict[str, str]:
    known = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}
    return known | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
    }


def train(text: Path, out: Path, *options: object, ranks: int = 2) -> str:
    """What the script prints on that many ranks."""
    words = [SCRIPT, *TINY, "--data", text, "--out", out, *options]
    ran = warm.run(words, ranks=ranks, env=environment(), timeout_s=300)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


def losses(printed: str) -> dict[int, str]:
    """Losses as they are printed, by step."""
    return {int(step): loss for step, loss in re.findall(r"step +(\d+)  loss sharded ([\d.]+)", printed)}


def megabytes(printed: str, name: str) -> float:
    return float(re.search(rf"{name}: ([\d.]+) MB", printed)[1])


def test_below_torchrun_it_learns_as_ddp_does_with_half_of_the_bytes(text, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = [*TINY, "--data", text, "--out", tmp_path, "--steps", 30, "--compare"]
    command = [*torchrun, *map(str, [SCRIPT, *options])]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = losses(done.stdout)
    assert float(found[30]) < 0.7 * float(found[1])
    assert float(re.search(r"largest difference of the losses over all steps: (\S+)", done.stdout)[1]) < 1e-4
    assert megabytes(done.stdout, "sharded") == pytest.approx(megabytes(done.stdout, "DDP") / 2, abs=0.1)
    assert "sample:\n\ndef " in done.stdout


def test_a_resumed_run_prints_the_losses_of_one_without_a_break(text, tmp_path):
    (tmp_path / "whole" / "1").mkdir(parents=True)  # of a run that was killed ahead of its first checkpoint
    whole = losses(train(text, tmp_path / "whole", "--steps", 20, "--resume"))  # there is nothing to resume yet
    first = train(text, tmp_path / "broken", "--steps", 20, "--stop-after", 10)
    second = train(text, tmp_path / "broken", "--steps", 20, "--resume")
    assert f"resumed {tmp_path / 'broken' / '1'} at step 10" in second
    assert losses(first) | losses(second) == whole
    on_one = train(text, tmp_path / "broken", "--steps", 22, "--resume", ranks=1)
    assert "at step 20" in on_one


def test_a_second_run_leaves_the_first_alone(text, tmp_path):
    for number in ("1", "2"):
        assert f"checkpoints are in {tmp_path / number}" in train(text, tmp_path, "--steps", 2)
    assert {path.name for path in tmp_path.glob("*/step-*")} == {"step-000002"}
    assert len(list(tmp_path.glob("*/step-*"))) == 2


@pytest.mark.parametrize("options", [("--bf16", "--strategy", "zero2"), ("--memory", "2MiB")])
def test_it_learns_in_bf16_under_a_strategy_and_by_a_plan(text, tmp_path, options):
    found = losses(train(text, tmp_path, "--steps", 20, *options))
    assert float(found[20]) < 0.8 * float(found[1])
