"""Rows of a weight in slices: disjoint, complete, the same part of every shard."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dshard.layout import ShardLayout
from dshard.slices import cut_rows

LAYOUTS = st.builds(
    lambda num_rows, num_ranks: ShardLayout((num_rows, 3), 0, num_ranks), st.integers(0, 40), st.integers(1, 6)
)


@given(LAYOUTS, st.integers(1, 9))
def test_every_row_is_in_one_slice_and_what_is_taken_can_be_put_back(layout, num_slices):
    values = torch.arange(2 * layout.shape[0]).view(2, layout.shape[0])
    into = torch.full_like(values, -1)
    slices = cut_rows(layout, num_slices)
    assert len(slices) <= num_slices
    for rows in slices:
        taken = rows.take(values)
        assert taken.shape == (2, rows.num_rows)
        assert (rows.take(into) == -1).all()
        rows.put(taken, into)
    assert torch.equal(into, values)


@given(LAYOUTS, st.integers(1, 9))
def test_a_slice_is_cut_as_a_tensor_of_its_own_and_holds_the_same_part_of_every_shard(layout, num_slices):
    full = torch.arange(3 * layout.shape[0]).view(layout.shape)
    for rows in cut_rows(layout, num_slices):
        gathered = []
        for rank in range(layout.num_ranks):
            extent = layout.extent(rank)
            part = rows.of_shard(full[extent.start : extent.stop], rank)
            assert part.shape == rows.sliced_layout.local_shape(rank)
            assert rows.size >= part.shape[0]
            gathered.append(part)
        assert torch.equal(torch.cat(gathered), rows.take(full.t()).t())


@given(LAYOUTS, st.integers(1, 9), st.data())
def test_rows_are_found_in_their_slices(layout, num_slices, data):
    if not layout.shape[0]:
        return
    full = torch.arange(layout.shape[0])
    wanted = torch.tensor(data.draw(st.lists(st.integers(0, layout.shape[0] - 1), max_size=12)), dtype=torch.long)
    found = torch.full_like(wanted, -1)
    for rows in cut_rows(layout, num_slices):
        at, numbers = rows.find(wanted)
        assert (found[at] == -1).all()
        found[at] = rows.take(full)[numbers]
    assert torch.equal(found, wanted)
