"""Two hosts, as network namespaces, whose link is cut in the middle of a step: all ranks end, and say who is away."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults import plan

REMOTE = Path(__file__).with_name("apart.py")
TIMEOUT_S = 4.0


def may_make_namespaces() -> bool:
    """Whether this process may have a network of its own, as root in a user namespace."""
    try:
        tried = subprocess.run(
            ["unshare", "-rn", "ip", "link", "add", "dshard-x", "type", "veth", "peer", "dshard-y"],
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        return False
    return tried.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not may_make_namespaces(), reason="no network namespaces here: unshare -rn and iproute2 must work")
@pytest.mark.parametrize("per_host", [1, 2])
def test_ranks_end_in_time_and_name_those_behind_a_link_that_is_cut_in_the_middle_of_a_step(tmp_path, per_host):
    env = {**os.environ, "PYTHONPATH": str(plan.REPO), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    env["DSHARD_TRANSPORT"] = "messages"  # these hosts are namespaces of one, whose ranks would share its memory
    words = [sys.executable, REMOTE, tmp_path, per_host, TIMEOUT_S]
    began = time.monotonic()
    done = subprocess.run(
        ["unshare", "-rn", *map(str, words)], env=env, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    ranks = range(2 * per_host)
    said = {rank: (tmp_path / f"{rank}.txt").read_text() for rank in ranks}
    codes = eval(done.stdout)
    assert all(code == 1 for code in codes.values()), (codes, said, time.monotonic() - began)
    for rank in ranks:
        away = [other for other in ranks if other // per_host != rank // per_host]
        last = said[rank].splitlines()[-1]
        assert "out of reach" in last, said[rank]
        assert all(f"rank {other} (" in last for other in away), said[rank]
