"""Processes that torchrun starts again meet in the store that they met in before, and find what the dead wrote there.

torchrun's agent keeps one store over all of its restarts (torch 2.5 and later; pytorch/pytorch#135712), whose keys of
the last start send gloo and NCCL to addresses where nobody is any more: `init_process_group` waits there until its
timeout. On one host the number of the restart tells the starts apart, so it goes ahead of the keys. Agents of several
hosts count restarts for themselves; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, set for torchrun, has it make a store
for each start.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


def meet_anew() -> None:
    """Where this process is a restart on one host, have process groups use keys of this start alone."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restart == "0" or not has_agent_store or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return
    module: Any = sys.modules["torch.distributed.rendezvous"]  # its name in the package is that of its function
    handlers: Any = getattr(module, "_rendezvous_handlers", {})
    if "env" not in handlers:  # another torch, which may need none of this
        return
    torchs_own = handlers["env"]

    def env(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, size in torchs_own(*args, **kwargs):
            yield dist.PrefixStore(f"restart-{restart}", store), rank, size

    handlers["env"] = env
