"""Programs that `tests/warm.py` starts end as they would alone: a failure on one rank, and a hang, are seen."""

import os
from pathlib import Path

import pytest

from tests import warm

PROGRAM = """
import os, sys, time
if sys.argv[1] == "hang":
    time.sleep(600)
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
print(f"rank {rank} of {dist.get_world_size()}: {' '.join(sys.argv[1:])} in {os.environ['PLACE']}")
if sys.argv[1] == "exit" and rank == 1:
    sys.exit(3)
if sys.argv[1] == "raise" and rank == 0:
    raise ValueError("wrong on purpose")
"""


@pytest.mark.parametrize(
    ("how", "codes", "error"), [("go", [0, 0], ""), ("exit", [0, 3], ""), ("raise", [1, 0], "ValueError: wrong on")]
)
def test_output_and_exit_code_of_every_rank_are_those_of_the_program(tmp_path: Path, how, codes, error):
    (tmp_path / "program.py").write_text(PROGRAM)
    ran = warm.run(["program.py", how], ranks=2, env={**os.environ, "PLACE": "here"}, cwd=tmp_path, timeout_s=100)
    assert ran.codes == codes
    assert sorted(ran.stdout.splitlines()) == [f"rank {rank} of 2: {how} in here" for rank in range(2)]
    assert error in ran.stderr
    assert not ran.timed_out


def test_a_program_that_hangs_is_killed_on_every_rank(tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAM)
    ran = warm.run(["program.py", "hang"], ranks=2, env={**os.environ, "PLACE": "here"}, cwd=tmp_path, timeout_s=1)
    assert ran.timed_out
    assert ran.codes == [-9, -9]
