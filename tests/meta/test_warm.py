"""Programs that `tests/warm.py` starts end as they would alone: a failure on one rank, and a hang, are seen."""

import os
from pathlib import Path

import pytest

from tests import warm
from tests.conftest import LONGEST
from tests.meta.source import ROOT

PROGRAM = """
import os, sys, time
if sys.argv[1] == "hang":
    time.sleep(600)
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()  # gloo's connections may fail where a peer is gone before they are made
rank = dist.get_rank()
print(f"rank {rank} of {dist.get_world_size()}: {' '.join(sys.argv[1:])} in {os.environ['PLACE']}")
if sys.argv[1] == "exit" and rank == 1:
    sys.exit(3)
if sys.argv[1] == "raise" and rank == 0:
    raise ValueError("wrong on purpose")
"""
ENDING = """
import atexit, sys, threading, time
class Last:
    def __del__(self):
        print("let go")
last = Last()
atexit.register(print, "handled")
threading.Thread(target=lambda: (time.sleep(0.1), print("joined"))).start()
print("unterminated", end="")
sys.exit(*eval(sys.argv[1]))
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


@pytest.mark.parametrize(
    ("given", "code", "error"), [("()", 0, ""), ("(None,)", 0, ""), ("(7,)", 7, ""), ("('why',)", 1, "why\n")]
)
def test_a_programs_threads_exit_handlers_and_objects_come_to_their_end_and_its_code_is_its_own(
    tmp_path: Path, given, code, error
):
    (tmp_path / "program.py").write_text(ENDING)
    ran = warm.run(["program.py", given], env=dict(os.environ), cwd=tmp_path, timeout_s=100)
    assert (ran.codes, ran.stderr) == ([code], error)
    assert ran.stdout.splitlines() == ["unterminatedjoined", "handled", "let go"]


def test_the_files_that_begin_first_are_there():
    assert [name for name in LONGEST if not (ROOT / "tests" / f"{name}.py").exists()] == []
