"""Have gloo's threads stand back, so that ranks on a few cores do not spend their time on waiting for one another.

The thread that gloo keeps for each group tries to lock a connection that has something to read, and as long as the rank
itself holds that lock, because it is sending, tries again at once. Where there are more threads than cores it is the
rank that is not running meanwhile, and the processor's time goes into these attempts. As a thread of low priority
gloo's seldom keeps a rank from running, and so finds the lock free; one of the class "idle" hardly runs beside
programs that never rest, as tests side by side are. What ranks send and get stays the same.

For tests alone: benchmarks measure gloo as it is.
Imports nothing of dshard: tests/warm.py reads this file by its path.
"""

import os
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

THREADS = Path("/proc/self/task")
NICE = 10  # more than other threads


def have_gloo_stand_back() -> None:
    """For the groups of this process, and those that it makes; does nothing where threads have no priorities."""
    import torch.distributed as dist

    c10d: Any = getattr(dist, "distributed_c10d", None)
    make = getattr(c10d, "_new_process_group_helper", None)
    if make is None or not THREADS.is_dir():
        return
    _stand_back()

    @wraps(make)
    def made(*args: Any, **options: Any) -> Any:
        found = make(*args, **options)
        _stand_back()
        return found

    c10d._new_process_group_helper = made


def _stand_back() -> None:
    nice = min(os.getpriority(os.PRIO_PROCESS, 0) + NICE, 19)
    for task in THREADS.iterdir():
        with suppress(OSError):  # the thread has ended, or the system refuses
            if (task / "comm").read_text() == "gloo_tcp_loop\n":
                os.setpriority(os.PRIO_PROCESS, int(task.name), nice)
