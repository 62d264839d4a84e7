"""Invariant 1: extents are disjoint, ordered, cover the dim and are those of `torch.chunk`; buckets are dense."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dshard.errors import DShardError, PlacementError
from dshard.layout import BucketLayout, Extent, ShardLayout
from dshard.testing.strategies import dims, shapes
from tests.kit import oracle

RANKS = st.integers(1, 9)


@st.composite
def layouts(draw, num_ranks=None):
    shape = draw(shapes() | st.lists(st.integers(0, 40), max_size=2).map(tuple))
    n = draw(RANKS) if num_ranks is None else num_ranks
    return ShardLayout(shape, draw(dims(shape) | st.none()), n)


@given(layout=layouts())
def test_extents_are_those_of_the_oracle_and_of_torch_chunk(layout):
    if layout.dim is None:
        assert [layout.extent(r) for r in range(layout.num_ranks)] == [Extent(0, 1)] * layout.num_ranks
        return
    size = layout.shape[layout.dim]
    extents = [layout.extent(r) for r in range(layout.num_ranks)]
    assert [(e.start, e.stop) for e in extents] == oracle.chunk_extents(size, layout.num_ranks)
    chunks = torch.arange(size).chunk(layout.num_ranks) if size else ()
    assert [list(range(e.start, e.stop)) for e in extents if e.size] == [c.tolist() for c in chunks]


@given(layout=layouts())
def test_extents_are_disjoint_ordered_and_cover(layout):
    if layout.dim is None:
        return
    covered = [i for r in range(layout.num_ranks) for i in range(layout.extent(r).start, layout.extent(r).stop)]
    assert covered == list(range(layout.shape[layout.dim]))
    assert all(layout.extent(r).size >= 0 for r in range(layout.num_ranks))


@given(layout=layouts())
def test_local_shapes_are_those_of_the_oracles_shards(layout):
    array = torch.zeros(layout.shape).numpy()
    for rank in range(layout.num_ranks):
        expected = oracle.shard(array, layout.dim, rank, layout.num_ranks).shape
        assert layout.local_shape(rank) == expected
        assert layout.local_numel(rank) == math.prod(expected)


@given(layout=layouts())
def test_slots_hold_the_largest_shard(layout):
    sizes = [layout.local_numel(r) for r in range(layout.num_ranks)]
    assert layout.numel == math.prod(layout.shape)
    assert layout.slot_numel == max(sizes)


@given(layout=layouts())
def test_the_slots_of_an_even_cut_are_full_and_no_rank_pads_more_than_a_slot(layout):
    padding = layout.num_ranks * layout.slot_numel - layout.numel
    if layout.dim is not None and layout.shape[layout.dim] % layout.num_ranks == 0:
        assert padding == 0
    assert 0 <= padding <= (layout.num_ranks - 1) * layout.slot_numel


@given(layout=layouts(), item=st.sampled_from([1, 2, 4, 8]))
def test_bytes_of_a_gather_follow_from_the_slot(layout, item):
    expected = oracle.wire_bytes_all_gather([layout.shape], [layout.dim], layout.num_ranks, item)
    if layout.dim is not None:
        assert (layout.num_ranks - 1) * layout.slot_numel * item == expected


@given(data=st.data(), num_ranks=RANKS)
def test_a_bucket_puts_slots_one_after_the_other(data, num_ranks):
    parts = data.draw(st.lists(layouts(num_ranks=num_ranks), max_size=5))
    bucket = BucketLayout.of(parts)
    assert bucket.layouts == tuple(parts)
    assert bucket.slot_sizes == tuple(p.slot_numel for p in parts)
    taken = [i for off, size in zip(bucket.offsets, bucket.slot_sizes, strict=True) for i in range(off, off + size)]
    assert taken == list(range(bucket.segment_numel))
    assert bucket.num_ranks == (num_ranks if parts else 1)


def test_a_0d_tensor_is_whole_on_every_rank():
    layout = ShardLayout((), None, 4)
    assert (layout.numel, layout.slot_numel, layout.local_shape(3)) == (1, 1, ())


def test_an_empty_tensor_has_empty_shards_of_its_rank():
    layout = ShardLayout((0, 3), 0, 3)
    assert [layout.local_shape(r) for r in range(3)] == [(0, 3)] * 3
    assert (layout.numel, layout.slot_numel) == (0, 0)


def test_ranks_past_the_end_hold_empty_shards():
    layout = ShardLayout((2, 5), 0, 4)
    assert [layout.local_shape(r) for r in range(4)] == [(1, 5), (1, 5), (0, 5), (0, 5)]
    layout = ShardLayout((5,), 0, 4)  # ceil(5 / 4) = 2: chunk gives three chunks, the fourth rank nothing
    assert [layout.local_numel(r) for r in range(4)] == [2, 2, 1, 0]


def test_layouts_are_values():
    assert ShardLayout((4, 3), 0, 2) == ShardLayout((4, 3), 0, 2)
    assert len({ShardLayout((4, 3), 0, 2), ShardLayout((4, 3), 0, 2), ShardLayout((4, 3), 1, 2)}) == 2
    with pytest.raises(AttributeError):
        ShardLayout((4,), 0, 2).dim = 1


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (
            ((4, 3), 2, 2),
            "layout: the sharded dim must be in [0, 2), but it is 2 (shape (4, 3)). Use a dim that the tensor has.",
        ),
        (
            ((4, 3), -1, 2),
            "layout: the sharded dim must be in [0, 2), but it is -1 (shape (4, 3)). Use a dim that the tensor has.",
        ),
        (
            ((), 0, 2),
            "layout: the sharded dim must be in [0, 0), but it is 0 (shape ()). Use a dim that the tensor has.",
        ),
        (((4,), 0, 0), "layout: num_ranks must be at least 1, but it is 0. Pass the mesh size."),
        (((4,), None, -2), "layout: num_ranks must be at least 1, but it is -2. Pass the mesh size."),
    ],
)
def test_errors_say_what_is_wrong_and_what_to_do(args, text):
    with pytest.raises(PlacementError, match=f"^{re.escape(text)}$") as info:
        ShardLayout(*args)
    assert isinstance(info.value, DShardError)
    assert isinstance(info.value, ValueError)
