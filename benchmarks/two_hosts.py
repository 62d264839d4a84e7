"""A training step on two hosts that a slow link joins: which strategy pays where, on four real ranks.

    sudo python -m benchmarks.two_hosts [--rate 1gbit] [--rounds 10] [--out benchmarks/results]

The hosts are two network and process namespaces, so that they share no memory, joined by a pair of virtual devices that
``tc tbf`` limits to the rate; in each runs ``torchrun --nnodes 2`` with two ranks. Needs root, iproute2 and unshare;
where namespaces are not allowed it says so and ends.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import dshard
from benchmarks.measure import Reader, Step, summary_of, timed, watched
from benchmarks.models import FAMILY, GPT, Size, training_step
from benchmarks.output import Bars, Output, timing_table
from dshard.collectives import ShardGroup
from dshard.collectives.exchange import transport_of
from dshard.planner import Plan
from dshard.planner.profiles import Training
from dshard.planning.links import measure_links
from dshard.planning.plan import Profile
from dshard.tensor.meshes import default_mesh

HOSTS = ("dshard-a", "dshard-b")
RANKS_PER_HOST = 2
SIZE = Size(vocab=1024, width=256, layers=4, heads=4)
BATCH, TOKENS = 1, 32
STRATEGIES = ("full", "keep", "hybrid(2)", "hybrid(2, keep)", "ddp")
PEERS = ("FSDP2", "FSDP2 on a mesh of 2 x 2")
MESSAGE_BYTES = 4 << 20
NUM_COUNTED = 3
TINY = Size(width=512, layers=2)  # of which 37 blocks are made


def ip(*words: str, host: str | None = None) -> None:
    """Run `ip`, in a host's namespace if one is named."""
    inside = ["ip", "netns", "exec", host] if host else []
    subprocess.run([*inside, *words], check=True, capture_output=True, text=True)


@contextmanager
def two_hosts(rate: str) -> Iterator[None]:
    """Two namespaces, 10.77.0.1 and 10.77.0.2, joined by a link of `rate`."""
    try:
        for host in HOSTS:
            ip("ip", "netns", "add", host)
        ip(
            "ip",
            "link",
            "add",
            "dshard-link",
            "netns",
            HOSTS[0],
            "type",
            "veth",
            "peer",
            "dshard-link",
            "netns",
            HOSTS[1],
        )
        for number, host in enumerate(HOSTS, start=1):
            ip("ip", "addr", "add", f"10.77.0.{number}/24", "dev", "dshard-link", host=host)
            ip("ip", "link", "set", "dshard-link", "up", host=host)
            ip("ip", "link", "set", "lo", "up", host=host)
            limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            ip("tc", "qdisc", "add", "dev", "dshard-link", *limit, host=host)
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def launch(arguments: Sequence[str]) -> int:
    """Run this script's ranks on both hosts; gives the worst exit code."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "dshard-link", "OMP_NUM_THREADS": "1"}
    processes = []
    for number, host in enumerate(HOSTS):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)]
        where = ["--nproc-per-node", str(RANKS_PER_HOST), "--master-addr", "10.77.0.1", "--master-port", "29517"]
        apart = ["ip", "netns", "exec", host, "unshare", "--pid", "--fork", "--mount-proc"]  # no memory in common, too
        command = [*apart, *torchrun, *where, "-m", "benchmarks.two_hosts", "--rank", *arguments]
        processes.append(subprocess.Popen(command, env=environment))
    return max(process.wait() for process in processes)


def plans(ids: Tensor) -> tuple[dict[str, Plan], dict[str, float]]:
    """The best plan, and the best that needs no more memory than `hybrid(2)` does, by links measured here.

    Also predicted milliseconds of these and of each strategy alone.
    """
    mesh = default_mesh()
    with tempfile.TemporaryDirectory() as folder:
        cluster = measure_links(mesh, path=Path(folder) / "links.json")
    profile = Profile(GPT(SIZE), (ids[:, :-1],), device=None, training=Training(), mesh=mesh)
    limit = profile.given(cluster, "hybrid(2)").peak_bytes
    limits = {"the plan": 1 << 40, "the plan, in hybrid(2)'s memory": limit}
    planned = {name: profile.plan(cluster, memory=most, strategies=STRATEGIES) for name, most in limits.items()}
    alone = {name: profile.given(cluster, name) for name in STRATEGIES}
    return planned, {name: plan.step_s * 1e3 for name, plan in (alone | planned).items()}


def variant(name: str, ids: Tensor, planned: Mapping[str, Plan]) -> Step:
    """A training step of a freshly built GPT under a strategy, by a plan, or of FSDP2."""
    torch.manual_seed(0)
    model = GPT(SIZE)
    if name in PEERS:
        shape = (dist.get_world_size(),) if name == PEERS[0] else (-1, RANKS_PER_HOST)
        shape = shape if shape[0] > 0 else (dist.get_world_size() // RANKS_PER_HOST, RANKS_PER_HOST)
        names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for module in (*model.blocks, model):
            torch_fully_shard(module, mesh=mesh)
    elif name in planned:
        dshard.fully_shard(model, plan=planned[name])
    else:
        for block in model.blocks:
            dshard.fully_shard(block, strategy=name)
        dshard.fully_shard(model, strategy=name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = training_step(model, optimizer, ids)

    def run() -> Reader:
        return watched(name if name in PEERS else "dshard", model, step)

    return run


def link_ms(num_rounds: int) -> dict[str, Any]:
    """Milliseconds of an all-reduce of `MESSAGE_BYTES` by gloo: within a host, and over both."""
    mesh = init_device_mesh("cpu", (2, RANKS_PER_HOST), mesh_dim_names=("hosts", "ranks"))
    groups = {
        "within a host": mesh.get_group("ranks"),
        "across hosts": mesh.get_group("hosts"),
        "all": dist.group.WORLD,
    }
    message = torch.ones(MESSAGE_BYTES // 4)

    def once(group: Any) -> Callable[[], float]:
        def run() -> float:
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(message, group=group)
            return time.perf_counter() - start

        return run

    return {name: summary_of([once(group)() for _ in range(num_rounds + 2)][2:]) for name, group in groups.items()}


def tiny_units() -> dict[str, Step]:
    """Steps of many tiny units: with values in the message of their header, in messages of their own, and FSDP2's."""
    work = FAMILY["150 tiny blocks"]
    sharded, peer = work.step_of("dshard", TINY), work.step_of("FSDP2", TINY)
    ways: Any = transport_of(ShardGroup.of_mesh(default_mesh().get_group(), torch.device("cpu")))
    most = ways.inline_bytes

    def with_most(num_bytes: int) -> Step:
        def run() -> Reader | None:
            ways.inline_bytes = num_bytes
            return sharded()

        return run

    return {"one message for header and values": with_most(most), "two messages": with_most(0), "FSDP2": peer}


def sent_bytes(step: Step) -> int:
    """Bytes that this host sends to the other one in a step, by the device's own count; all ranks must call this."""
    counter = Path("/sys/class/net/dshard-link/statistics/tx_bytes")
    dist.barrier()
    before = int(counter.read_text())
    for _ in range(NUM_COUNTED):
        step()
    dist.barrier()
    return (int(counter.read_text()) - before) // NUM_COUNTED


def measure(options: argparse.Namespace) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    links = link_ms(options.rounds)
    ids = torch.randint(0, SIZE.vocab, (BATCH, TOKENS + 1))
    planned, predicted = plans(ids)
    variants = {name: variant(name, ids, planned) for name in (*STRATEGIES, *planned, *PEERS)}
    numel = sum(p.numel() for p in GPT(SIZE).parameters())
    rows = timed(variants, num_rounds=options.rounds)
    for name, step in variants.items():
        rows[name]["sent_mb"] = sent_bytes(step) / 1e6
        rows[name]["predicted_ms"] = predicted.get(name)
    tiny = timed(tiny_units(), num_rounds=options.rounds)
    if dist.get_rank() == 0:
        print(f"\nall-reduce of {MESSAGE_BYTES >> 20} MB\n{timing_table(links)}")
        print(f"\na step, {4 * numel / 1e6:.1f} MB of parameters\n{timing_table(rows, with_exposed=True)}")
        print(f"\na step of 37 tiny blocks\n{timing_table(tiny)}")
        print("\npredicted, and by how much that is off")
        for name, seconds in predicted.items():
            print(f"{name:<32}{seconds:8.1f} ms {seconds / (rows[name]['median_ms'] or 1.0) - 1:+8.0%}")
        for name, plan in planned.items():
            print(f"\n{name}: {plan}")
        print("\nMB that a host sends to the other one in a step")
        print("\n".join(f"{name:<32}{row['sent_mb']:8.1f}" for name, row in rows.items()))
        output = Output(f"python -m benchmarks.two_hosts --rate {options.rate} --rounds {options.rounds}", options.out)
        facts = output.header(num_hosts=2, ranks_per_host=RANKS_PER_HOST, rate=options.rate, parameter_bytes=4 * numel)
        panel = Bars("a training step on two hosts", "ms, median", {"": {k: r["median_ms"] for k, r in rows.items()}})
        output.write(
            "two_hosts_gloo_4",
            {
                "header": facts,
                "all_reduce": links,
                "steps": rows,
                "tiny_units": tiny,
                "plans": {name: str(plan) for name, plan in planned.items()},
            },
            [panel],
        )
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Parse the command line; set the hosts up, or be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc writes it")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON and the plot; by default none")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measure(options)
        return 0
    if shutil.which("ip") is None or shutil.which("tc") is None:
        print("skipped: two hosts need `ip` and `tc` (Debian's iproute2), which are not installed")
        return 0
    try:
        with two_hosts(options.rate):
            return launch(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        print(f"skipped: this machine does not allow network namespaces ({error.stderr.strip()})")
        return 0


if __name__ == "__main__":
    sys.exit(main())
