"""Gloo's threads stand back for the ranks."""

import os

import pytest
import torch.distributed as dist

from dshard.testing import WorldPool
from tests.gloo_threads import NICE, THREADS


def priorities_of_threads() -> dict[str, set[int]]:
    """Of this rank's threads by name, with those of a group made here."""
    group = dist.new_group([0, 1])
    found: dict[str, set[int]] = {}
    for task in THREADS.iterdir():
        found.setdefault((task / "comm").read_text().strip(), set()).add(
            os.getpriority(os.PRIO_PROCESS, int(task.name))
        )
    dist.barrier()  # the other one may still be connecting
    dist.destroy_process_group(group)
    return found


@pytest.mark.skipif(not THREADS.is_dir(), reason="threads have no priorities")
def test_the_threads_that_read_for_gloo_stand_back_and_no_other_thread_does(worlds: WorldPool):
    for found in worlds.run(2, priorities_of_threads):
        (of_gloo,) = found.pop("gloo_tcp_loop")
        assert {of_gloo} == {min(each + NICE, 19) for each in set().union(*found.values())}
