"""Buckets over the wire: values, sums bit for bit, calls and bytes by formula, ranks that disagree."""

import math
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dshard.collectives import (
    CommTrace,
    GatherPlan,
    ReduceBucket,
    ReduceOp,
    ReducePlan,
    ShardGroup,
    all_gather,
    all_reduce,
    broadcast,
)
from dshard.errors import DivergenceError
from dshard.layout import BucketLayout, ShardLayout
from dshard.testing import WorldPool, expect_error, fake_world
from dshard.testing.strategies import DTYPES, FLOAT_DTYPES, TensorCase, shapes, world_sizes
from tests.kit import oracle

CPU = torch.device("cpu")
HEADER_BYTES = 64
REDUCED_DTYPES = (*FLOAT_DTYPES, torch.complex64)


@dataclass(frozen=True)
class Item:
    """One tensor of a bucket: its shape, the dim it is cut along, and whether its memory is transposed."""

    shape: tuple[int, ...]
    dim: int | None
    contiguous: bool = True

    def full(self, dtype, seed):
        return TensorCase(self.shape, dtype, self.dim, 1, seed, self.contiguous).full()


@st.composite
def items(draw):
    shape = draw(shapes())
    dim = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
    return Item(shape, dim, draw(st.booleans()))


BUCKETS = st.lists(items(), min_size=1, max_size=5)


def world_group():
    return ShardGroup(dist.group.WORLD, CPU)


def layout_of(bucket, num_ranks):
    return BucketLayout.of([ShardLayout(item.shape, item.dim, num_ranks) for item in bucket])


def own_shard(full, dim, rank, num_ranks):
    """This rank's shard, cut by the oracle."""
    if dim is None:
        return full.clone()
    start, stop = oracle.chunk_extents(full.shape[dim], num_ranks)[rank]
    return full.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def same_bits(left, right):
    assert left.shape == right.shape
    assert left.dtype == right.dtype
    bits = [t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for t in (left, right)]
    assert torch.equal(*bits)


@contextmanager
def uninitialized_is_nan():
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


def slot_numel(item, num_ranks):
    """Elements of a slot, by the oracle's formula for one rank's wire bytes; a whole copy fills its slot."""
    if item.dim is None:
        return math.prod(item.shape)
    return (
        oracle.wire_bytes_all_gather([item.shape], [item.dim], 2, 1)
        if num_ranks == 2
        else (oracle.wire_bytes_all_gather([item.shape], [item.dim], num_ranks, 1) // max(1, num_ranks - 1))
    )


def owned_numel(bucket, rank, num_ranks):
    """Elements of which a rank is the owner; whole copies are rank 0's."""
    total = 0
    for item in bucket:
        if item.dim is not None:
            start, stop = oracle.chunk_extents(item.shape[item.dim], num_ranks)[rank]
            total += math.prod(item.shape[: item.dim]) * (stop - start) * math.prod(item.shape[item.dim + 1 :])
        elif rank == 0:
            total += math.prod(item.shape)
    return total


# --- all-gather ------------------------------------------------------------------------------------------------------


def check_all_gather(bucket, dtype, min_direct_bytes):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    group, layout = world_group(), layout_of(bucket, num_ranks)
    fulls = [item.full(dtype, seed) for seed, item in enumerate(bucket)]
    shards = [own_shard(full, item.dim, rank, num_ranks) for full, item in zip(fulls, bucket, strict=True)]
    before = [s.clone() for s in shards]
    strides = [torch.empty_like(full).stride() for full in fulls]
    with uninitialized_is_nan(), CommTrace() as trace:
        plan = GatherPlan.of(layout, strides, dtype, group, min_direct_bytes=min_direct_bytes)
        handle = all_gather(shards, plan, group, label="unit")
        got = handle.wait()
        assert handle.wait() is got
        got = got.tensors
    for full, out, stride, shard, old in zip(fulls, got, strides, shards, before, strict=True):
        same_bits(out, full)
        same_bits(shard, old)
        assert out.stride() == stride or out.numel() < 2
        assert num_ranks == 1 or out.storage_offset() * out.itemsize % 256 == 0  # by which cuBLAS chooses kernels
        assert num_ranks == 1 or not out.numel() or out.untyped_storage().data_ptr() != shard.data_ptr()
    packed = [
        item
        for item, full in zip(bucket, fulls, strict=True)
        if item.dim != 0 or full.nbytes < min_direct_bytes or not torch.empty_like(full).is_contiguous()
    ]
    check_gather_bytes(trace, bucket, packed, dtype, rank, num_ranks)


def check_gather_bytes(trace, bucket, packed, dtype, rank, num_ranks):
    if num_ranks == 1:
        assert trace.calls() == 0
        return
    (record,) = trace.select("all_gather", "unit")
    assert trace.calls() == 1
    slots = sum(slot_numel(item, num_ranks) for item in packed) * dtype.itemsize
    owned = owned_numel(bucket, rank, num_ranks) * dtype.itemsize
    padding = slots - owned_numel(packed, rank, num_ranks) * dtype.itemsize  # shards that travel alone have none
    assert record.num_ranks == num_ranks
    assert record.payload_bytes == (num_ranks - 1) * owned
    assert record.header_bytes == (num_ranks - 1) * HEADER_BYTES
    assert record.padding_bytes == (num_ranks - 1) * padding
    assert trace.total_bytes == (num_ranks - 1) * (owned + padding + HEADER_BYTES)


def check_flat_gather_bytes(trace, bucket, dtype, rank, num_ranks):
    """A backend with collectives of its own takes rows of one size."""
    slots = sum(slot_numel(item, num_ranks) for item in bucket) * dtype.itemsize
    aligned = math.ceil(slots / 16) * 16
    owned = owned_numel(bucket, rank, num_ranks) * dtype.itemsize
    (record,) = trace.select("all_gather", "unit")
    assert record.payload_bytes == (num_ranks - 1) * owned
    assert record.padding_bytes == (num_ranks - 1) * (aligned - owned)
    assert record.header_bytes == 0  # the ranks compare what they did when a backward ends


@settings(max_examples=60)
@given(
    num_ranks=world_sizes(),
    bucket=BUCKETS,
    dtype=st.sampled_from(DTYPES),
    min_direct_bytes=st.sampled_from([0, 24, 1 << 16]),
)
def test_all_gather_gives_the_full_tensors_and_sends_what_the_formula_says(
    worlds: WorldPool, num_ranks, bucket, dtype, min_direct_bytes
):
    worlds.run(num_ranks, check_all_gather, bucket, dtype, min_direct_bytes)


def test_payload_of_all_ranks_is_n_minus_one_times_the_bucket():
    bucket = [Item((5, 3), 0), Item((2, 7), 1), Item((), None), Item((4,), None)]
    for num_ranks in (2, 3, 4, 7):
        assert sum(owned_numel(bucket, r, num_ranks) for r in range(num_ranks)) == 15 + 14 + 1 + 4


def gather_labelled(labels, tags):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    layout = layout_of([Item((4,), 0)], num_ranks)
    shard = torch.zeros(layout.layouts[0].local_shape(rank))
    plan = GatherPlan.of(layout, [(1,)], shard.dtype, world_group())
    all_gather([shard], plan, world_group(), label=labels[rank], tag=tags[rank] << 8).wait()


def test_ranks_that_gather_different_units_raise_and_name_both(worlds: WorldPool):
    errors = expect_error(worlds.get_world(2), gather_labelled, ["layers.3", "layers.4"], [0, 0])
    assert [name for name, _ in errors] == ["DivergenceError"] * 2
    for text in (t for _, t in errors):
        assert "layers.3" in text
        assert "layers.4" in text


def test_ranks_that_wrote_different_things_raise_and_name_the_unit(worlds: WorldPool):
    errors = expect_error(worlds.get_world(3), gather_labelled, ["layers.3"] * 3, [0, 0, 5])
    assert [name for name, _ in errors] == ["DivergenceError"] * 3
    assert all("'layers.3': all ranks must write the same" in text for _, text in errors)


def be_elsewhere(what_of_rank, size_of_rank):
    """Each rank is at something else, of another size; then all are at the same again."""
    rank, group = dist.get_rank(), world_group()
    what, size = what_of_rank[rank], size_of_rank[rank]
    with pytest.raises(DivergenceError) as raised:  # noqa: PT012 - one of three
        if what == "gather":
            layout = layout_of([Item((size,), 0)], group.num_ranks)
            shard = torch.zeros(layout.layouts[0].local_shape(rank))
            plan = GatherPlan.of(layout, [(1,)], shard.dtype, group, min_direct_bytes=0)
            all_gather([shard], plan, group, label=f"unit of {size}").wait()
        elif what == "reduce":
            layout = layout_of([Item((size,), 0)], group.num_ranks)
            reduce = ReduceBucket(ReducePlan(layout, group), dtype=torch.float32, device=CPU, label=f"unit of {size}")
            reduce.add([0], [torch.ones(size)])
            reduce.launch(mean=True).wait()
        else:
            all_reduce([torch.ones(size)], group, ReduceOp.SUM, label=f"norm of {size}").wait()
    for _ in range(2):  # what was sent in vain meets nothing of these
        total = all_reduce([torch.ones(3)], group, ReduceOp.SUM, label="norm of 3").wait()[0]
        assert total.tolist() == [group.num_ranks] * 3
        check_all_gather([Item((4, 5), 0), Item((3,), 0)], torch.float32, 0)
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "sizes"),
    [
        (["gather", "gather"], [8, 4000]),
        (["gather", "gather", "gather"], [4000, 4000, 8]),
        (["reduce", "reduce"], [4000, 8]),
        (["gather", "reduce"], [8, 8]),
        (["combine", "gather"], [3, 4000]),
        (["combine", "combine", "reduce"], [3, 5, 3]),
    ],
)
def test_ranks_that_are_at_things_of_other_kinds_and_sizes_raise_name_both_and_go_on(worlds: WorldPool, what, sizes):
    texts = worlds.run(len(what), be_elsewhere, what, sizes)
    names = [f"{'norm' if kind == 'combine' else 'unit'} of {size}" for kind, size in zip(what, sizes, strict=True)]
    kinds = {"gather": "the gather of", "reduce": "the reduction of gradients of", "combine": "the combination of"}
    for text, name in zip(texts, names, strict=True):
        assert text.startswith(f"'{name}': all ranks must communicate about the same thing at the same time")
        assert (
            any(other in text.replace(f"'{name}'", "", 1) for other in names if other != name) or len(set(names)) == 1
        )
    if len(what) == 2 and what[0] != what[1]:
        assert all(any(kinds[k] in text for k in set(what)) for text in texts)


# --- reduce-scatter --------------------------------------------------------------------------------------------------


def grads_of(bucket, dtype, rank, counts):
    """The gradients of one rank: `counts[i]` of them for tensor i, to be added up."""
    return [[item.full(dtype, 1000 * rank + 10 * i + k) for k in range(counts[i])] for i, item in enumerate(bucket)]


def expected_shard(bucket, dtype, counts_of_rank, i, rank, num_ranks, mean):
    """Sum over the ranks in pairs, in NumPy: 16-bit floats in fp32, all others in their own dtype."""
    wide = np.float32 if dtype in (torch.bfloat16, torch.float16) else None
    parts = []
    for peer in range(num_ranks):
        grads = grads_of(bucket, dtype, peer, counts_of_rank[peer])[i]
        total = torch.zeros(bucket[i].shape, dtype=dtype) if not grads else grads[0].clone()
        for grad in grads[1:]:
            total = total + grad
        array = (total.float() if wide else total).numpy()
        parts.append(oracle.shard(array, bucket[i].dim, rank, num_ranks))
    total = oracle.mean_in_pairs(parts) if mean else oracle.sum_in_pairs(parts)
    return torch.from_numpy(np.array(total)).to(dtype)


def check_reduce(bucket, dtype, counts_of_rank, mean, may_wait):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    counts = counts_of_rank[rank]
    with uninitialized_is_nan(), CommTrace() as trace:
        reduce = ReduceBucket(
            ReducePlan(layout_of(bucket, num_ranks), world_group()), dtype=dtype, device=CPU, label="unit"
        )
        grads = grads_of(bucket, dtype, rank, counts)
        for i in reversed(range(len(bucket))):
            assert not reduce.has(i)
            for grad in grads[i]:
                before = grad.clone()
                reduce.add([i], [grad], may_wait=[may_wait])
                same_bits(grad, before)
            assert reduce.has(i) == (counts[i] > 0)
        assert reduce.is_complete == all(counts)
        reduced = reduce.launch(mean=mean).wait()
    for i in range(len(bucket)):
        assert reduced.anywhere(i) == any(c[i] for c in counts_of_rank)
        want = expected_shard(bucket, dtype, counts_of_rank, i, rank, num_ranks, mean)
        assert torch.equal(reduced.shards[i], want)
        assert (reduced.shards[i].shape, reduced.shards[i].dtype) == (want.shape, dtype)
    check_reduce_bytes(trace, bucket, dtype, rank, num_ranks)


def check_reduce_bytes(trace, bucket, dtype, rank, num_ranks, header_bytes=HEADER_BYTES):
    if num_ranks == 1:
        assert trace.calls() == 0
        return
    (record,) = trace.records
    prefix = math.ceil(len(bucket) / 16) * 16
    slots = sum(slot_numel(item, num_ranks) for item in bucket)
    theirs = sum(owned_numel(bucket, r, num_ranks) for r in range(num_ranks) if r != rank)
    assert (record.kind, record.label) == ("reduce_scatter", "unit")
    assert record.payload_bytes == theirs * dtype.itemsize
    assert record.header_bytes == (num_ranks - 1) * (prefix * dtype.itemsize + header_bytes)
    assert record.padding_bytes == ((num_ranks - 1) * slots - theirs) * dtype.itemsize
    assert record.total_bytes == (num_ranks - 1) * ((slots + prefix) * dtype.itemsize + header_bytes)


@st.composite
def reductions(draw):
    """Ranks, a bucket, and how many gradients each rank has of each tensor; half of them as they mostly are."""
    num_ranks, bucket = draw(world_sizes()), draw(BUCKETS)
    if draw(st.booleans()):  # cut along dim 0, one of each: packed together when the bucket leaves, if they may wait
        bucket = [Item(item.shape, 0) for item in bucket if item.shape] or [Item((3, 2), 0)]
        return num_ranks, bucket, [[1] * len(bucket)] * num_ranks
    counts = st.lists(st.sampled_from([1, 1, 2, 0]), min_size=len(bucket), max_size=len(bucket))
    return num_ranks, bucket, [draw(counts) for _ in range(num_ranks)]


@settings(max_examples=80)
@given(case=reductions(), dtype=st.sampled_from(REDUCED_DTYPES), mean=st.booleans(), may_wait=st.booleans())
def test_reduce_scatter_sums_in_rank_order_bit_for_bit(worlds: WorldPool, case, dtype, mean, may_wait):
    num_ranks, bucket, counts = case
    worlds.run(num_ranks, check_reduce, bucket, dtype, counts, mean, may_wait)


def sum_of_ordered(values, dtype):
    """One element per rank's slot whose sum depends on the order in which ranks are added."""
    num_ranks = dist.get_world_size()
    layout = layout_of([Item((num_ranks,), 0)], num_ranks)
    reduce = ReduceBucket(ReducePlan(layout, world_group()), dtype=dtype, device=CPU, label="unit")
    reduce.add([0], [torch.full((num_ranks,), values[dist.get_rank()], dtype=dtype)])
    return reduce.launch(mean=False).wait().shards[0].item()


def test_neighbours_are_added_in_pairs_and_then_the_pairs(worlds: WorldPool):
    # In fp32 a 1 is lost beside 1e8: one after the other gives 1, and then 0; other pairs 0 or 2, and then 0.
    assert worlds.run(4, sum_of_ordered, [1e8, 1.0, -1e8, 1.0], torch.float32) == [0.0] * 4
    assert worlds.run(4, sum_of_ordered, [1.0, 1.0, 1e8, -1e8], torch.float32) == [2.0] * 4
    assert worlds.run(4, sum_of_ordered, [256.0, 1.0, 1.0, 1.0], torch.bfloat16) == [260.0] * 4  # added in fp32


def discard_one():
    layout = layout_of([Item((3,), 0), Item((2,), 0)], dist.get_world_size())
    reduce = ReduceBucket(ReducePlan(layout, world_group()), dtype=torch.float32, device=CPU, label="unit")
    reduce.add([0], [torch.full((3,), float("nan"))])
    reduce.add([1], [torch.ones(2)])
    reduce.discard(0)
    reduced = reduce.launch(mean=False).wait()
    return reduced.anywhere(0), reduced.anywhere(1), [s.isnan().any().item() for s in reduced.shards]


def test_a_discarded_gradient_counts_as_missing(worlds: WorldPool):
    assert worlds.run(2, discard_one) == [(False, True, [False, False])] * 2


def reduce_labelled(labels):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    layout = layout_of([Item((4,), 0)], num_ranks)
    reduce = ReduceBucket(ReducePlan(layout, world_group()), dtype=torch.float32, device=CPU, label=labels[rank])
    reduce.add([0], [torch.ones(4)])
    reduce.launch(mean=True).wait()


def test_ranks_that_reduce_different_units_raise_and_name_their_own(worlds: WorldPool):
    errors = expect_error(worlds.get_world(2), reduce_labelled, ["layers.3", "layers.4"])
    assert [name for name, _ in errors] == ["DivergenceError"] * 2
    assert "layers.3" in errors[0][1]
    assert "layers.4" in errors[1][1]


# --- all-reduce and broadcast ----------------------------------------------------------------------------------------


def check_all_reduce(bucket, dtype, op_name):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    per_rank = [[item.full(dtype, 100 * r + i) for i, item in enumerate(bucket)] for r in range(num_ranks)]
    mine = [t.clone(memory_format=torch.preserve_format) for t in per_rank[rank]]
    with CommTrace() as trace:
        got = all_reduce(mine, world_group(), ReduceOp[op_name], label="small").wait()
    for i, out in enumerate(got):
        arrays = [tensors[i].float().numpy() if dtype == torch.bfloat16 else tensors[i].numpy() for tensors in per_rank]
        if op_name == "SUM":
            want = torch.from_numpy(np.array(oracle.sum_in_pairs(arrays))).to(dtype)
        else:
            reduce = np.maximum if op_name == "MAX" else np.minimum
            want = torch.from_numpy(np.array(reduce.reduce(arrays))).to(dtype)
        same_bits(out, want)
        same_bits(mine[i], per_rank[rank][i])
    numel = sum(math.prod(item.shape) for item in bucket)
    check_exchange_bytes(trace, "all_reduce", numel * dtype.itemsize, num_ranks)


def check_exchange_bytes(trace, kind, num_bytes, num_ranks):
    assert trace.calls() == trace.calls(kind, "small") == (1 if num_ranks > 1 else 0)
    assert trace.payload_bytes == (num_ranks - 1) * num_bytes
    assert trace.total_bytes == (num_ranks - 1) * (num_bytes + HEADER_BYTES)


@settings(max_examples=40)
@given(
    num_ranks=world_sizes(),
    bucket=BUCKETS,
    kind=st.sampled_from(
        [("SUM", d) for d in (torch.float32, torch.float64, torch.int64, torch.complex64)]
        + [(op, d) for op in ("MAX", "MIN") for d in (*FLOAT_DTYPES, torch.int64, torch.bool)]
    ),
)
def test_all_reduce_combines_neighbours_in_pairs_bit_for_bit(worlds: WorldPool, num_ranks, bucket, kind):
    worlds.run(num_ranks, check_all_reduce, bucket, kind[1], kind[0])


def check_broadcast(bucket, dtype, src):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mine = [item.full(dtype, 100 * rank + i) for i, item in enumerate(bucket)]
    before = [t.clone() for t in mine]
    with CommTrace() as trace:
        got = broadcast(mine, world_group(), label="small", src=src).wait()
    for i, item in enumerate(bucket):
        same_bits(got[i], item.full(dtype, 100 * src + i))
        same_bits(mine[i], before[i])
    num_bytes = sum(math.prod(item.shape) for item in bucket) * dtype.itemsize
    assert trace.calls("broadcast") == trace.calls() == (1 if num_ranks > 1 else 0)
    assert trace.payload_bytes == ((num_ranks - 1) * num_bytes if rank == src else 0)


@settings(max_examples=30)
@given(data=st.data(), num_ranks=world_sizes(), bucket=BUCKETS, dtype=st.sampled_from(DTYPES))
def test_broadcast_gives_the_values_of_the_source(worlds: WorldPool, data, num_ranks, bucket, dtype):
    worlds.run(num_ranks, check_broadcast, bucket, dtype, data.draw(st.integers(0, num_ranks - 1)))


# --- traces ----------------------------------------------------------------------------------------------------------


def check_traces():
    with CommTrace() as outer:
        all_reduce([torch.ones(2)], world_group(), ReduceOp.SUM, label="a").wait()
        with CommTrace() as inner:
            all_reduce([torch.ones(2)], world_group(), ReduceOp.SUM, label="b").wait()
        with pytest.raises(KeyError), CommTrace() as broken:
            raise KeyError
        all_reduce([torch.ones(2)], world_group(), ReduceOp.SUM, label="a").wait()
    all_reduce([torch.ones(2)], world_group(), ReduceOp.SUM, label="c").wait()
    assert outer.calls() == 3
    assert outer.calls("all_reduce", "a") == 2
    assert inner.calls() == inner.calls(label="b") == 1
    assert broken.calls() == 0
    assert outer.total_bytes == outer.payload_bytes + outer.padding_bytes + outer.header_bytes
    assert "all_reduce" in outer.summary()


def test_traces_nest_and_see_what_happens_inside_them_alone(worlds: WorldPool):
    worlds.run(2, check_traces)


# --- the fake world --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 2), (1, 3), (3, 4), (0, 64), (63, 64), (17, 64)])
def test_byte_counts_and_shapes_hold_in_a_fake_world_of_any_size(rank, num_ranks):
    bucket = [Item((5, 3), 0), Item((130, 2), 0), Item((2, 7), 1), Item((), None), Item((0, 3), 0)]
    fulls = [item.full(torch.float32, i) for i, item in enumerate(bucket)]
    with fake_world(rank, num_ranks):
        group, layout = world_group(), layout_of(bucket, num_ranks)
        shards = [own_shard(f, item.dim, rank, num_ranks) for f, item in zip(fulls, bucket, strict=True)]
        with CommTrace() as trace:
            plan = GatherPlan.of(layout, [f.stride() for f in fulls], fulls[0].dtype, group)
            got = all_gather(shards, plan, group, label="unit").wait().tensors
        assert [g.shape for g in got] == [f.shape for f in fulls]
        check_flat_gather_bytes(trace, bucket, torch.float32, rank, num_ranks)
        with CommTrace() as trace:
            reduce = ReduceBucket(ReducePlan(layout, group), dtype=torch.float32, device=CPU, label="unit")
            for i, full in enumerate(fulls):
                reduce.add([i], [full])
            reduced = reduce.launch(mean=True).wait()
        assert [tuple(s.shape) for s in reduced.shards] == [x.local_shape(rank) for x in layout.layouts]
        check_reduce_bytes(trace, bucket, torch.float32, rank, num_ranks, header_bytes=0)
        with CommTrace() as trace:
            out = all_reduce([torch.ones(128)], group, ReduceOp.MAX, label="small").wait()
            assert broadcast([torch.ones(3)], group, label="small").wait()[0].shape == (3,)
        assert out[0].shape == (128,)
        assert trace.select("all_reduce")[0].payload_bytes == oracle.wire_bytes_all_reduce(128, num_ranks, 4) or (
            128 % num_ranks
        )
        assert trace.calls("broadcast") == 1
