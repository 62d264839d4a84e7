"""Two parts of a step, each alone: the collectives of one unit, and an optimizer's step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import dshard
from benchmarks.measure import Step, Summary, on_ranks, timed
from benchmarks.models import mesh_of
from benchmarks.output import Output, bars_of, timing_table
from dshard.collectives import BufferPool, GatherPlan, ReduceBucket, ReducePlan, ShardGroup, all_gather, ledger
from dshard.collectives.divergence import Kind, check_headers, header
from dshard.layout import BucketLayout, ShardLayout

_CPU = torch.device("cpu")
_NUM_NOTED = 100  # collectives: of a step of 33 blocks
_dist: Any = dist  # torch 2.11 has the old names alone
_gather_flat = getattr(dist, "all_gather_single", None) or _dist.all_gather_into_tensor
_reduce_flat = getattr(dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor

_PLAIN = "plain, shards' sizes"
_STACKS = {"8 layers of width 256": (8, 256), "50 layers of width 16": (50, 16)}
_MODES: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def _bucket(width: int, num_ranks: int) -> BucketLayout:
    """The 12 parameters of one GPT block; 12.6 MB in fp32 at width 512."""
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    vectors = [(3 * width,), (4 * width,)] + [(width,)] * 6
    shapes: list[tuple[int, ...]] = [*matrices, *vectors]
    return BucketLayout.of([ShardLayout(shape, 0, num_ranks) for shape in shapes])


def _gather(group: ShardGroup, shards: list[torch.Tensor], bucket: BucketLayout, pool: BufferPool) -> None:
    strides = [torch.empty(layout.shape, device="meta").stride() for layout in bucket.layouts]
    plan = GatherPlan.of(bucket, strides, torch.float32, group)
    gathered = all_gather(shards, plan, group, label="unit", pool=pool).wait()
    memory = gathered.memory
    del gathered
    if memory is not None:
        pool.give(memory)


def _reduce(group: ShardGroup, grads: list[torch.Tensor], bucket: BucketLayout, pool: BufferPool) -> None:
    reduction = ReduceBucket(ReducePlan(bucket, group), dtype=torch.float32, device=_CPU, label="unit", pool=pool)
    for i, grad in enumerate(grads):
        reduction.add([i], [grad])
    reduction.launch(mean=True).wait()


def _headers(group: ShardGroup) -> None:
    """What gloo's ranks send ahead of 100 collectives, and how they compare it."""
    for number in range(_NUM_NOTED):
        own = header(Kind.GATHER, f"blocks.{number}", 0, 0)
        check_headers([own] * group.num_ranks, own, Kind.GATHER, f"blocks.{number}", group)


def _ledger(group: ShardGroup) -> None:
    """What hosts do for 100 collectives of a backend that has no headers, and once to compare them."""
    for number in range(_NUM_NOTED):
        ledger.note(group, Kind.GATHER, f"blocks.{number}", 0)
    ledger.settle([group])


def _collectives(width: int, num_rounds: int) -> dict[str, Summary]:
    """Time all variants on this rank."""
    assert dist.group.WORLD is not None
    group, native = ShardGroup(dist.group.WORLD, _CPU), ShardGroup(dist.group.WORLD, _CPU)
    native.is_direct = False  # the same buckets, over the backend's own collectives
    bucket, pool = _bucket(width, group.num_ranks), BufferPool()
    shards = [torch.randn(layout.local_shape(group.rank)) for layout in bucket.layouts]
    grads = [torch.randn(layout.shape) for layout in bucket.layouts]
    segment, flat = torch.randn(bucket.segment_numel), torch.randn(bucket.segment_numel * group.num_ranks)
    variants: dict[str, Step] = {
        "100 headers, made and compared": partial(_headers, group),
        "100 collectives, noted and compared by hosts": partial(_ledger, native),
        "all-gather of a bucket, direct": partial(_gather, group, shards, bucket, pool),
        "all-gather of a bucket, backend's own": partial(_gather, native, shards, bucket, pool),
        "all-gather of a flat buffer, backend's own": partial(_gather_flat, torch.empty_like(flat), segment),
        "reduce-scatter of a bucket, direct": partial(_reduce, group, grads, bucket, pool),
        "reduce-scatter of a bucket, backend's own": partial(_reduce, native, grads, bucket, pool),
        "reduce-scatter of a flat buffer, backend's own": partial(_reduce_flat, segment, flat),
        "all-reduce of a flat buffer, backend's own": partial(dist.all_reduce, flat),
    }
    return timed(variants, num_rounds=num_rounds, num_warmups=5)


def run_collectives(output: Output, *, ranks: int = 2, rounds: int = 30, width: int = 512) -> None:
    """All-gather and reduce-scatter of one unit, over gloo."""
    rows = on_ranks(ranks, _collectives, width, rounds)[0]
    bucket = _bucket(width, ranks)
    num_bytes, num_tensors = bucket.segment_numel * ranks * 4, len(bucket.layouts)
    print(f"one unit of {num_bytes / 1e6:.1f} MB in {num_tensors} tensors, {ranks} gloo ranks\n{timing_table(rows)}")
    facts = output.header(backend="gloo", num_ranks=ranks, num_bytes=num_bytes, num_tensors=num_tensors)
    panel = bars_of("one unit", {name: {"": row} for name, row in rows.items()}, "median_ms")
    output.write(f"collectives_gloo_{ranks}", {"header": facts, "rows": rows}, [panel])


def _layers(num_layers: int, width: int) -> nn.Module:
    """Layers with the parameters of a transformer's blocks, eight each."""
    torch.manual_seed(0)
    made: list[nn.Module] = []
    for _ in range(num_layers):
        made += [nn.LayerNorm(width), nn.Linear(width, 3 * width)]
        made += [nn.Linear(width, 4 * width), nn.Linear(4 * width, width)]
    return nn.Sequential(*made)


def _optimizer(stack: str, mode: str, num_rounds: int) -> dict[str, Summary]:
    """Time all variants on this rank."""
    mesh = mesh_of(_CPU)
    sharded: Any = dshard.fully_shard(_layers(*_STACKS[stack]), mesh=mesh)
    fsdp2: Any = torch_fully_shard(_layers(*_STACKS[stack]), mesh=mesh)
    parameters: dict[str, list[Any]] = {
        "dshard": list(sharded.parameters()),
        _PLAIN: [nn.Parameter(p.to_local().clone()) for p in sharded.parameters()],
        "FSDP2": list(fsdp2.parameters()),
    }
    steps: dict[str, Any] = {}
    for name, params in parameters.items():
        steps[name] = torch.optim.AdamW(params, lr=1e-3, **_MODES[mode]).step
        for param in params:
            param.grad = torch.ones_like(param)
    return timed(steps, num_rounds=num_rounds)


def run_optimizer(output: Output, *, ranks: int = 2, rounds: int = 20) -> None:
    """An AdamW step on shards, on plain tensors of their sizes and on FSDP2's DTensors, over gloo."""
    results: dict[str, dict[str, Summary]] = {}
    for stack in _STACKS:
        for mode in _MODES:
            case = f"{stack}, {mode}"
            rows = results[case] = on_ranks(ranks, _optimizer, stack, mode, rounds)[0]
            ratio = (rows["dshard"]["median_ms"] or 0.0) / (rows[_PLAIN]["median_ms"] or 1.0)
            print(f"\nAdamW, {case}: dshard takes {ratio:.2f} times the time of plain tensors")
            print(timing_table(rows), flush=True)
    content = {"header": output.header(num_ranks=ranks), "rows": results}
    output.write(f"optimizer_gloo_{ranks}", content, [bars_of("an AdamW step", results, "median_ms")])
