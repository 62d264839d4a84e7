"""Gather and reduce one unit: dshard's bucket collectives beside the backend's own, interleaved in one run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dshard.bench.common import WORLD_TIMEOUT_S, Step, Summary, gloo_world, interleave, summary
from dshard.bench.output import Output, timing_table
from dshard.bench.plots import Bars
from dshard.collectives import BufferPool, GatherPlan, ReduceBucket, ReducePlan, ShardGroup, all_gather
from dshard.collectives.header import Kind, check_headers
from dshard.collectives.header import header as make_header
from dshard.layout import BucketLayout, ShardLayout

_CPU = torch.device("cpu")
_NUM_HEADERS = 100
_NUM_WARMUPS = 5
_dist: Any = dist  # torch 2.11 has the old names alone
_gather_flat = getattr(dist, "all_gather_single", None) or _dist.all_gather_into_tensor
_reduce_flat = getattr(dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class _Measured:
    """What one rank has measured."""

    num_bytes: int
    num_tensors: int
    rows: dict[str, Summary]


def _shapes(width: int) -> list[tuple[int, ...]]:
    """Shapes of the 12 parameters of one GPT block; 12.6 MB in fp32 at width 512."""
    matrices: list[tuple[int, ...]] = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    return matrices + [(3 * width,), (4 * width,)] + [(width,)] * 6


def _gather(group: ShardGroup, shards: list[torch.Tensor], bucket: BucketLayout, pool: BufferPool) -> None:
    strides = [torch.empty(layout.shape, device="meta").stride() for layout in bucket.layouts]
    plan = GatherPlan.of(bucket, strides, torch.float32, group)
    gathered = all_gather(shards, plan, group, label="unit", pool=pool).wait()
    memory = gathered.memory
    del gathered
    if memory is not None:
        pool.give(memory)


def _reduce(group: ShardGroup, grads: list[torch.Tensor], bucket: BucketLayout, pool: BufferPool) -> None:
    reduction = ReduceBucket(ReducePlan.of(bucket, group), dtype=torch.float32, device=_CPU, label="unit", pool=pool)
    for i, grad in enumerate(grads):
        reduction.add(i, grad)
    reduction.launch(mean=True).wait()


def _headers(group: ShardGroup) -> None:
    """As often as that: make a header, receive as many as there are ranks, and compare."""
    for _ in range(_NUM_HEADERS):
        own = make_header(Kind.GATHER, "blocks.0", 1)
        check_headers([bytes(bytearray(own)) for _ in range(group.num_ranks)], own, Kind.GATHER, "blocks.0")


def _variants(bucket: BucketLayout, group: ShardGroup) -> dict[str, Any]:
    native = ShardGroup(group.process_group, _CPU)
    native.is_direct = False  # the same buckets, over the backend's own collectives
    shards = [torch.randn(layout.local_shape(group.rank)) for layout in bucket.layouts]
    grads = [torch.randn(layout.shape) for layout in bucket.layouts]
    segment, flat = torch.randn(bucket.segment_numel), torch.randn(bucket.segment_numel * group.num_ranks)
    received = torch.empty_like(flat)
    pool = BufferPool()
    return {
        f"{_NUM_HEADERS} headers, made and compared": partial(_headers, group),
        "all-gather of a bucket, direct": partial(_gather, group, shards, bucket, pool),
        "all-gather of a bucket, backend's own": partial(_gather, native, shards, bucket, pool),
        "all-gather of a flat buffer, backend's own": partial(_gather_flat, received, segment),
        "reduce-scatter of a bucket, direct": partial(_reduce, group, grads, bucket, pool),
        "reduce-scatter of a bucket, backend's own": partial(_reduce, native, grads, bucket, pool),
        "reduce-scatter of a flat buffer, backend's own": partial(_reduce_flat, segment, flat),
        "all-reduce of a flat buffer, backend's own": partial(dist.all_reduce, flat),
    }


def _measure(width: int, num_rounds: int) -> _Measured:
    """Time all variants on this rank."""
    assert dist.group.WORLD is not None
    group = ShardGroup(dist.group.WORLD, _CPU)
    bucket = BucketLayout.of([ShardLayout(shape, 0, group.num_ranks) for shape in _shapes(width)])
    variants: dict[str, Step] = _variants(bucket, group)
    samples = interleave(variants, num_rounds=num_rounds, num_warmups=_NUM_WARMUPS)
    rows = {name: summary(some) for name, some in samples.items()}
    return _Measured(bucket.segment_numel * group.num_ranks * 4, len(bucket.layouts), rows)


def run(output: Output, *, num_ranks: int, num_rounds: int, width: int) -> None:
    """Measure, print and write `collectives_gloo_N`; the times are rank 0's."""
    with gloo_world(num_ranks) as world:
        measured = world.run(_measure, width, num_rounds, timeout_s=WORLD_TIMEOUT_S)[0]
    size = {"num_bytes": measured.num_bytes, "num_tensors": measured.num_tensors}
    facts = output.header(backend="gloo", num_ranks=num_ranks, **size)
    print(f"one unit of {measured.num_bytes / 1e6:.1f} MB in {measured.num_tensors} tensors, {num_ranks} gloo ranks")
    print(timing_table(measured.rows))
    panel = Bars("one unit", "ms, median", {name: {"": row["median_ms"]} for name, row in measured.rows.items()})
    output.write(f"collectives_gloo_{num_ranks}", {"header": facts, "rows": measured.rows}, [panel])
