"""What the time of a step is: terms that add up to it, each from where it comes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dshard.cli.models import GPT, GPTConfig
from dshard.errors import PlanError
from dshard.planner import (
    DEVICES,
    Cluster,
    Link,
    Links,
    Measured,
    ModelCosts,
    ParamCosts,
    Plan,
    Training,
    UnitCosts,
    Work,
    cluster_of,
    published,
)
from dshard.planner.timeline import bound_text
from dshard.planning.plan import Profile
from dshard.policies import Strategy
from tests.planner.cases import STRATEGIES, clusters, models

H100 = DEVICES["h100-80g"]


def profile(rates=None, checkpointing="none", **training):
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=64, num_layers=3, width=128, num_heads=2, vocab_size=500))
    sample = torch.empty(4, 64, dtype=torch.int64, device="meta")
    trained = Training(torch.bfloat16, **training)
    return Profile(model, sample, device=H100, training=trained, rates=rates, checkpointing=checkpointing)


@given(models(4), clusters(), st.data())
def test_terms_add_up_to_the_step(model, cluster, data):
    chosen = tuple(Strategy.of(data.draw(st.sampled_from(STRATEGIES))) for _ in model.units)
    plan = Plan(model, cluster, chosen)
    terms = plan.time_by_term
    assert sum(terms.values()) == pytest.approx(plan.step_s, rel=1e-9, abs=1e-12)
    assert all(seconds > 0 for seconds in terms.values())
    waits = sum(seconds for term, seconds in terms.items() if term.startswith("waiting"))
    assert waits == pytest.approx(plan.exposed_s, rel=1e-9, abs=1e-9)
    if cluster.num_ranks <= cluster.ranks_per_host:
        assert not any(term.endswith("between hosts") for term in terms)


@pytest.mark.parametrize("rates", [None, published()], ids=["datasheet", "profile"])
def test_the_work_of_each_unit_adds_up_to_its_times(rates):
    found = profile(rates)
    for unit in found.costs(4).units:
        assert [half.total_s for half in unit.work] == pytest.approx([unit.forward_s, unit.backward_s], rel=1e-9)
    plan = found.given(cluster_of(H100, 16, profile=rates), "full")
    terms = plan.time_by_term
    assert sum(terms.values()) == pytest.approx(plan.step_s)
    assert {"memory traffic", "optimizer"} <= terms.keys()
    assert ("products" in terms) == (rates is not None)  # which small ones are bound by, if traffic comes beside it
    assert ("starts of kernels" in terms) == (rates is None)
    assert ("copies for collectives" in terms) == (rates is not None)


def test_what_is_computed_again_is_told_as_what_it_is():
    once, again = (profile(published(), kind).given(cluster_of(H100, 1), "full") for kind in ("none", "full"))
    assert "full" in again.checkpointing
    for unit in (*once.model.units, *again.model.units):
        assert [half.total_s for half in unit.work] == pytest.approx([unit.forward_s, unit.backward_s], rel=1e-9)
    for term in ("products", "attention", "memory traffic"):
        assert again.time_by_term[term] > 1.1 * once.time_by_term[term]
    assert again.time_by_term.keys() == once.time_by_term.keys()


def test_times_of_a_profile_are_told_apart_by_its_constants():
    rates, ops = published(), [op for phase in profile().traced(4).phases for op in phase.ops]
    traffic = rates.seconds_per_byte(H100)
    products = [op for op in ops if op.flops and "attention" not in op.name]
    attention = [op for op in ops if "attention" in op.name]
    others = sum(op.num_bytes for op in ops if not op.flops and op not in attention)
    peak, reached = H100.flops_per_s["bfloat16"], rates.of_family
    terms = profile(rates).given(cluster_of(H100, 1), "full").time_by_term
    assert terms["products"] == pytest.approx(sum(op.flops for op in products) / peak / reached("product", H100))
    assert terms["attention"] == pytest.approx(sum(op.flops for op in attention) / peak / reached("attention", H100))
    operands = rates.values["operands"] * sum(op.num_bytes for op in products)
    assert terms["memory traffic"] == pytest.approx(
        traffic * (operands + others + sum(op.num_bytes for op in attention))
    )


def slow_cluster():
    """Two hosts of four ranks, whose collectives nothing hides."""
    inside, across = Links.of(Link(0.001, 1e-9)), Links.of(Link(0.01, 1e-8))
    return Cluster(8, 4, inside, across, overlaps=False)


def plan_of(name, cluster, **unit):
    weight = ParamCosts("w", 4096, 1000)
    units = tuple(UnitCosts(f"u{i}", (weight,), 0.1, 0.2, optimizer_s=0.03, **unit) for i in range(2))
    return Plan(ModelCosts(units), cluster, (Strategy.of(name),) * 2)


def test_waiting_is_told_by_collective_and_by_link():
    cluster, num_bytes = slow_cluster(), 4096 * 1000 * 4
    full = plan_of("full", cluster).time_by_term
    assert full["waiting for gathers between hosts"] == pytest.approx(4 * cluster.all_gather_s(num_bytes, 8))
    assert full["waiting for reductions between hosts"] == pytest.approx(2 * cluster.reduce_scatter_s(num_bytes, 8))
    assert not any(term.endswith("within hosts") for term in full)
    hybrid = plan_of("hybrid(4)", cluster).time_by_term
    assert hybrid["waiting for gathers within hosts"] == pytest.approx(4 * cluster.all_gather_s(num_bytes, 4))
    assert hybrid["waiting for reductions within hosts"] == pytest.approx(2 * cluster.reduce_scatter_s(num_bytes, 4))
    assert hybrid["waiting for reductions between hosts"] == pytest.approx(2 * cluster.all_reduce_s(num_bytes / 4, 4))
    assert "waiting for gathers between hosts" not in hybrid
    own = {4: Links.of(Link(0.002, 2e-9))}, {4: Links.of(Link(0.02, 2e-8))}  # measured on just these groups
    measured = replace(cluster, shards=own[0], replicas=own[1])
    terms = plan_of("hybrid(4)", measured).time_by_term
    assert terms["waiting for reductions within hosts"] == pytest.approx(2 * measured.reduce_scatter_s(num_bytes, 4))
    assert terms["waiting for reductions between hosts"] == pytest.approx(2 * measured.all_reduce_s(num_bytes / 4, 4))
    assert terms.keys() == hybrid.keys()


def test_measured_times_are_computation_waiting_and_the_optimizer():
    terms = plan_of("full", slow_cluster()).time_by_term
    assert terms["computation"] == pytest.approx(2 * 0.3)
    assert terms["optimizer"] == pytest.approx(2 * 0.03 / 8)
    assert {term.partition(" for ")[0] for term in terms} == {"computation", "optimizer", "waiting"}


def test_what_is_scaled_to_a_measured_step_keeps_its_parts():
    plan = profile(published()).plan(cluster_of(H100, 16, profile="published"), strategies=("full", "ddp"))
    again = plan.replanned(Measured(3 * plan.step_s))
    assert again.strategies == plan.strategies
    for term, seconds in plan.time_by_term.items():
        assert again.time_by_term[term] == pytest.approx(3 * seconds, rel=1e-6)


def test_the_text_names_what_bounds_the_step():
    work = (Work(products_s=0.08, traffic_s=0.02), Work(attention_s=0.2))
    plan = plan_of("full", replace(slow_cluster(), overlaps=True), work=work)
    text = plan.explain()
    share = plan.time_by_term["attention"] / plan.step_s
    assert share == pytest.approx(2 * 0.2 / plan.step_s)
    (line,) = (line for line in text.splitlines() if line.startswith("the step is bound by"))
    assert line.startswith(f"the step is bound by attention: {share:.1%} of it; ")
    assert max(map(len, text.splitlines())) <= 120
    assert bound_text({"products": 1.0}) == ["the step is bound by products: 100.0% of it"]
    assert bound_text({}) == []


def test_a_plan_keeps_the_work_of_its_units():
    with_work = plan_of("full", slow_cluster(), work=(Work(1.0), Work(2.0)))
    assert Plan.from_json(with_work.to_json()) == with_work


def test_a_compiled_model_moves_the_part_of_other_bytes_that_the_profile_says():
    rates = published()
    eager, compiled = profile(rates).costs(4), profile(rates, is_compiled=True).costs(4)
    ops = [op for phase in profile().traced(4).phases for op in phase.ops]
    others = sum(op.num_bytes for op in ops if not op.flops and "attention" not in op.name)
    saved = [sum(unit.forward_s + unit.backward_s for unit in costs.units) for costs in (eager, compiled)]
    fused = rates.values["fused"]
    assert saved[0] - saved[1] == pytest.approx((1 - fused) * others * rates.seconds_per_byte(H100))
    for name in ("products_s", "attention_s", "copies_s"):
        for one, other in zip(eager.units, compiled.units, strict=True):
            assert [getattr(half, name) for half in one.work] == [getattr(half, name) for half in other.work]
    with pytest.raises(PlanError, match=r"is_compiled needs a profile, .* Pass profile='published', or --profile"):
        profile(is_compiled=True).costs(4)


def test_a_compiled_model_is_not_told_from_times_that_are_measured():
    training = Training(is_compiled=True)
    found = Profile(nn.Linear(4, 4), torch.ones(2, 4), device=None, training=training)
    with pytest.raises(PlanError, match=r"are measured here, of the model as it is. Pass device= and profile="):
        found.costs(2)
