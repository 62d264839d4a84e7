"""Runs ranks on two hosts and cuts the link between them: root in a network namespace of its own is needed.

unshare -rn python apart.py FOLDER RANKS_PER_HOST TIMEOUT_S     prints the exit code of each rank
python apart.py FOLDER RANKS_PER_HOST TIMEOUT_S rank            is one of them
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ADDRESSES = ("10.78.0.1", "10.78.0.2")
BOUND_S = 20.0  # beyond the timeout


def ip(*words: str, inside: int | None = None) -> None:
    enter = ["nsenter", f"--net=/proc/{inside}/ns/net"] if inside is not None else []
    subprocess.run([*enter, "ip", *words], check=True)


def lead(folder: Path, per_host: int, timeout_s: float) -> None:
    away = subprocess.Popen(["unshare", "-n", "sleep", "1000"])
    time.sleep(0.5)
    ip("link", "add", "dshard-link", "type", "veth", "peer", "name", "dshard-link", "netns", str(away.pid))
    for host, inside in enumerate((None, away.pid)):
        ip("addr", "add", f"{ADDRESSES[host]}/24", "dev", "dshard-link", inside=inside)
        ip("link", "set", "dshard-link", "up", inside=inside)
        ip("link", "set", "lo", "up", inside=inside)
    ranks = []
    for rank in range(2 * per_host):
        enter = ["nsenter", f"--net=/proc/{away.pid}/ns/net"] if rank >= per_host else []
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(2 * per_host),
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": "29555",
            "GLOO_SOCKET_IFNAME": "dshard-link",
            "APART_HOST": str(rank // per_host),
        }
        ranks.append(subprocess.Popen([*enter, sys.executable, *sys.argv, "rank"], env=env))
    while not all((folder / f"{rank}.running").exists() for rank in range(2 * per_host)):
        time.sleep(0.05)
        assert all(rank.poll() is None for rank in ranks), "a rank has not come this far"
    time.sleep(0.5)
    ip("link", "set", "dshard-link", "down")
    deadline = time.monotonic() + timeout_s + BOUND_S
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    print({number: rank.poll() for number, rank in enumerate(ranks)})
    for rank in ranks:
        rank.kill()
    away.kill()


def train(folder: Path, timeout_s: float) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch import nn

    import dshard
    from dshard.collectives import watchdog

    rank = int(os.environ["RANK"])
    os.dup2(os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
    host = os.environ["APART_HOST"]
    own = watchdog.RankProcess.own()
    watchdog.RankProcess.own = lambda: watchdog.RankProcess(f"host-{host}", own.pid, f"{own.place} {host}", own.started)  # type: ignore[method-assign]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), dist.group.WORLD)  # the start may be slow
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
    dshard.fully_shard(model)
    for step in range(1_000_000):
        model(torch.ones(2, 16)).sum().backward()
        model.zero_grad()
        if step == 10:
            (folder / f"{rank}.running").touch()


if __name__ == "__main__":
    where, num, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    train(where, seconds) if len(sys.argv) > 4 else lead(where, num, seconds)
