"""The solver: what it finds is what brute force finds, its bounds hold, and what does not fit is said in bytes."""

import itertools
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner_solver import STRATEGIES as FAMILY_STRATEGIES
from benchmarks.planner_solver import family
from dshard import ArgumentError, PlanError
from dshard.planner import (
    Cluster,
    Link,
    Links,
    ModelCosts,
    ParamCosts,
    UnitCosts,
    peak_bytes,
    solve,
    solve_batch,
    step_time,
)
from dshard.planner import search as searching
from dshard.planner.search import Best, Chain, Relaxation, search
from dshard.policies import Strategy
from tests.planner.cases import STRATEGIES, clusters, every_choice, models, units_with_alternatives

ALWAYS = settings(max_examples=150, deadline=None)
SOME_NAMES = st.lists(st.sampled_from(STRATEGIES), min_size=1, max_size=4, unique=True)
FAMILIES = ("ddp", "zero2", "keep", "full", "hybrid(8)", "split(4)")
SLACK = 1 + 1e-9


def limits(data, every):
    """A limit at which the answer may change, or near it; never below 1."""
    peak = data.draw(st.sampled_from(sorted({peak for _, peak in every})))
    return max(1, peak + data.draw(st.sampled_from([0, -1, 1000])))


@ALWAYS
@given(models(3, units=units_with_alternatives), clusters(), SOME_NAMES.filter(lambda names: len(names) < 4), st.data())
def test_with_kinds_of_units_as_a_choice_the_solver_finds_what_brute_force_finds(model, cluster, names, data):
    every = every_choice(model, cluster, names)
    limit = limits(data, every)
    fitting = [seconds for seconds, peak in every if peak <= limit]
    if not fitting:
        least = min(peak for _, peak in every)
        with pytest.raises(PlanError, match=f"takes {least} bytes, {least - limit} too many"):
            solve(model, cluster, names, limit)
        return
    solution = solve(model, cluster, names, limit)
    certificate, own = solution.certificate, model.under(solution.kinds)
    assert own == solution.model
    assert step_time(own, solution.strategies, cluster) == pytest.approx(min(fitting), rel=1e-9, abs=1e-15)
    assert certificate.step_s == pytest.approx(min(fitting), rel=1e-9, abs=1e-15)
    assert certificate.gap < 1e-8
    assert certificate.relaxed_bound_s <= min(fitting) * SLACK + 1e-15
    assert certificate.peak_bytes == peak_bytes(own, solution.strategies, cluster) <= limit
    margin = solve(model, cluster, names, limit, tolerance=0.5)  # whatever is simpler fits, and is not much slower
    assert step_time(margin.model, margin.strategies, cluster) <= min(fitting) * 1.5 * SLACK + 1e-15
    assert peak_bytes(margin.model, margin.strategies, cluster) == margin.certificate.peak_bytes <= limit


def test_prices_go_on_where_no_choice_so_far_is_left():
    params = (ParamCosts("a", 40, 7, gather_itemsize=2, grad_itemsize=2, step_bytes_per_element=4, can_split=True),)
    params += (ParamCosts("b", 1, 3000, gather_itemsize=2, grad_itemsize=0, state_bytes_per_element=0),)
    params = (params[0], replace(params[1], step_bytes_per_element=4, can_split=True))
    none = UnitCosts("u", params, 0.001, 0.0, 207784, 216482, 1000)
    second = replace(none, checkpointing="selective", forward_s=0.0, backward_s=0.1970252304814482)
    second = replace(second, activation_bytes=153938, forward_transient_bytes=1000, backward_transient_bytes=1)
    full = replace(none, checkpointing="full", forward_s=0.002, slice_overhead_s=0.001, is_used_in_backward=False)
    full = replace(full, activation_bytes=1, forward_transient_bytes=102680, backward_transient_bytes=0)
    whole = tuple(replace(param, can_split=False) for param in params)
    here = (none, second, full)
    away = [replace(each, params=whole, home_s_per_byte=1 / 997e6, optimizer_s=7840 / 997e6) for each in here]
    model = ModelCosts((replace(none, alternatives=(second, full, *away)),) * 6)
    gather, reduce, of_all = Link(0.001, 1000 / 997e6), Link(0.0, 1000 / 997e6), Link(0.001, 1 / 997e6)
    links = Links(gather, reduce, of_all)
    for limit in (128925, 128926, 129925):
        solution = solve(model, Cluster(4, 4, links, links), ["ddp", "zero1", "hybrid(2)"], limit)
        assert solution.certificate.gap < 1e-8
        assert solution.certificate.peak_bytes <= limit


@ALWAYS
@given(models(4), clusters(), SOME_NAMES, st.data())
def test_the_solver_finds_what_brute_force_finds(model, cluster, names, data):
    every = every_choice(model, cluster, names)
    limit = limits(data, every)
    fitting = [seconds for seconds, peak in every if peak <= limit]
    if not fitting:
        least = min(peak for _, peak in every)
        with pytest.raises(PlanError, match=f"takes {least} bytes, {least - limit} too many"):
            solve(model, cluster, names, limit)
        return
    solution = solve(model, cluster, names, limit)
    certificate, best = solution.certificate, min(fitting)
    assert certificate.step_s == pytest.approx(best, rel=1e-9, abs=1e-15)
    assert certificate.step_s == pytest.approx(step_time(model, solution.strategies, cluster), rel=1e-9, abs=1e-15)
    assert certificate.gap < 1e-8
    assert certificate.relaxed_bound_s <= best * SLACK + 1e-15
    assert certificate.lower_bound_s <= best * SLACK + 1e-15
    assert certificate.peak_bytes == peak_bytes(model, solution.strategies, cluster) <= limit
    assert certificate.memory_slack_bytes == limit - certificate.peak_bytes


@ALWAYS
@given(models(4), clusters(), SOME_NAMES, st.booleans(), st.data())
def test_the_search_alone_finds_the_best_without_knowing_a_good_choice(model, cluster, names, has_prices, data):
    known = list(dict.fromkeys(Strategy.of(name).on(cluster.num_ranks) for name in names))
    every = every_choice(model, cluster, known)
    limit = limits(data, every)
    chain = Chain.of(model, known, cluster)
    relaxation = Relaxation(chain, limit, Best(chain, limit))
    for row in data.draw(st.permutations(range(len(chain.rows.constant)))):
        relaxation.add(row)
    if has_prices:
        relaxation.ascend()
    found = search(relaxation, math.inf, 10**6)
    fitting = [seconds for seconds, peak in every if peak <= limit]
    assert (found.chosen is None) == (not fitting)
    if found.chosen is not None:
        assert chain.cost(found.chosen) == pytest.approx(min(fitting), rel=1e-9, abs=1e-15)
        assert chain.peak_bytes(found.chosen) <= limit
        assert found.dropped_bound == math.inf


@ALWAYS
@given(models(5), clusters(), st.sampled_from([1, 2, 3]), st.data())
def test_bounds_hold_when_there_is_little_room_for_the_search(model, cluster, width, data):
    names = ("ddp", "keep", "full")
    every = every_choice(model, cluster, names)
    limit = limits(data, every)
    fitting = [seconds for seconds, peak in every if peak <= limit]
    if not fitting:
        return

    def narrow(relaxation, upper, most, *_):  # but for the smallest peak, which is looked for whatever the seconds
        return search(relaxation, upper, width if math.isfinite(upper) else most)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searching, "search", narrow)
        patch.setattr(searching, "_EARLY_LABELS", 1)
        certificate = solve(model, cluster, names, limit).certificate
    assert certificate.relaxed_bound_s <= min(fitting) * SLACK + 1e-15
    assert certificate.lower_bound_s <= min(fitting) * SLACK + 1e-15
    assert certificate.step_s >= min(fitting) / SLACK - 1e-15
    assert 0 <= certificate.gap <= 1


@pytest.mark.parametrize("width", [3, 30])
@pytest.mark.parametrize("part", [0.02, 0.05])
def test_what_a_search_drops_is_not_proven(part, width):
    """Thirty layers that all differ, where a narrow search misses the best: its bound must not exclude that."""
    model, cluster = family("random", 30), Cluster(64, 8, Links.of(Link(2e-5, 5e-12)), Links.of(Link(3e-5, 2.5e-11)))
    low, high = (peak_bytes(model, [base] * 30, cluster) for base in ("full", "ddp"))
    limit = low + int((high - low) * part)
    best = solve(model, cluster, FAMILY_STRATEGIES, limit).certificate
    assert best.gap == 0

    def narrow(relaxation, upper, most, *_):
        return search(relaxation, upper, 1 if most == searching._NARROW else width)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searching, "search", narrow)
        patch.setattr(searching, "_EARLY_LABELS", 1)
        found = solve(model, cluster, FAMILY_STRATEGIES, limit).certificate
    assert found.lower_bound_s <= best.step_s * SLACK
    assert found.step_s >= best.step_s / SLACK


def test_a_search_says_how_far_it_is():
    said = list[str]()
    model, cluster = family("random", 30), Cluster(64, 8, Links.of(Link(2e-5, 5e-12)), Links.of(Link(3e-5, 2.5e-11)))
    low, high = (peak_bytes(model, [base] * 30, cluster) for base in ("full", "ddp"))
    solve(model, cluster, FAMILY_STRATEGIES, low + (high - low) // 20, progress=said.append)
    assert any(what.startswith("bounding at ") for what in said)
    places = [what.rpartition(", ")[2] for what in said if what.startswith("searching among ")]
    assert places[:29] == [f"unit {stage} of 30" for stage in range(2, 31)]


@settings(max_examples=50, deadline=None)
@given(models(5), clusters(), SOME_NAMES)
def test_more_memory_never_makes_a_step_longer(model, cluster, names):
    peaks = [peak_bytes(model, [name] * len(model.units), cluster) for name in names]
    low, high = min(peaks), max(peaks)
    steps = [
        solve(model, cluster, names, max(1, limit)).certificate.step_s
        for limit in (low, low + (high - low) // 3, high, 2 * high)
    ]
    assert all(later <= earlier * SLACK for earlier, later in itertools.pairwise(steps))


def layer(number, width=1024, tokens=2048, factor=1.0):
    sizes = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    params = tuple(ParamCosts(f"{number}.{i}", *size, can_split=True) for i, size in enumerate(sizes))
    forward_s = 24e-14 * width * width * tokens / 2 * factor
    activation_bytes = int(34 * tokens * width * factor)
    return UnitCosts(f"layers.{number}", params, forward_s, 2 * forward_s, activation_bytes, slice_overhead_s=1e-5)


def hosts(num_ranks=64):
    inside, across = Links.of(Link(2e-5, 5e-12, 1e-6)), Links.of(Link(3e-5, 25e-12, 2e-6))
    return Cluster(num_ranks, 8, inside, across, keeps_received_rows=False)


def between(model, cluster, part):
    """A limit between what all-full and what all-ddp takes."""
    low, high = (peak_bytes(model, [name] * len(model.units), cluster) for name in ("full", "ddp"))
    return low + int((high - low) * part)


@pytest.mark.parametrize("part", [0.02, 0.1, 0.5])
def test_a_hundred_layers_alike_or_not_are_solved_to_the_end(part):
    for model in (
        ModelCosts(tuple(layer(i) for i in range(100))),
        ModelCosts(tuple(layer(i, 256 * (1 + i * i % 7), factor=1 + i % 13 / 50) for i in range(100))),
    ):
        solution = solve(model, hosts(), FAMILIES, between(model, hosts(), part))
        assert solution.certificate.gap == 0
        assert solution.certificate.relaxed_gap < 1e-2
        for name in FAMILIES:  # no single strategy that fits is better
            if peak_bytes(model, [name] * 100, hosts()) <= solution.certificate.limit_bytes:
                assert solution.certificate.step_s <= step_time(model, [name] * 100, hosts()) * SLACK


@pytest.mark.slow
def test_two_thousand_units_are_solved_to_a_gap_of_a_thousandth_at_most():
    model = ModelCosts(tuple(layer(i, 256 * (1 + i * i % 7), factor=1 + i % 13 / 50) for i in range(2000)))
    certificate = solve(model, hosts(), FAMILIES, between(model, hosts(), 0.1)).certificate
    assert certificate.gap < 1e-3
    assert certificate.memory_slack_bytes >= 0


def test_the_slices_of_a_wide_unit_make_it_fit():
    wide = UnitCosts("head", (ParamCosts("head.weight", 8192, 8192, can_split=True),), 1e-3, 2e-3)
    model, cluster = ModelCosts((layer(0), wide, layer(1))), hosts()
    limit = peak_bytes(model, ["full", "split(4)", "full"], cluster)
    with pytest.raises(PlanError, match=r"too many, in the gradients of head; most of it is of head \("):
        solve(model, cluster, ("ddp", "keep", "full"), limit)
    solution = solve(model, cluster, ("ddp", "keep", "full", "split(4)"), limit)
    assert str(solution.strategies[1]) == "split(4)"


def test_of_choices_that_take_as_long_copies_stay_where_all_of_them_fit():
    weight = ParamCosts("w", 512, 512, step_bytes_per_element=40)  # the peak is in the optimizer's step
    first = UnitCosts("0", (weight,), 1e-3, 2e-3, is_used_in_backward=False)
    model = ModelCosts((first, *(UnitCosts(str(i), (weight,), 1e-3, 2e-3) for i in range(1, 4))))
    cluster, names = Cluster(4, 4, Links.of(Link(1e-5, 1e-9))), ("zero1", "zero2", "keep", "full")
    peaks = {name: peak_bytes(model, [name] * 4, cluster) for name in names}
    assert peaks["keep"] < peaks["zero1"]
    for limit, texts in (
        (peaks["zero1"], ["zero1"] * 4),
        (peaks["zero1"] - 1, ["full", "zero1", "zero1", "zero1"]),  # the first one is gathered once either way
        (peaks["keep"], ["full", "keep", "keep", "keep"]),
    ):
        solution = solve(model, cluster, names, limit)
        assert list(map(str, solution.strategies)) == texts
        assert solution.certificate.peak_bytes <= limit
        assert solution.certificate.gap < 1e-8


@ALWAYS
@given(models(4), clusters(), SOME_NAMES, st.sampled_from([0.02, 0.5]), st.data())
def test_a_single_strategy_that_costs_hardly_more_is_preferred(model, cluster, names, tolerance, data):
    every = every_choice(model, cluster, names)
    limit = limits(data, every)
    best = min((seconds for seconds, peak in every if peak <= limit), default=None)
    if best is None:
        return
    solution = solve(model, cluster, names, limit, tolerance=tolerance)
    singles = [
        [name] * len(model.units) for name in names if peak_bytes(model, [name] * len(model.units), cluster) <= limit
    ]
    steps = [step_time(model, single, cluster) for single in singles]
    least = min(steps, default=math.inf)
    certificate = solution.certificate
    assert certificate.step_s == pytest.approx(step_time(model, solution.strategies, cluster), rel=1e-9, abs=1e-15)
    assert certificate.peak_bytes == peak_bytes(model, solution.strategies, cluster) <= limit
    assert certificate.lower_bound_s <= best * SLACK + 1e-15
    assert certificate.fastest_s == pytest.approx(best, rel=1e-9, abs=1e-15)  # whatever was preferred to it
    assert certificate.slower_by >= 0
    assert certificate.margin == tolerance
    assert certificate.fastest_s == pytest.approx(step_time(model, certificate.fastest, cluster), rel=1e-9, abs=1e-15)
    assert certificate.fastest_peak_bytes == peak_bytes(model, certificate.fastest, cluster) <= limit
    if least <= best * (1 + tolerance) * (1 - 1e-9):
        assert certificate.step_s <= best * (1 + tolerance) * SLACK + 1e-15
        peaks = [
            peak_bytes(model, single, cluster)
            for single, seconds in zip(singles, steps, strict=True)
            if seconds <= best * (1 + tolerance) * (1 - 1e-9) and not single[0].startswith("split")
        ] or [math.inf]  # slices are taken where all else is too large or too slow
        if not {"zero1", "zero2"} & set(names):  # else copies may stay for good, where that costs no time
            assert len(set(solution.strategies)) == 1
            assert certificate.peak_bytes <= min(peaks)
            assert (solution.strategies[0].num_slices > 1) <= (peaks == [math.inf])
            within = [n for n, seconds in zip(singles, steps, strict=True) if seconds <= best * (1 + tolerance) * SLACK]
            slices = [Strategy.of(names[0]).num_slices for names in within]
            assert solution.strategies[0].num_slices == min(slices)
    elif least > best * (1 + tolerance) * SLACK:
        assert certificate.step_s == pytest.approx(best, rel=1e-9, abs=1e-15)


def test_what_does_not_fit_is_an_error_that_says_by_how_many_bytes_and_where():
    model, cluster = ModelCosts((layer(0), layer(1))), hosts()
    least = peak_bytes(model, ["full"] * 2, cluster)
    with pytest.raises(PlanError) as raised:
        solve(model, cluster, ("keep", "full"), least - 7)
    assert re.search(
        rf"into {least - 7} bytes, .* {least} bytes, 7 too many, in the gradients of layers", str(raised.value)
    )
    assert "Use a smaller batch" in str(raised.value)


@pytest.mark.parametrize(
    ("strategies", "limit", "message"),
    [
        ((), 1, "strategies to choose from"),
        (("full",), 0, "limit_bytes must be an integer of at least 1"),
        (("full",), -5, "but it is -5"),
    ],
)
def test_a_call_that_makes_no_sense_is_an_error(strategies, limit, message):
    with pytest.raises(ArgumentError, match=message):
        solve(ModelCosts((layer(0),)), hosts(), strategies, limit)


def at_batch(size):
    return ModelCosts(tuple(layer(i, tokens=512 * size) for i in range(4)), batch_size=size)


@pytest.mark.parametrize("limit", [3 << 27, 1 << 29, 1 << 30])
def test_the_batch_size_is_that_of_the_most_samples_per_second(limit):
    names, rates = ("ddp", "keep", "full"), {}
    for size in range(1, 17):
        fitting = [seconds for seconds, peak in every_choice(at_batch(size), hosts(), names) if peak <= limit]
        rates[size] = 64 * size / min(fitting) if fitting else 0.0
    found = solve_batch(at_batch, range(1, 17), hosts(), names, limit)
    assert found.samples_per_s == pytest.approx(max(rates.values()), rel=1e-9)
    assert rates[found.model.batch_size] == pytest.approx(found.samples_per_s, rel=1e-9)
    assert found.upper_bound >= max(rates.values()) / SLACK
    assert all(math.isclose(rates[size], rate or 0.0, rel_tol=1e-9) for size, rate in found.tried.items())


def test_no_batch_size_that_fits_is_the_error_of_the_smallest():
    least = peak_bytes(at_batch(2), ["full"] * 4, hosts())
    with pytest.raises(PlanError, match=f"takes {least} bytes, {least - 1000} too many"):
        solve_batch(at_batch, [3, 2], hosts(), ("full",), 1000)
    with pytest.raises(ArgumentError, match="batch sizes to choose from"):
        solve_batch(at_batch, [], hosts(), ("full",), 1000)
