"""One optimizer step on shards, beside plain tensors of the shards' sizes and FSDP2's DTensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import dshard
from dshard.bench.common import WORLD_TIMEOUT_S, Step, Summary, gloo_world, interleave, summary
from dshard.bench.models import mesh_of
from dshard.bench.output import Output, timing_table
from dshard.bench.plots import Bars

_PLAIN = "plain, shards' sizes"
_MODES: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
_NUM_WARMUPS = 3


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers with the parameters of a transformer's blocks, eight each."""

    layers: int
    width: int

    @property
    def name(self) -> str:
        """Name that people read."""
        return f"{self.layers} layers of width {self.width}"


STACKS = (Stack(8, 256), Stack(50, 16))


def _build(stack: Stack) -> list[nn.Module]:
    torch.manual_seed(0)
    width = stack.width
    made: list[nn.Module] = []
    for _ in range(stack.layers):
        made += [nn.LayerNorm(width), nn.Linear(width, 3 * width)]
        made += [nn.Linear(width, 4 * width), nn.Linear(4 * width, width)]
    return made


def _steps(stack: Stack, options: dict[str, Any]) -> dict[str, Step]:
    """A step of each variant."""
    mesh = mesh_of(torch.device("cpu"))
    sharded: Any = dshard.fully_shard(nn.Sequential(*_build(stack)), mesh=mesh)
    fsdp2: Any = torch_fully_shard(nn.Sequential(*_build(stack)), mesh=mesh)
    parameters: dict[str, list[Any]] = {
        "dshard": list(sharded.parameters()),
        _PLAIN: [nn.Parameter(p.to_local().clone()) for p in sharded.parameters()],
        "FSDP2": list(fsdp2.parameters()),
    }
    made: dict[str, Step] = {}
    for name, params in parameters.items():
        optimizer = torch.optim.AdamW(params, lr=1e-3, **options)
        for param in params:
            param.grad = torch.ones_like(param)
        made[name] = optimizer.step
    return made


def _measure(stack: Stack, mode: str, num_rounds: int) -> dict[str, Summary]:
    """Time all variants on this rank."""
    samples = interleave(_steps(stack, _MODES[mode]), num_rounds=num_rounds, num_warmups=_NUM_WARMUPS)
    return {name: summary(some) for name, some in samples.items()}


def run(output: Output, *, num_ranks: int, num_rounds: int, stacks: tuple[Stack, ...]) -> None:
    """Measure, print and write `optimizer_gloo_N`; the times are rank 0's."""
    results: dict[str, dict[str, Summary]] = {}
    with gloo_world(num_ranks) as world:
        for stack in stacks:
            for mode in _MODES:
                rows = world.run(_measure, stack, mode, num_rounds, timeout_s=WORLD_TIMEOUT_S)[0]
                ratio = (rows["dshard"]["median_ms"] or 0.0) / (rows[_PLAIN]["median_ms"] or 1.0)
                case = f"{stack.name}, {mode}"
                results[case] = rows
                print(f"\nAdamW, {case}: dshard takes {ratio:.2f} times the time of plain tensors")
                print(timing_table(rows), flush=True)
    values = {case: {name: row["median_ms"] for name, row in rows.items()} for case, rows in results.items()}
    content = {"header": output.header(num_ranks=num_ranks), "rows": results}
    output.write(f"optimizer_gloo_{num_ranks}", content, [Bars("an AdamW step", "ms, median", values)])
