"""Gloo's threads stand back for the ranks."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from dshard.testing import WorldPool


def classes_of_threads() -> dict[str, set[int]]:
    """Of this rank's threads by name, with those of a group made here."""
    group = dist.new_group([0, 1])
    found: dict[str, set[int]] = {}
    for task in Path("/proc/self/task").iterdir():
        found.setdefault((task / "comm").read_text().strip(), set()).add(os.sched_getscheduler(int(task.name)))
    dist.barrier()  # the other one may still be connecting
    dist.destroy_process_group(group)
    return found


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="threads have no such class")
def test_the_threads_that_read_for_gloo_never_keep_a_rank_from_running_and_no_other_thread_stands_back(
    worlds: WorldPool,
):
    for found in worlds.run(2, classes_of_threads):
        assert found.pop("gloo_tcp_loop") == {os.SCHED_IDLE}
        assert os.SCHED_IDLE not in set().union(*found.values())
