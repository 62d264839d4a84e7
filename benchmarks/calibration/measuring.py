"""The devices at hand, measured: what their products, attention, memory and links reach, as a profile.

```console
$ torchrun --nproc-per-node 2 -m benchmarks.calibration.measuring --out here.json
$ dshard plan gpt-nano --world 2 --device here --profile here.json --dtype float32 --sequence 64
```
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from benchmarks.calibration.sharing import measured_shares
from benchmarks.calibration.world import process_group, read_world
from dshard.collectives import ReduceOp, all_reduce
from dshard.planner import Cluster, Constant, Device, Rates, Wire
from dshard.planner.rates import HERE, Here, of_family, published
from dshard.planning.links import measure_links, total_bytes
from dshard.tensor.meshes import group_of

_ROUNDS = 7
_SHAPES: Mapping[str, tuple[tuple[int, int, int], ...]] = {  # rows, inner, columns: square, tall, narrow
    "cpu": ((512, 512, 512), (2048, 256, 1024), (256, 1024, 256)),
    "cuda": ((4096, 4096, 4096), (16384, 2048, 8192), (2048, 8192, 2048)),
}
_LENGTHS: Mapping[str, tuple[int, ...]] = {"cpu": (128, 256, 512), "cuda": (1024, 2048, 4096)}
_HEADS, _HEAD_DIM = 8, 64
_COPIED: Mapping[str, tuple[int, ...]] = {"cpu": (1 << 24, 1 << 25), "cuda": (1 << 27, 1 << 28)}  # no cache holds it
_BACKWARD = 2.5  # times the operations of attention's forward: five products in the place of two


@dataclass(frozen=True, slots=True)
class Reached:
    """A rate that was measured.

    Args:
        per_s: FLOP or bytes per second: the median of all shapes.
        uncertainty: Standard deviation of its logarithm over the shapes.
    """

    per_s: float
    uncertainty: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured.

    Args:
        rates: A profile of which the device "here" is a part.
        reached: Rates by name, on the slowest rank.
        shares: Constants of what ranks share, where they could be measured.
    """

    rates: Rates
    reached: dict[str, Reached]
    shares: dict[str, Constant]


def measure_here(device: torch.device, known: Rates, mesh: DeviceMesh | None = None) -> Measured:
    """Measure the device at hand, and the links between those of a mesh.

    The device is described so that the parts of its figures that a profile knows give what was measured: its peak is
    what products reached, over the part that the profile has them reach. Constants stay as they are known, but for
    those of what ranks share: what computation loses beside collectives, where these run beside it, and contention
    between three hosts or more.

    Args:
        device: Of this rank.
        known: The profile that is taken for all that is not measured.
        mesh: Of the ranks at hand, of one dim; None where there is one.

    Communicates:
        What `measure_links` and `measured_shares` do, and an all-reduce: all ranks get the rates of the slowest.
    """
    reached = _rates_of(device)
    if mesh is not None:
        reached = _slowest(reached, mesh)
    cluster = None if mesh is None else measure_links(mesh, again=True)
    shares = {} if mesh is None or cluster is None else measured_shares(mesh, cluster, known.constants)
    known = replace(known, constants=known.constants | shares)
    described = _described(device, known, reached, cluster)
    if cluster is not None:
        cluster = replace(cluster, memory_bytes=described.limit_bytes)
        if "interference" in shares:
            cluster = replace(cluster, interference=shares["interference"].value)
    here = Here(described, cluster)
    return Measured(replace(known, here=here, source=f"{known.source}; {described.source}"), reached, shares)


def _rates_of(device: torch.device) -> dict[str, Reached]:
    """Products and attention by dtype, and memory."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        found[f"products {name}"] = products(device, dtype)
        found[f"attention {name}"] = attention(device, dtype)
    return found | {"memory": memory(device)}


def products(device: torch.device, dtype: torch.dtype) -> Reached:
    """FLOP per second of matrix products."""
    found = []
    for rows, inner, columns in _SHAPES[device.type]:
        a = torch.randn(rows, inner, device=device).to(dtype)
        b = torch.randn(inner, columns, device=device).to(dtype)
        found.append(2 * rows * inner * columns / _median_s(partial(torch.mm, a, b), device))
    return _reached(found)


def attention(device: torch.device, dtype: torch.dtype) -> Reached:
    """FLOP per second of attention, forward and backward, counted without mask."""
    found = []
    for length in _LENGTHS[device.type]:
        x = torch.randn(1, _HEADS, length, _HEAD_DIM, device=device).to(dtype).requires_grad_()
        num = (1 + _BACKWARD) * 4 * _HEADS * length * length * _HEAD_DIM
        found.append(num / _median_s(partial(_attend, x), device))
    return _reached(found)


def _attend(x: Tensor) -> None:
    F.scaled_dot_product_attention(x, x, x).sum().backward()


def memory(device: torch.device) -> Reached:
    """Bytes per second of copies, read and written."""
    found = []
    for numel in _COPIED[device.type]:
        x = torch.ones(numel, device=device)
        y = torch.zeros_like(x)
        found.append(2 * x.nbytes / _median_s(partial(y.copy_, x), device))
    return _reached(found)


def _slowest(reached: dict[str, Reached], mesh: DeviceMesh) -> dict[str, Reached]:
    """The least rates of all ranks, and the largest uncertainties."""
    group = group_of(mesh)
    rows = [[each.per_s, -each.uncertainty] for each in reached.values()]
    mine = torch.tensor(rows, dtype=torch.float64, device=group.device)
    least = all_reduce([mine], group, ReduceOp.MIN, label="calibrate").wait()[0].tolist()
    return {name: Reached(per_s, -uncertainty) for name, (per_s, uncertainty) in zip(reached, least, strict=True)}


def _described(device: torch.device, known: Rates, reached: dict[str, Reached], cluster: Cluster | None) -> Device:
    """The device, with figures of which the profile's parts are what was measured."""
    near = far = Wire(1e12, 0.0)  # of one rank: nothing is sent
    per_host = num_ranks = 1
    if cluster is not None:
        link, per_host, num_ranks = cluster.inside.all_gather, cluster.ranks_per_host, cluster.num_ranks
        near = Wire(1 / max(link.seconds_per_byte * known.values["inside"], 1e-15), link.alpha_s / known.values["hops"])
        across = (cluster.across or cluster.inside).all_gather
        contended = max(1.0, num_ranks / per_host / 2) ** known.values["contention"]  # of two hosts' rate
        far = Wire(contended / max(across.seconds_per_byte * known.values["between"], 1e-15), near.latency_s)
    blank = Device(HERE, {"float32": 1.0}, 1.0, 1, per_host, near, far, "")
    of_products = of_family(known.values, "product", blank)
    peaks = {name.split()[1]: each.per_s / of_products for name, each in reached.items() if name.startswith("products")}
    return replace(
        blank,
        flops_per_s=peaks,
        memory_bytes_per_s=reached["memory"].per_s / known.values["memory"],
        memory_bytes=total_bytes(device, per_host),
        source=f"measured on {num_ranks} {device.type} rank{'s' * (num_ranks > 1)}",
    )


def _reached(rates: list[float]) -> Reached:
    return Reached(statistics.median(rates), statistics.stdev(map(math.log, rates)))


def _median_s(run: Callable[[], object], device: torch.device) -> float:
    """Of some runs, after two that do not count."""
    times = []
    for _ in range(_ROUNDS + 2):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def links_lines(here: Here | None) -> list[str]:
    """Of ranks that measured: how long a gather and a reduction take."""
    if here is None or here.cluster is None:
        return []
    cluster = here.cluster
    lines = []
    for name in ("all_gather", "reduce_scatter", "all_reduce", "in_place"):
        link = getattr(cluster.shards[cluster.num_ranks], name)
        if link is not None:
            rate = f"{1e-9 / link.seconds_per_byte:.3g} GB/s" if link.seconds_per_byte else "no time per byte"
            lines.append(f"{name} among {cluster.num_ranks} ranks: {link.alpha_s * 1e6:.0f} us, {rate}")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measures on all ranks; the first prints and writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="write the profile as JSON")
    args = parser.parse_args(argv)
    world, known = read_world(os.environ), published()
    if world.size == 1:
        found = measure_here(world.device, known)
    else:
        if world.device.type == "cpu":
            torch.set_num_threads(1)  # as torchrun's ranks train
        with process_group(world):
            mesh = torch.distributed.init_device_mesh(world.device.type, (world.size,))
            found = measure_here(world.device, known, mesh)
    if not world.is_first:
        return
    print("| measured | per second | spread over shapes |\n|---|---|---|")
    for name, each in found.reached.items():
        unit = "GB" if name == "memory" else "GFLOP"
        print(f"| {name} | {each.per_s / 1e9:.4g} {unit} | {each.uncertainty:.0%} |")
    print("\n".join(links_lines(found.rates.here)))
    for name, constant in found.shares.items():
        print(f"{name}: {constant.value:.3g} {constant.unit}, known to {constant.uncertainty:.0%}")
    if args.out is not None:
        found.rates.save(args.out)


if __name__ == "__main__":
    main()
