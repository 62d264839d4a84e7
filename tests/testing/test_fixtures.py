"""`dshard.testing.fixtures` in a project that is not this one."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.meta.fences import blocks
from tests.meta.source import ROOT

CONFTEST, EXAMPLE, *_ = [each.code for each in blocks((ROOT / "docs/testing.md").read_text(), "docs/testing.md")]
LONGER = """
    import pytest
    from dshard.testing import WorldPool

    @pytest.fixture(scope="session")
    def make_worlds():
        return lambda: WorldPool(group_timeout_s=33.0)

    def test_limit(worlds):
        assert worlds.get_world(2).group_timeout_s == 33.0
"""
TESTS = """
    import os

    import torch.distributed as dist
    from hypothesis import given, settings
    from hypothesis import strategies as st

    def who():
        return dist.get_rank(), os.getpid()

    def add(number):
        found = [None, None]
        dist.all_gather_object(found, number + dist.get_rank())
        return sum(found)

    def test_ranks(worlds):
        pids = worlds.run(2, who)
        assert [rank for rank, _ in pids] == [0, 1]
        with open("pids", "w") as file:
            print(*(pid for _, pid in pids), file=file)

    @settings(deadline=None, max_examples=20)
    @given(number=st.integers(0, 9))
    def test_the_same_ranks_get_each_example(worlds, number):
        assert worlds.run(2, add, number) == [2 * number + 1] * 2
        assert [str(pid) for _, pid in worlds.run(2, who)] == open("pids").read().split()

    def fails():
        assert dist.get_rank() == 0, "on rank 1"

    def test_fails(worlds):
        worlds.run(2, fails)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_example.py").write_text(EXAMPLE)
    (tmp_path / "test_mine.py").write_text(textwrap.dedent(TESTS))
    (tmp_path / "longer").mkdir()
    (tmp_path / "longer" / "test_longer.py").write_text(textwrap.dedent(LONGER))
    return tmp_path


def test_a_project_gets_worlds_that_live_for_the_session_and_are_gone_at_its_end(project: Path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, check=False)
    assert "1 failed, 5 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "fails: rank 1 of 2 raised AssertionError: on rank 1" in ran.stdout
    pids = (project / "pids").read_text().split()
    assert len(pids) == 2
    assert not any(Path("/proc", pid).exists() for pid in pids)
