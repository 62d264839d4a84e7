"""The allocator on sequences worked out by hand, and what holds for every forecast."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshard.planner import Plan, simulate
from dshard.planner.allocator import ROUND_BYTES, CachingAllocator
from dshard.planner.forecast import MemoryForecast, forecast, keyed
from dshard.planner.memory import moments
from dshard.planner.options import options_of
from dshard.policies import Strategy
from tests.planner.cases import STRATEGIES, clusters, models

MIB = 1 << 20
COMPUTED = ("activation_bytes", *(f"{phase}_transient_bytes" for phase in ("forward", "backward", "gradients")))


def after(*sizes, expandable=False):
    """An allocator that had these requests; a negative number lets go what the request of that number gave."""
    allocator, blocks = CachingAllocator(expandable=expandable), []
    for size in sizes:
        if size < 0:
            allocator.free(blocks[-size - 1])
        else:
            blocks.append(allocator.allocate(size))
    return allocator


@pytest.mark.parametrize(
    ("requests", "active", "reserved", "grown"),
    [
        ((1,), 512, 2 * MIB, 2 * MIB),  # small ones share segments of 2 MiB
        ((MIB, MIB), 2 * MIB, 2 * MIB, 2 * MIB),
        ((MIB, MIB, 1), 2 * MIB + 512, 4 * MIB, 4 * MIB),
        ((MIB + 1,), MIB + 512, 20 * MIB, 20 * MIB),  # up to 10 MiB they share segments of 20
        ((9 * MIB, 9 * MIB), 18 * MIB, 20 * MIB, 20 * MIB),
        ((9 * MIB, 10 * MIB + 1), 20 * MIB, 20 * MIB, 20 * MIB),
        ((9 * MIB, 9 * MIB, 9 * MIB), 27 * MIB, 40 * MIB, 40 * MIB),
        ((11 * MIB,), 11 * MIB + MIB, 12 * MIB, 20 * MIB),  # of a large block up to 1 MiB is not cut off
        ((13 * MIB + 512,), 14 * MIB, 14 * MIB, 20 * MIB),
        ((30 * MIB, -1, 12 * MIB, 18 * MIB), 30 * MIB, 30 * MIB, 40 * MIB),  # what is free is cut
        ((30 * MIB, -1, 12 * MIB, 20 * MIB), 32 * MIB, 50 * MIB, 40 * MIB),  # or grows
        ((12 * MIB, 14 * MIB, -1, -2, 26 * MIB), 26 * MIB, 52 * MIB, 40 * MIB),  # segments do not become one
        ((30 * MIB, -1, 10 * MIB, 20 * MIB, -2, -3, 30 * MIB), 30 * MIB, 30 * MIB, 40 * MIB),  # neighbours do
        ((40 * MIB, 24 * MIB, -1, -2, 24 * MIB, 40 * MIB), 64 * MIB, 64 * MIB, 80 * MIB),  # the smallest that fits
        ((30 * MIB, 4 * MIB, -1, 5 * MIB, 30 * MIB), 39 * MIB, 50 * MIB, 80 * MIB),  # what can grow comes last
    ],
)
def test_allocator_takes_and_makes_what_torch_does(requests, active, reserved, grown):
    plain, expandable = after(*requests), after(*requests, expandable=True)
    assert (plain.active_bytes, plain.reserved_bytes, expandable.reserved_bytes) == (active, reserved, grown)


def test_streams_and_pools_share_no_segment():
    allocator = CachingAllocator()
    block = allocator.allocate(30 * MIB, "compute")
    allocator.free(block)
    allocator.allocate(30 * MIB, "gathers")
    assert allocator.reserved_bytes == 60 * MIB


@given(st.lists(st.tuples(st.integers(1, 60 * MIB), st.booleans(), st.integers(0, 5)), max_size=40), st.booleans())
def test_no_byte_is_handed_out_twice_and_none_is_lost(steps, expandable):
    allocator, held = CachingAllocator(expandable=expandable), []
    for size, lets_go, which in steps:
        if lets_go and held:
            allocator.free(held.pop(which % len(held))[1])
        else:
            held.append((size, allocator.allocate(size)))
        assert all(block.num_bytes >= size and block.num_bytes % ROUND_BYTES == 0 for size, block in held)
        assert len({(block.pool, block.place) for _, block in held}) == len(held)
        assert allocator.active_bytes == sum(block.num_bytes for _, block in held) <= allocator.reserved_bytes
    for _, block in held:
        allocator.free(block)
    free = [entry for entries in allocator._free.values() for entry in entries]
    assert sum(size for size, _, _ in free) == allocator.reserved_bytes
    assert allocator.active_bytes == 0


@given(st.data())
def test_blocks_of_a_unit_have_all_of_its_bytes(data):
    model, cluster = data.draw(models()), data.draw(clusters())
    strategies = [data.draw(st.sampled_from(STRATEGIES)) for _ in model.units]
    for option in options_of(model, strategies, cluster):
        parts = keyed(option)
        names = [name for name in option._fields if name.endswith("_bytes") and name not in COMPUTED]
        for name in names:
            values = [getattr(part, name) for part in parts]
            assert sum(values) == getattr(option, name), name
            assert min(values) >= 0, name


@given(st.data())
def test_active_is_no_less_than_live_and_reserved_no_less_than_active(data):
    model, cluster = data.draw(models()), data.draw(clusters())
    names = data.draw(st.lists(st.sampled_from(STRATEGIES), min_size=len(model.units), max_size=len(model.units)))
    strategies = tuple(Strategy.of(name) for name in names)
    seen = forecast(model, strategies, cluster)
    assert seen.live_bytes == max(moment.num_bytes for moment in moments(model, strategies, cluster))
    products = next(each.num_bytes for each in seen.workspaces if each.name == "cuBLAS")
    assert seen.live_bytes + products <= seen.active_bytes
    assert seen.active_bytes <= seen.reserved_bytes <= seen.device_bytes <= seen.most_device_bytes
    assert seen.active_bytes <= seen.expandable_bytes + 32 * MIB  # which may cut what the other may not
    assert Plan.from_json(Plan(model, cluster, strategies).to_json()).memory_seen == seen
    assert simulate(model, strategies, cluster).peak_bytes == seen.live_bytes


def test_where_segments_exceed_a_limit_that_live_bytes_keep_the_text_says_what_to_do():
    seen = MemoryForecast(
        live_bytes=70 * MIB, active_bytes=71 * MIB, reserved_bytes=80 * MIB, expandable_bytes=72 * MIB
    )
    assert "expandable_segments:True, or plan for 66 MiB, or with memory_of" in seen.lines(76 * MIB)[-1]
    for limit in (0, 69 * MIB, 80 * MIB):  # none, one that does not hold anyway, one that holds all
        assert len(seen.lines(limit)) == 2
