"""A limit on what CUDA's allocator reserves: what is chosen is seen to fit, and what is left for that is said."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dshard
from dshard import PlanError
from dshard.cli.gpt import GPT, GPTConfig
from dshard.planner import Plan, cluster_of, solve
from dshard.planner.comparing import Measured
from dshard.planner.forecast import forecast
from dshard.planner.rooms import fitted
from tests.planner.cases import STRATEGIES, clusters, models, units_with_alternatives

MIB = 1 << 20
CLUSTER = cluster_of("h100-80g", 8)
KINDS = ("reserved", "expandable")


def seen_bytes(plan, memory_of):
    return getattr(plan.memory_seen, f"{memory_of}_bytes")


@settings(max_examples=60, deadline=None)
@given(
    models(5, units=units_with_alternatives),
    clusters(),
    st.lists(st.sampled_from(STRATEGIES), min_size=1, max_size=3, unique=True),
    st.sampled_from(KINDS),
    st.floats(0.9, 1.1),
)
def test_what_is_chosen_is_seen_to_fit_and_proved_for_the_room_that_it_had(model, cluster, names, memory_of, share):
    cluster = replace(cluster, keeps_received_rows=False)
    free = solve(model, cluster, names, 1 << 60)
    limit = int(share * forecast(free.model, free.strategies, cluster).reserved_bytes)
    rooms = []

    def choose(room):
        rooms.append(room)
        return solve(model, cluster, names, room), None

    try:
        solution, doubt = fitted(choose, cluster, limit, memory_of)
    except PlanError as error:
        said = str(error)
        assert f"{memory_of} bytes must fit into {limit}" in said or "the peak must fit into" in said
        return
    seen = forecast(solution.model, solution.strategies, cluster)
    certificate = solution.certificate
    assert getattr(seen, f"{memory_of}_bytes") <= limit
    assert (certificate.limit_bytes, certificate.memory_of, doubt) == (limit, memory_of, None)
    assert certificate.peak_bytes == seen.live_bytes <= limit - certificate.left_bytes
    assert limit - certificate.left_bytes in rooms
    assert len(rooms) <= 20
    assert certificate == replace(
        solve(model, cluster, names, limit - certificate.left_bytes).certificate,
        limit_bytes=limit,
        left_bytes=certificate.left_bytes,
        memory_of=memory_of,
    )


def planned(**given):
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=256, num_layers=4, width=512, num_heads=8, vocab_size=4096))
    sample = torch.zeros(4, 256, dtype=torch.int64)
    return dshard.plan(model, sample, **{"cluster": CLUSTER, "device": "h100-80g", "margin": 0} | given)


def test_by_default_a_limit_is_of_live_bytes_and_nothing_is_left():
    plan = planned(memory="300MiB")
    assert plan == planned(memory="300MiB", memory_of="live")
    assert (plan.certificate.left_bytes, plan.certificate.memory_of) == (0, "live")
    assert plan.peak_bytes <= 300 * MIB < plan.memory_seen.reserved_bytes
    assert "memory_of=" in plan.explain()


@pytest.mark.parametrize("memory_of", KINDS)
@pytest.mark.parametrize("batch", [None, "auto"])
def test_a_limit_of_segments_is_held_and_the_certificate_says_of_what_it_is(memory_of, batch):
    live = planned(memory="300MiB", batch=batch)
    plan = planned(memory="300MiB", memory_of=memory_of, batch=batch)
    assert seen_bytes(plan, memory_of) <= 300 * MIB < seen_bytes(live, memory_of)
    if batch is None:
        assert plan.step_s >= live.step_s
    certificate = plan.certificate
    assert (certificate.limit_bytes, certificate.memory_of) == (300 * MIB, memory_of)
    assert plan.peak_bytes <= 300 * MIB - certificate.left_bytes < 300 * MIB
    text = str(certificate)
    assert "is proved for live bytes within" in text
    assert f"are left for the allocator ({memory_of} bytes)" in text
    assert text in plan.explain()
    assert ("the limit holds with PYTORCH_CUDA_ALLOC_CONF" in plan.explain()) == (
        plan.memory_seen.reserved_bytes > 300 * MIB
    )
    assert Plan.from_json(plan.to_json()) == plan
    again = plan.replanned(Measured(plan.step_s * 2))
    assert seen_bytes(again, memory_of) <= 300 * MIB
    assert again.certificate.memory_of == memory_of


@pytest.mark.parametrize("memory_of", KINDS)
def test_whatever_limit_lies_above_what_one_strategy_reserves_is_held(memory_of):
    least = seen_bytes(planned(strategies="full", checkpointing="full"), memory_of)
    steps = []
    for limit in range(least, least + 200 * MIB, 37 * MIB):
        plan = planned(checkpointing="auto", memory=limit, memory_of=memory_of)
        assert seen_bytes(plan, memory_of) <= limit
        steps.append(plan.step_s)
    assert steps[0] > steps[-1]


def test_a_limit_that_no_segments_keep_is_an_error_that_names_the_bytes():
    least = planned(strategies="full", memory="60GiB").memory_seen
    limit = (least.live_bytes + least.reserved_bytes) // 2
    with pytest.raises(PlanError) as raised:
        planned(strategies="full", memory=limit, memory_of="reserved")
    over = least.reserved_bytes - limit
    assert str(raised.value) == (
        f"plan: reserved bytes must fit into {limit}, but the least that was found is {least.reserved_bytes}, {over} "
        "too many. Use a smaller batch or more ranks, or memory_of='live'."
    )
    with pytest.raises(PlanError, match="the peak must fit into 1024 bytes"):
        planned(strategies="full", memory=1024, memory_of="reserved")


def test_ranks_that_communicate_over_gloo_have_no_such_allocator():
    with pytest.raises(PlanError, match="memory_of must be 'live' for ranks that communicate over gloo"):
        planned(cluster=replace(CLUSTER, keeps_received_rows=True), memory="300MiB", memory_of="reserved")
