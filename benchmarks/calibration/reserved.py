"""What CUDA's allocator reserves for a training step: the factor of `memory_of="reserved"`, measured.

```console
$ python -m benchmarks.calibration.reserved --out benchmarks/results/reserved.json
```

Needs one CUDA device, which plays one of eight ranks: kernels and allocations are real, collectives send nothing. Each
row is a GPT in bf16 beside fp32 with fused AdamW, after steps that fill the allocator's cache, with CUDA's default
segments and with `expandable_segments:True`. Beside each stands what the planner predicts.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import dshard
from dshard.cli.models import GPT, GPTConfig
from dshard.planner import Training, cluster_of
from dshard.testing import fake_world
from dshard.testing.training import checkpoint_blocks

RANKS, VOCAB, STEPS = 8, 32000, 4
SIZES = {  # layers, width, heads, samples, tokens, whether blocks are computed again
    "12 x 768": (12, 768, 12, 8, 1024, False),
    "24 x 2048": (24, 2048, 16, 4, 2048, False),
    "24 x 2048, checkpointed": (24, 2048, 16, 8, 2048, True),
    "12 x 4096": (12, 4096, 32, 2, 2048, False),
}
STRATEGIES = ("ddp", "keep", "full", "FSDP2")
SEGMENTS = {"reserved": "", "expandable": "expandable_segments:True"}


def _loss(logits: torch.Tensor) -> torch.Tensor:
    rows = logits.flatten(0, 1)
    return F.cross_entropy(rows, torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device))


def measure(size: str, strategy: str) -> dict[str, Any]:
    """Peaks of a step of one of eight ranks, in bytes."""
    layers, width, heads, batch, tokens, is_again = SIZES[size]
    config = GPTConfig(tokens, layers, width, heads, VOCAB)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with fake_world(0, RANKS):
        mesh = init_device_mesh("cuda", (RANKS,))
        with torch.device("cuda"):
            model = GPT(config)
        if is_again:
            checkpoint_blocks(model)
        if strategy == "FSDP2":
            for block in model.blocks:
                torch_fully_shard(block, mesh=mesh, mp_policy=policy)
            torch_fully_shard(model, mesh=mesh, mp_policy=policy)
        else:
            dshard.fully_shard(model, mesh=mesh, mp_policy=policy, strategy=strategy)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.zeros(batch, tokens, dtype=torch.int64, device="cuda")
        for step in range(STEPS):
            if step == 1:  # the whole model was there while it was cut
                gc.collect()
                torch.cuda.empty_cache()
            if step == STEPS - 1:
                torch.cuda.reset_peak_memory_stats()
            _loss(model(ids)).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
    with torch.device("meta"):
        plain, sample = GPT(config), torch.empty(batch, tokens, dtype=torch.int64)
    if is_again:
        checkpoint_blocks(plain)
    training = Training(torch.bfloat16, torch.float32, step_bytes_per_element=0)
    given = {"cluster": cluster_of("h200", RANKS), "device": "h200", "training": training, "loss_of": _loss}
    name = "full" if strategy == "FSDP2" else strategy
    plan = dshard.plan(plain, sample, strategies=name, memory="10TiB", **given)  # type: ignore[arg-type]
    return {
        "model": size,
        "strategy": strategy,
        "predicted_bytes": plan.peak_bytes,
        "requested_bytes": stats["requested_bytes.all.peak"],
        "active_bytes": stats["active_bytes.all.peak"],
        "reserved_bytes": stats["reserved_bytes.all.peak"],
    }


def main() -> None:
    """Measures all rows, each in a process of its own; prints them, and writes them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(*args.only)))
        return
    rows = []
    print("| model | strategy | segments | live over requested | reserved over requested |\n|---|---|---|---|---|")
    for size in SIZES:
        for strategy in STRATEGIES:
            for memory_of, setting in SEGMENTS.items():
                command = [sys.executable, "-m", "benchmarks.calibration.reserved", "--only", size, strategy]
                settings = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
                done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
                if done.returncode:
                    print(f"{size} {strategy} {memory_of}: {done.stderr.strip().splitlines()[-1]}")
                    continue
                row = {"memory_of": memory_of, **json.loads(done.stdout.splitlines()[-1])}
                rows.append(row)
                live, reserved = (row[f"{name}_bytes"] / row["requested_bytes"] for name in ("predicted", "reserved"))
                print(f"| {size} | {strategy} | {memory_of} | {live:.3f} | {reserved:.3f} |", flush=True)
    if args.out is not None:
        record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
