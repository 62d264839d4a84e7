"""One optimizer step on shards, beside plain tensors of the shards' sizes and FSDP2's DTensors.

python benchmarks/optimizer.py [--rounds 20] [--no-write]
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

sys.path.insert(0, str(Path(__file__).parent))
from _common import header, interleave, run_ranks, summary, table, write

import dshard

SIZES = {"gpt, 8 layers of width 256": (8, 256), "50 layers of width 16": (50, 16)}
PLAIN = "plain, shards' sizes"
MODES = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def build(num_layers: int, width: int) -> nn.Module:
    """Blocks with the parameters of a transformer's."""
    torch.manual_seed(0)
    layer = [nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)]
    return nn.ModuleList(nn.ModuleList(type(m)(*_shape(m)) for m in layer) for _ in range(num_layers))


def _shape(module: nn.Module) -> tuple[Any, ...]:
    return (
        tuple(module.normalized_shape)
        if isinstance(module, nn.LayerNorm)
        else (module.in_features, module.out_features)
    )


def steps(num_layers: int, width: int, options: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """A step of each variant."""
    sharded = dshard.fully_shard(build(num_layers, width))
    fsdp2 = nn.Sequential(*build(num_layers, width).modules())  # a container that FSDP2 takes
    torch_fully_shard(fsdp2)
    parameters = {
        "dshard": list(sharded.parameters()),
        PLAIN: [nn.Parameter(p.to_local().clone()) for p in sharded.parameters()],
        "FSDP2": list(fsdp2.parameters()),
    }
    made = {}
    for name, params in parameters.items():
        optimizer = torch.optim.AdamW(params, lr=1e-3, **options)
        for param in params:
            param.grad = torch.ones_like(param)
        made[name] = optimizer.step
    return made


def bench(num_rounds: int, keep: bool) -> None:
    """Time all variants on this rank; rank 0 prints and writes."""
    results = {}
    for size, (num_layers, width) in SIZES.items():
        for mode, options in MODES.items():
            times = interleave(steps(num_layers, width, options), num_rounds=num_rounds, num_warmups=3)
            results[f"{size}, {mode}"] = {name: summary(t) for name, t in times.items()}
    if dist.get_rank():
        return
    for case, rows in results.items():
        ratio = rows["dshard"]["median_ms"] / rows[PLAIN]["median_ms"]
        print(f"\nAdamW, {case}: dshard takes {ratio:.2f} times the time of plain tensors")
        print(table(rows))
    if keep:
        print(f"wrote {write('optimizer_gloo_2', {'header': header(num_ranks=2), 'rows': results}).name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    run_ranks(bench, 2, options.rounds, not options.no_write)
