"""The planner's memory and time model: against a plain count, and against sums by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dshard import ArgumentError, PlacementError, PlanError, layout
from dshard.planner import (
    Cluster,
    Link,
    Links,
    ModelCosts,
    ParamCosts,
    UnitCosts,
    deferred_step_time,
    moments,
    peak_bytes,
    simulate,
    step_time,
)
from dshard.planner.options import options_of
from dshard.planner.owners import Owners
from dshard.policies import Strategy
from tests.planner.cases import STRATEGIES, clusters, models
from tests.planner.oracle import OwnersWalk, counted_peak, summed_step

ALWAYS = settings(max_examples=150, deadline=None)


def choices(draw, model):
    return [draw(st.sampled_from(STRATEGIES)) for _ in model.units]


def linear(name, numel=1 << 20, **costs):
    return UnitCosts(name, (ParamCosts(name, numel >> 10, 1 << 10),), **{"forward_s": 1.0, "backward_s": 2.0, **costs})


def slow_cluster(seconds_per_gather, num_ranks=2):
    """Where gathering or reducing 4 MiB takes so many seconds, all-reducing it twice as long."""
    return Cluster(num_ranks, num_ranks, Links.of(Link(0.0, seconds_per_gather / (2 << 20))), keeps_received_rows=False)


@ALWAYS
@given(models(), clusters(), st.data())
def test_peak_bytes_is_what_a_walk_through_the_step_counts(model, cluster, data):
    names = choices(data.draw, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "ROUND_BYTES", data.draw(st.sampled_from([1 << 12, 1 << 17, layout.ROUND_BYTES])))
        assert peak_bytes(model, names, cluster) == counted_peak(model, names, cluster)


OWNED = st.builds(
    ParamCosts,
    st.just("w"),
    st.integers(1, 40),
    st.sampled_from([1, 7, 64]),
    stored_itemsize=st.sampled_from([2, 4]),
    step_bytes_per_element=st.sampled_from([0, 4, 12]),
    owner_work=st.sampled_from([1, 3]),
)


@ALWAYS
@given(st.lists(OWNED, min_size=1, max_size=9), clusters(), st.data())
def test_rounds_of_owners_take_what_a_walk_of_each_rank_counts(params, cluster, data):
    model = ModelCosts((UnitCosts("unit", tuple(params), 1.0, 1.0),))
    within = data.draw(st.sampled_from([num for num in (1, 2, 4, 8) if num <= cluster.num_ranks]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "ROUND_BYTES", data.draw(st.sampled_from([1 << 8, 1 << 12, layout.ROUND_BYTES])))
        assert Owners(model, cluster).step_bytes(within, False) == OwnersWalk(model, cluster).peak(within)


@ALWAYS
@given(models(), clusters(), st.data())
def test_the_simulation_takes_as_long_as_the_sum_says_and_streams_never_overlap(model, cluster, data):
    names = choices(data.draw, model)
    timeline = simulate(model, names, cluster)
    summed_s = summed_step(options_of(model, names, cluster), model.num_backwards, overlaps=cluster.overlaps)
    assert timeline.step_s == step_time(model, names, cluster) == pytest.approx(summed_s, rel=1e-9, abs=1e-12)
    assert timeline.peak_bytes == peak_bytes(model, names, cluster)
    assert timeline.exposed_s >= -1e-9
    for stream in ("compute", "comm"):
        ends = 0.0
        for segment in (s for s in timeline.segments if s.stream == stream):
            assert ends <= segment.start_s <= segment.stop_s <= timeline.step_s
            ends = segment.stop_s


def test_bytes_of_each_strategy_are_those_of_the_formula():
    unit = linear("w")
    model, cluster, size = ModelCosts((unit,)), slow_cluster(1.0), 4 << 20
    flags = 2 * 16 * 4
    shards = size // 2 * 3 + 4  # parameter, two states, a counter of steps
    work = size + size + flags  # the gradient, and the send buffer
    assert {name: peak_bytes(model, [name], cluster) for name in ("ddp", "zero2", "keep", "full")} == {
        "ddp": 3 * size + 4 + work - flags // 2,  # one row of flags
        "zero2": shards + size + work,
        "keep": shards + size + work,
        "full": shards + size + work,
    }
    two = ModelCosts((unit, linear("v")))
    in_flight = (size + flags) * 3 // 2  # what is sent, and one row that is received
    assert peak_bytes(two, ["keep", "keep"], cluster) == 2 * shards + size + work + in_flight
    assert [m.phase for m in moments(two, ["full", "full"], cluster)] == [
        *("forward", "forward"),
        *("backward", "gradients", "slices", "backward", "gradients", "slices", "reduce", "reduce"),
        *("step", "step"),
    ]


def test_owners_share_out_work_and_states_and_what_they_exchange_takes_time():
    works = {"a": 3, "b": 2, "c": 2}  # at best 4 for one of two ranks
    params = tuple(
        ParamCosts(name, 1024, 1024, state_bytes_per_element=4, step_bytes_per_element=12, owner_work=work)
        for name, work in works.items()
    )
    unit = UnitCosts("w", params, forward_s=1.0, backward_s=2.0, owners_s=7.0)
    model, cluster, size = ModelCosts((unit,)), slow_cluster(1.0), 4 << 20
    full, ddp = (options_of(model, [name], cluster)[0] for name in ("full", "ddp"))
    # A gather of 4 MiB takes a second. A rank sends its half of three values and gradients, and of three values.
    assert full.optimizer_s == pytest.approx(4 + 2 * 1.5 + 1.5)
    assert ddp.optimizer_s == pytest.approx(4 + 3)  # under ddp it has what it needs, and sends values to its replicas
    assert full.held_bytes == 3 * size // 2 + 2 * size  # shards, and the states of two
    assert ddp.held_bytes == 3 * size + 2 * size
    # Rows of halves of six tensors, both halves of the four that two are made of, and those four.
    assert full.owners_bytes == 3 * size + 4 * size + 4 * size
    # Two that are sent, as many from each rank, and all three together.
    assert ddp.owners_bytes == 2 * size + 4 * size + 3 * size
    assert [m.phase for m in moments(model, ["full"], cluster)][-2:] == ["owners", "step"]


def test_slices_shrink_the_gathered_weight_and_its_gradient():
    unit = UnitCosts("w", (ParamCosts("w", 1024, 1024, can_split=True),), forward_s=1.0, backward_s=1.0)
    model, cluster, size = ModelCosts((unit,)), slow_cluster(1.0), 4 << 20
    shards = size // 2 * 3 + 4
    # The shard's gradient; of a slice's that computed, that in flight, and half of it that is received.
    slices = size // 2 + size // 8 + (size // 8 + 16 * 4 * 2) * 3 // 2
    assert peak_bytes(model, ["split(8)"], cluster) == shards + slices
    assert peak_bytes(model, ["full"], cluster) > shards + 3 * size


def test_times_of_a_step_are_those_by_hand():
    model = ModelCosts(tuple(linear(f"l{i}") for i in range(3)))
    # What shows: the first gather of forward, the first of backward, the last reduction; an all-reduce is two of them.
    assert step_time(model, ["full"] * 3, slow_cluster(0.5)) == pytest.approx(0.5 + 3 + 0.5 + 6 + 0.5)
    assert step_time(model, ["keep"] * 3, slow_cluster(0.5)) == pytest.approx(0.5 + 3 + 6 + 0.5)
    assert step_time(model, ["ddp"] * 3, slow_cluster(0.5)) == pytest.approx(3 + 6 + 1)
    # 1.5 s each: forward waits 0.5 s twice; in backward the unit in the middle hides 2 s of a reduction and a gather
    assert step_time(model, ["full"] * 3, slow_cluster(1.5)) == pytest.approx(1.5 + 4 + 1.5 + 2 + 3 + 2 + 1.5)


@pytest.mark.parametrize(
    ("forward_s", "at_home", "expected_s"),
    [
        # The host has stepped units at 2, 4 and 6 s: all are waited for, then the last forward and three backwards run.
        (1.0, (True, True, True), 6 + 1 + 6),
        (3.0, (True, True, True), 2 + 9 + 6),  # the first one alone is waited for
        (1.0, (True, False, True), 2 + 3 + 6),  # 2 s on the device, beside which the host steps the first one
        (1.0, (False, False, True), 4 + 3 + 6),  # the last one is stepped at 2 s, which is long before its use
    ],
)
def test_a_step_on_the_host_is_hidden_by_the_forward_until_its_unit_is_used(forward_s, at_home, expected_s):
    costs = {"forward_s": forward_s, "optimizer_s": 4.0}
    units = tuple(linear(f"l{i}", **costs, home_s_per_byte=1e-30 * is_home) for i, is_home in enumerate(at_home))
    model, cluster = ModelCosts(units), slow_cluster(0.0)
    assert deferred_step_time(model, ["full"] * 3, cluster) == pytest.approx(expected_s)  # ranks step halves
    assert step_time(model, ["full"] * 3, cluster) == pytest.approx(3 * (forward_s + 2 + 2))


def test_what_is_on_the_device_or_steps_where_it_computes_or_is_owned_is_not_deferred():
    away = {"optimizer_s": 4.0, "home_s_per_byte": 1e-30}
    owned = UnitCosts("w", (ParamCosts("w", 1024, 1024, owner_work=1.0),), 1.0, 2.0, **away)
    for unit in (linear("l", optimizer_s=4.0), owned):
        assert deferred_step_time(ModelCosts((unit,)), ["full"], slow_cluster(0.5)) is None
    model = ModelCosts((linear("l", **away),))
    assert deferred_step_time(model, ["full"], slow_cluster(0.5)) == pytest.approx(2 + 0.5 + 1 + 0.5 + 2 + 0.5)
    assert deferred_step_time(model, ["full"], replace(slow_cluster(0.5), overlaps=False)) is None


@ALWAYS
@given(models(), clusters(), st.data())
def test_a_deferred_step_takes_no_longer_than_one_at_once_and_saves_no_more_than_the_hosts_part(model, cluster, data):
    names, cluster = choices(data.draw, model), replace(cluster, overlaps=True)
    away = data.draw(st.lists(st.booleans(), min_size=len(model.units), max_size=len(model.units)))
    units = [
        replace(
            unit, home_s_per_byte=1e-9 * is_away, alternatives=(), optimizer_s=data.draw(st.sampled_from((0.0, 0.1)))
        )
        for unit, is_away in zip(model.units, away, strict=True)
    ]
    model = replace(model, units=tuple(units))
    found, at_once = deferred_step_time(model, names, cluster), step_time(model, names, cluster)
    options = options_of(model, tuple(map(Strategy.of, names)), cluster)
    owned = [any(param.owner_work for param in unit.params) for unit in units]
    hosts = [
        o.optimizer_s for o, is_away, is_owned in zip(options, away, owned, strict=True) if is_away and not is_owned
    ]
    assert (found is None) == (not hosts)
    if found is not None:
        assert at_once - sum(hosts) - 1e-9 <= found <= at_once + 1e-9


def test_a_gather_in_place_costs_what_was_measured_and_the_first_one_of_what_lies_elsewhere_a_copy():
    link, in_place = Link(0.0, 1.0 / (2 << 20)), Link(0.25, 0.0)
    cluster = Cluster(2, 2, Links.of(link, in_place=in_place), keeps_received_rows=False)
    plain, cast, along = (
        UnitCosts("w", (ParamCosts("w", 1024, 1024, gather_itemsize=size, grad_itemsize=4, dim=dim),), 1.0, 2.0)
        for size, dim in ((4, 0), (2, 0), (4, 1))
    )
    gathers = {True: 0.25, False: 1.0}  # in place, and of 4 MiB; what is cast has half of that
    for unit, first_s in ((plain, gathers[True]), (cast, gathers[False] / 2), (along, gathers[False])):
        step_s = step_time(ModelCosts((unit,)), ["full"], cluster)
        assert step_s == pytest.approx(first_s + 1.0 + gathers[True] + 2.0 + 1.0)


def test_full_values_that_a_host_has_once_take_a_rank_nothing_but_its_part_of_what_is_cast():
    link = Link(0.0, 1e-9)
    memory, messages = Cluster(2, 2, Links.of(link, in_place=link)), Cluster(2, 2, Links.of(link))
    size = 4 << 20
    for itemsize, part, copy in ((4, 0, size), (2, size // 4, size // 2)):
        param = ParamCosts("w", 1024, 1024, gather_itemsize=itemsize, grad_itemsize=0, state_bytes_per_element=0)
        model = ModelCosts((UnitCosts("w", (param,), 1.0, 1.0),))
        assert peak_bytes(model, ["zero1"], memory) == size // 2 + part
        assert peak_bytes(model, ["zero1"], messages) == size // 2 + copy


def test_slices_after_the_first_hide_behind_those_before_them():
    unit = UnitCosts("w", (ParamCosts("w", 1024, 1024, can_split=True),), 4.0, 8.0, slice_overhead_s=0.25)
    model = ModelCosts((unit,))
    # Four slices: the first gather of 0.1 s shows, in forward and in backward; so does the last reduction of 0.1 s.
    assert step_time(model, ["split(4)"], slow_cluster(0.4)) == pytest.approx(0.1 + 4.75 + 0.1 + 8.75 + 0.1)
    # 2 s each: forward computes a slice and then waits for three; backward for three, and for three reductions.
    slow = 2 + (4.75 / 4 + 3 * 2) + 2 + (8.75 / 4 + 6 * 2) + 2
    assert step_time(model, ["split(4)"], slow_cluster(8.0)) == pytest.approx(slow)


def test_micro_batches_gather_again_only_what_was_freed():
    model = ModelCosts((linear("a"), linear("b")), num_backwards=3)
    time_of = {name: step_time(model, [name] * 2, slow_cluster(4.0)) for name in ("zero1", "zero2", "keep", "full")}
    assert time_of["zero1"] < time_of["zero2"] < time_of["keep"] < time_of["full"]
    assert peak_bytes(model, ["zero1"] * 2, slow_cluster(1.0)) > peak_bytes(model, ["zero2"] * 2, slow_cluster(1.0))


def test_groups_of_one_host_use_its_links_and_replicas_share_those_between_hosts():
    inside, across = Links.of(Link(0.0, 1.0)), Links.of(Link(0.0, 100.0))
    cluster = Cluster(8, 4, inside, across)
    assert cluster.all_gather_s(1.0, 4) == pytest.approx(3 / 4)
    assert cluster.all_gather_s(1.0, 8) == pytest.approx(100 * 7 / 8)
    assert cluster.all_reduce_s(1.0, 4) == pytest.approx(100 * 2 * (1 / 2) * 4)  # four groups at a time
    assert cluster.all_reduce_s(1.0) == pytest.approx(100 * 2 * 7 / 8)
    measured = Cluster(8, 4, inside, across, shards={8: inside}, replicas={4: inside})
    assert measured.all_gather_s(1.0, 8) == pytest.approx(7 / 8)
    assert measured.all_reduce_s(1.0, 4) == pytest.approx(1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ModelCosts((linear("a"),), num_backwards=0),
            "ModelCosts: num_backwards must be an integer of at least 1, but it is 0",
        ),
        (
            lambda: linear("a", forward_s=-1.0),
            "UnitCosts: forward_s must be a finite number, 0 or more, but it is -1.0",
        ),
        (
            lambda: linear("a", forward_s=float("nan")),
            "UnitCosts: forward_s must be a finite number, 0 or more, but it is nan",
        ),
        (lambda: Link(0.0, -1.0), "Link: seconds_per_byte must be a finite number, 0 or more"),
        (lambda: ParamCosts("w", -1, 1), "ParamCosts: length must be an integer of at least 0"),
    ],
)
def test_costs_that_make_no_sense_are_an_error(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelCosts(()), "at least one unit"),
        (lambda: Cluster(8, 4, Links.of(Link(0, 0))), "8 ranks are on hosts of 4"),
    ],
)
def test_costs_that_do_not_go_together_are_an_error(make, message):
    with pytest.raises(PlanError, match=message):
        make()


def test_a_strategy_that_does_not_divide_the_ranks_is_an_error():
    with pytest.raises(PlacementError, match="must divide"):
        peak_bytes(ModelCosts((linear("a"),)), ["hybrid(3)"], slow_cluster(1.0, num_ranks=4))
