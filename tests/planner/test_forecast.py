"""What CUDA's allocator reserves, by a measured factor: what holds for every forecast, and limits that are of it."""

import json
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dshard
from dshard import PlanError
from dshard.cli.models import GPT, GPTConfig
from dshard.planner import Measured, ModelCosts, ParamCosts, Plan, UnitCosts, cluster_of, simulate, solve
from dshard.planner.memory import RESERVED, MemoryForecast, forecast, moments
from dshard.planner.solver import within_limit
from dshard.policies import Strategy
from tests.cli.launch import REPO
from tests.planner.cases import STRATEGIES, clusters, models

MIB = 1 << 20
CLUSTER = cluster_of("h100-80g", 8)
KINDS = ("reserved", "expandable")


@given(st.data())
def test_what_is_reserved_is_no_less_than_what_lives_and_a_device_holds_more(data):
    model, cluster = data.draw(models()), data.draw(clusters())
    names = data.draw(st.lists(st.sampled_from(STRATEGIES), min_size=len(model.units), max_size=len(model.units)))
    strategies = tuple(Strategy.of(name) for name in names)
    seen = forecast(model, strategies, cluster)
    assert seen.live_bytes == max(moment.num_bytes for moment in moments(model, strategies, cluster))
    assert seen.live_bytes <= seen.expandable_bytes <= seen.reserved_bytes < seen.device_bytes < seen.most_device_bytes
    assert Plan.from_json(Plan(model, cluster, strategies).to_json()).memory_seen == seen
    assert simulate(model, strategies, cluster).peak_bytes == seen.live_bytes


@pytest.mark.parametrize("memory_of", KINDS)
def test_the_factors_are_the_means_of_what_was_measured(memory_of):
    rows = json.loads((REPO / "benchmarks" / "results" / "reserved.json").read_text())["rows"]
    parts = [row["reserved_bytes"] / row["predicted_bytes"] for row in rows if row["memory_of"] == memory_of]
    assert RESERVED[memory_of] == round(fmean(parts), 2)


def test_where_segments_exceed_a_limit_that_live_bytes_keep_the_text_says_what_to_do():
    seen = MemoryForecast(live_bytes=70 * MIB, reserved_bytes=80 * MIB, expandable_bytes=72 * MIB)
    assert "expandable_segments:True, or plan with memory_of='reserved'" in seen.lines(76 * MIB)[-1]
    assert "the limit holds with PYTORCH_CUDA_ALLOC_CONF" in seen.lines(76 * MIB, "expandable")[-1]
    for limit in (0, 69 * MIB, 80 * MIB):  # none, one that does not hold anyway, one that holds all
        assert len(seen.lines(limit)) == 2


def planned(**given):
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=256, num_layers=4, width=512, num_heads=8, vocab_size=4096))
    sample = torch.zeros(4, 256, dtype=torch.int64)
    return dshard.plan(model, sample, **{"cluster": CLUSTER, "device": "h100-80g", "margin": 0} | given)


def test_by_default_a_limit_is_of_live_bytes_and_nothing_is_left():
    limit = planned(strategies="full").peak_bytes
    plan = planned(memory=limit, strategies="full")
    assert plan == planned(memory=limit, strategies="full", memory_of="live")
    assert (plan.certificate.left_bytes, plan.certificate.memory_of) == (0, "live")
    assert plan.peak_bytes == limit < plan.memory_seen.reserved_bytes
    assert "memory_of=" in plan.explain()


@pytest.mark.parametrize("memory_of", KINDS)
@pytest.mark.parametrize("batch", [None, "auto"])
def test_a_limit_of_segments_is_held_and_the_certificate_says_of_what_it_is(memory_of, batch):
    live = planned(memory="300MiB", batch=batch)
    plan = planned(memory="300MiB", memory_of=memory_of, batch=batch)
    assert getattr(plan.memory_seen, f"{memory_of}_bytes") <= 300 * MIB
    if batch is None:
        assert plan.step_s >= live.step_s
    certificate = plan.certificate
    assert (certificate.limit_bytes, certificate.memory_of) == (300 * MIB, memory_of)
    assert plan.peak_bytes <= 300 * MIB - certificate.left_bytes < 300 * MIB
    assert f"are left for the allocator ({memory_of} bytes)" in str(certificate)
    assert str(certificate) in plan.explain()
    assert Plan.from_json(plan.to_json()) == plan
    again = plan.replanned(Measured(plan.step_s * 2))
    assert getattr(again.memory_seen, f"{memory_of}_bytes") <= 300 * MIB
    assert again.certificate.memory_of == memory_of


@pytest.mark.parametrize("batch", [None, "auto"])
def test_a_limit_that_no_segments_keep_is_an_error_that_names_it(batch):
    text = r"the peak must fit into 906 bytes.* The limit of 1024 reserved bytes leaves 906 to plan with\.$"
    with pytest.raises(PlanError, match=text):
        planned(strategies="full", memory=1024, memory_of="reserved", batch=batch)
    free = solve(planned().model, CLUSTER, ["full"], 1 << 40)
    with pytest.raises(PlanError, match=r"live bytes must fit into \d+, their part of 1000000 expandable bytes, but"):
        within_limit(lambda room: free, CLUSTER, 1_000_000, "expandable")


@settings(max_examples=30, deadline=None)
@given(models(4), clusters(), st.integers(1, 5))
def test_a_choice_that_takes_more_as_it_runs_is_made_again_with_less_room(model, cluster, more):
    free = solve(model, cluster, STRATEGIES, 1 << 60)
    limit = free.certificate.peak_bytes
    rooms = []

    def choose(room):
        rooms.append(room)
        solution = solve(model, cluster, STRATEGIES, room)
        return replace(solution, model=replace(solution.model, buffer_bytes=model.buffer_bytes + more))

    try:
        solution = within_limit(choose, cluster, limit, "live")
    except PlanError:
        return
    certificate = solution.certificate
    assert certificate.peak_bytes <= limit
    assert certificate.left_bytes == limit - rooms[-1]
    assert max(rooms) == rooms[0] == limit


def test_between_room_for_nothing_and_too_much_room_a_choice_is_looked_for():
    model = ModelCosts((UnitCosts("0", (ParamCosts("weight", 64, 8),), 1e-3, 2e-3),), 1)
    free = solve(model, CLUSTER, STRATEGIES, 1 << 60)
    limit = free.certificate.peak_bytes + 100_000

    def choose(room):
        if room < limit - 30_000:
            raise PlanError("nothing fits")
        more = 150_000 if room > limit - 20_000 else 0
        return replace(free, model=replace(free.model, buffer_bytes=more))

    certificate = within_limit(choose, CLUSTER, limit, "live").certificate
    assert certificate.peak_bytes <= limit
    assert 20_000 <= certificate.left_bytes <= 30_000


@pytest.mark.parametrize("batch", [None, "auto"])
def test_ranks_that_communicate_over_gloo_have_no_such_allocator(batch):
    given = {"memory": 1, "memory_of": "reserved", "batch": batch}  # the limit is too small, which would come later
    with pytest.raises(PlanError, match="memory_of must be 'live' for ranks that communicate over gloo"):
        planned(cluster=replace(CLUSTER, keeps_received_rows=True), **given)
