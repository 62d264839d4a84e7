"""Muon's step over the matrices of a GPT: on one process, by owners, on every rank, and FSDP2's."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import distribute_tensor

import dshard
import dshard.optim
from benchmarks.measure import interleave, on_ranks
from benchmarks.models import mesh_of
from benchmarks.output import Output, bars_of

_ALONE, _AT_ONCE, _FSDP2 = "plain, one process", "plain, on each rank", "FSDP2"  # the second shows what ranks share
_OWNERS, _ALL = "dshard, owners", "dshard, every rank"


def _matrices(num_layers: int, width: int) -> nn.Module:
    """The four matrices of each block."""
    torch.manual_seed(0)
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * num_layers
    return nn.ParameterList([nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes])


def _measure(num_layers: int, width: int, num_rounds: int) -> dict[str, Any]:
    """Seconds of each variant on this rank, and CPU seconds of all ranks."""
    mesh = mesh_of(torch.device("cpu"))
    steps: dict[str, Callable[[], Any]] = {}
    models: dict[str, Any] = {_ALONE: _matrices(num_layers, width)}
    for name in (_OWNERS, _ALL):
        models[name] = dshard.fully_shard(_matrices(num_layers, width), mesh=mesh)
    models[_FSDP2] = torch_fully_shard(_matrices(num_layers, width), mesh=mesh)
    for name, model in models.items():
        optimizer = torch.optim.Muon(list(model.parameters()), lr=1e-3)
        if name == _ALL:
            dshard.optim.whole(optimizer, params=[])
        for number, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            full: Any = torch.randn(param.shape, generator=generator)
            (param * (distribute_tensor(full, mesh) if name == _FSDP2 else full)).sum().backward()
        steps[name] = optimizer.step
    steps[_AT_ONCE] = steps[_ALONE]
    if dist.get_rank() > 0:
        steps[_ALONE] = lambda: None
    samples = interleave(steps, num_rounds=num_rounds, num_warmups=2)
    found: dict[str, Any] = {}
    for name, some in samples.items():
        wall_s = statistics.median(sample.step_s for sample in some)
        cpu_s = torch.tensor([sample.cpu_s for sample in some], dtype=torch.float64)
        dist.all_reduce(cpu_s)
        found[name] = {"wall_ms": wall_s * 1e3, "cpu_ms": cpu_s.median().item() * 1e3, "rounds": len(some)}
    with dshard.CommTrace() as trace:
        steps[_OWNERS]()
    sent = torch.tensor([sum(record.payload_bytes for record in trace.records)])
    dist.all_reduce(sent)
    found["bytes"] = int(sent)
    return found


def run(
    output: Output, *, num_ranks: tuple[int, ...] = (2, 4), rounds: int = 5, layers: int = 6, width: int = 768
) -> None:
    """Muon over the matrices of a GPT, on gloo ranks with a thread each."""
    rows: dict[str, dict[str, Any]] = {}
    num_bytes = sum(p.numel() * 4 for p in _matrices(layers, width).parameters())
    for size in num_ranks:
        found = on_ranks(size, _measure, layers, width, rounds)[0]
        sent, alone = found.pop("bytes"), found[_ALONE]
        formula = 3 * num_bytes * (size - 1) // size  # parameter and gradient to the owner, the parameter back
        rows[f"{size} ranks"] = found
        print(
            f"\n{size} ranks, {layers} blocks {width} wide: owners' steps send {sent:,} bytes, by formula {formula:,}"
        )
        print(f"{'':<22}{'ms':>9}{'CPU ms, all ranks':>20}{'times one process':>20}{'CPU':>8}")
        for name, row in found.items():
            shares = row["wall_ms"] / alone["wall_ms"], row["cpu_ms"] / alone["cpu_ms"]
            print(
                f"{name:<22}{row['wall_ms']:>9.1f}{row['cpu_ms']:>20.1f}{shares[0]:>20.2f}{shares[1]:>8.2f}", flush=True
            )
    output.write(
        "muon_gloo",
        {"header": output.header(layers=layers, width=width), "rows": rows},
        [bars_of("Muon's step", rows, "wall_ms")],
    )
