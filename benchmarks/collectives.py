"""Gather and reduce one unit: dshard's bucket collectives beside the backend's own, interleaved in one run.

python benchmarks/collectives.py [--ranks 2] [--rounds 30] [--no-write]
"""

import argparse
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from _common import header, interleave, run_ranks, summary, table, write

from dshard.collectives import BufferPool, GatherPlan, ReduceBucket, ShardGroup, all_gather
from dshard.collectives.header import HEADER_BYTES, Kind, check_headers
from dshard.collectives.header import header as make_header
from dshard.layout import BucketLayout, ShardLayout

NUM_HEADERS = 100
WIDTH = 512  # one GPT block: 12 parameters, 12.6 MB in fp32
SHAPES = [(3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,), (4 * WIDTH, WIDTH), (4 * WIDTH,)]
SHAPES += [(WIDTH, 4 * WIDTH), (WIDTH,), (WIDTH,), (WIDTH,), (WIDTH,), (WIDTH,)]


def bench(num_rounds: int, keep: bool) -> None:
    """Time all variants on this rank; rank 0 prints and writes."""
    warnings.simplefilter("ignore")
    group = ShardGroup(dist.group.WORLD, torch.device("cpu"))
    layouts = [ShardLayout(shape, 0, group.num_ranks) for shape in SHAPES]
    bucket = BucketLayout.of(layouts)
    shards = [torch.randn(layout.local_shape(group.rank)) for layout in layouts]
    grads = [torch.randn(shape) for shape in SHAPES]
    strides = [torch.empty(shape, device="meta").stride() for shape in SHAPES]
    segment, flat = torch.randn(bucket.segment_numel), torch.randn(bucket.segment_numel * group.num_ranks)
    received = torch.empty_like(flat)
    pool = BufferPool()

    native = ShardGroup(dist.group.WORLD, torch.device("cpu"))
    native.is_direct = False  # the same buckets, over the backend's own collectives

    def gather(over: ShardGroup) -> None:
        plan = GatherPlan.of(bucket, strides, torch.float32, over)
        gathered = all_gather(shards, plan, over, label="unit", take=pool.take).wait()
        memory = gathered.memory
        del gathered
        pool.give(memory)

    def reduce(over: ShardGroup) -> None:
        cpu = torch.device("cpu")
        reduction = ReduceBucket(bucket, over, dtype=torch.float32, device=cpu, label="unit", pool=pool)
        for i, grad in enumerate(grads):
            reduction.add(i, grad)
        reduction.launch(mean=True).wait()

    raw = torch.empty((group.num_ranks, HEADER_BYTES), dtype=torch.uint8)

    def headers() -> None:
        for _ in range(NUM_HEADERS):
            own = make_header(Kind.GATHER, "blocks.0", 1)
            raw.copy_(own.expand_as(raw))  # one more row per peer than a gather writes
            check_headers(raw, own, Kind.GATHER, "blocks.0")

    variants = {
        f"{NUM_HEADERS} headers, made and compared": headers,
        "all-gather of a bucket, direct": partial(gather, group),
        "all-gather of a bucket, backend's own": partial(gather, native),
        "all-gather of a flat buffer, backend's own": lambda: dist.all_gather_single(received, segment),
        "reduce-scatter of a bucket, direct": partial(reduce, group),
        "reduce-scatter of a bucket, backend's own": partial(reduce, native),
        "reduce-scatter of a flat buffer, backend's own": lambda: dist.reduce_scatter_single(segment, flat),
        "all-reduce of a flat buffer, backend's own": lambda: dist.all_reduce(flat),
    }
    times = interleave(variants, num_rounds=num_rounds, num_warmups=5)
    if group.rank:
        return
    rows = {name: summary(t) for name, t in times.items()}
    num_bytes = bucket.segment_numel * group.num_ranks * 4
    facts = header(backend="gloo", num_ranks=group.num_ranks, num_bytes=num_bytes, num_tensors=len(SHAPES))
    print(f"one unit of {num_bytes / 1e6:.1f} MB in {len(SHAPES)} tensors, {group.num_ranks} gloo ranks")
    print(table(rows))
    if keep:
        print(f"wrote {write(f'collectives_gloo_{group.num_ranks}', {'header': facts, 'rows': rows}).name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    run_ranks(bench, options.ranks, options.rounds, not options.no_write)
