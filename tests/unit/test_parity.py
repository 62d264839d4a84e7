"""XOR rows: any one member of a group is made of the others, whatever their lengths."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dshard.checkpoint.parity import MAX_GROUP, Stripes, group_around, write_row

MEMBERS = st.lists(st.binary(max_size=60), min_size=2, max_size=6).filter(any)


def reader(members):
    def read(member, into, at):
        part = members[member][at : at + len(into)]
        into[:] = part + bytes(len(into) - len(part))

    return read


@given(members=MEMBERS, data=st.data())
def test_a_lost_member_is_made_of_the_others_and_the_rows(members, data, tmp_path_factory):
    sizes = tuple(map(len, members))
    stripes, folder = Stripes(sizes), tmp_path_factory.mktemp("rows")
    rows = [write_row(folder / str(row), row, sizes, reader(members)) for row in range(len(members))]
    assert {row.size for row in rows} == {-(-max(sizes) // (len(sizes) - 1))}
    content = [(folder / row.name).read_bytes() for row in rows]
    lost = data.draw(st.sampled_from([i for i, size in enumerate(sizes) if size]))
    left = [None if i == lost else member for i, member in enumerate(members)]  # its own row is lost, too
    content[lost] = None
    start = data.draw(st.integers(0, sizes[lost] - 1))
    target = bytearray(data.draw(st.integers(1, sizes[lost] - start)))
    stripes.rebuild(lost, reader(left), reader(content), memoryview(target), start)
    assert bytes(target) == members[lost][start : start + len(target)]


@given(members=MEMBERS)
def test_no_stripe_of_a_member_is_in_its_own_row_and_each_is_in_one(members):
    num = len(members)
    for member in range(num):
        found = [Stripes.stripe_in(row, member) for row in range(num) if row != member]
        assert sorted(found) == list(range(num - 1))


@given(num_files=st.integers(2, 200))
def test_groups_are_neighbours_of_like_numbers(num_files):
    groups = {group_around(index, num_files) for index in range(num_files)}
    assert sorted(i for group in groups for i in group) == list(range(num_files))
    sizes = [len(group) for group in groups]
    assert max(sizes) <= MAX_GROUP
    assert max(sizes) - min(sizes) <= 1
    assert np.min(sizes) >= 2
