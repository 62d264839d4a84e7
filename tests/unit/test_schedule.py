"""What the schedule foretells, and Belady's choice against brute force."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from dshard.units.context import Phase, Schedule, to_drop


class Named:
    """A unit is told apart by identity."""

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return self.name


UNITS = [Named(n) for n in "abcdef"]
ORDERS = st.lists(st.sampled_from(UNITS), max_size=12)


def play(schedule, phase, order):
    """What is foretold after each touch of a phase."""
    schedule.begin(phase)
    told = [list(schedule.touch(u)) for u in order]
    schedule.end()
    return told


@given(order=st.permutations(UNITS), depth=st.integers(0, 4), phase=st.sampled_from(list(Phase)))
def test_an_order_that_comes_again_is_foretold_whole(order, depth, phase):
    schedule = Schedule(depth)
    assert play(schedule, phase, order) == [[]] * len(order)
    for _ in range(2):
        assert play(schedule, phase, order) == [list(order[i + 1 : i + 1 + depth]) for i in range(len(order))]


@given(orders=st.lists(st.tuples(st.sampled_from(list(Phase)), ORDERS), max_size=8), depth=st.integers(0, 3))
def test_any_order_is_taken_and_only_what_the_last_phase_of_the_kind_touched_is_foretold(orders, depth):
    schedule = Schedule(depth)
    last = {}
    for phase, order in orders:
        known = last.get(phase, [])
        for i, told in enumerate(play(schedule, phase, order)):
            assert len(told) <= depth
            assert all(u in known for u in told)
            if known[: i + 2] == order[: i + 2] and len(order) > i + 1 and depth:
                assert told[0] is order[i + 1]
        if order:
            last[phase] = order


@given(order=st.permutations(UNITS), sizes=st.lists(st.integers(1, 9), min_size=6, max_size=6), depth=st.integers(0, 3))
def test_what_needs_nothing_is_passed_over_while_it_is_smaller_than_what_comes(order, sizes, depth):
    free, size = set(UNITS[::2]), dict(zip(UNITS, sizes, strict=True))
    schedule = Schedule(depth, is_free=free.__contains__, size_of=size.get)
    play(schedule, Phase.FORWARD, order)
    for i, told in enumerate(play(schedule, Phase.FORWARD, order)):
        coming = [u for u in order[i + 1 :] if u not in free]
        assert told == coming[: len(told)]
        for unit in told:
            passed = [size[u] for u in order[i + 1 : order.index(unit)] if u in free]
            assert sum(passed) <= size[unit]
        if len(told) < min(depth, len(coming)):  # the next one is behind too much
            behind = order[i + 1 : order.index(coming[len(told)])]
            assert sum(size[u] for u in behind if u in free) > size[coming[len(told)]]


@given(first=ORDERS, second=ORDERS)
def test_after_a_change_of_order_the_new_one_is_foretold(first, second):
    schedule = Schedule(1)
    play(schedule, Phase.FORWARD, first)
    play(schedule, Phase.FORWARD, second)
    told = play(schedule, Phase.FORWARD, second)
    assert told == [[u] for u in second[1:]] + [[]] * bool(second)


def test_a_skipped_unit_does_not_lose_the_place():
    a, b, c, d, *_ = UNITS
    schedule = Schedule(1)
    play(schedule, Phase.FORWARD, [a, b, c, d])
    assert play(schedule, Phase.FORWARD, [a, c, d]) == [[b], [d], []]


def test_phases_have_records_of_their_own_and_touches_outside_of_them_none():
    a, b, c, *_ = UNITS
    schedule = Schedule(1)
    play(schedule, Phase.FORWARD, [a, b])
    play(schedule, Phase.EVAL, [a, c])
    assert list(schedule.touch(b)) == []
    assert play(schedule, Phase.FORWARD, [a]) == [[b]]
    assert play(schedule, Phase.EVAL, [a]) == [[c]]


def test_before_a_backward_was_seen_it_is_held_to_run_the_forward_back():
    a, b, c, *_ = UNITS
    schedule = Schedule(1)
    schedule.begin(Phase.FORWARD)
    for unit in (a, b, c):
        schedule.touch(unit)
    assert [schedule.distance(u) for u in (c, b, a)] == [0, 1, 2]
    play(schedule, Phase.BACKWARD, [a, c])
    assert [schedule.distance(u) for u in (a, c)] == [0, 1]
    assert schedule.distance(b) == float("inf")


def num_gathers(order, keep):
    """Gathers of a backward that starts with some copies at hand and frees each unit after its last use there."""
    return len([u for u in dict.fromkeys(order) if u not in keep])


@given(order=st.permutations(range(6)), num_kept=st.integers(0, 6), budget=st.integers(0, 6))
def test_the_choice_leaves_the_fewest_gathers_and_drops_what_is_used_last(order, num_kept, budget):
    copies = list(range(num_kept))
    dropped = to_drop([(u, 1, order.index(u)) for u in copies], budget)
    kept = set(copies) - set(dropped)
    assert len(kept) == min(budget, num_kept)
    fewest = min(num_gathers(order, set(some)) for some in combinations(copies, min(budget, num_kept)))
    assert num_gathers(order, kept) == fewest
    assert all(order.index(u) > order.index(k) for u in dropped for k in kept)


@given(sizes=st.lists(st.integers(1, 9), max_size=6), budget=st.integers(0, 30))
def test_copies_of_any_sizes_fit_into_the_budget_and_none_is_dropped_without_need(sizes, budget):
    dropped = to_drop([(u, size, u) for u, size in enumerate(sizes)], budget)
    assert dropped == list(range(len(sizes)))[::-1][: len(dropped)]
    kept_bytes = sum(sizes[: len(sizes) - len(dropped)])
    assert kept_bytes <= budget
    assert not dropped or kept_bytes + sizes[dropped[-1]] > budget


def test_a_copy_that_the_backward_never_uses_is_dropped_whatever_the_budget():
    assert to_drop([("a", 1, float("inf")), ("b", 1, 0)], 100) == ["a"]
