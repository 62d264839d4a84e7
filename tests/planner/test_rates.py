"""Profiles: the constants of the model of time, what they predict, and how they are fitted to runs."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dshard.cli.calibrate import loss_of, model_of, read_runs
from dshard.errors import PlanError
from dshard.planner import DEVICES, ModelCosts, ParamCosts, Training, UnitCosts, peak_bytes, solve, step_time
from dshard.planner.calibration import calibrated, errors_of, fitted, predicted_s
from dshard.planner.flops import Op
from dshard.planner.options import options_of
from dshard.planner.profiles import work_of
from dshard.planner.rates import OTHER_FAMILIES, PRIORS, Rates, cluster_of, published
from dshard.planning.plan import Profile
from dshard.policies import Strategy

SHIPPED = published()
A100, H100 = DEVICES["a100-80g"], DEVICES["h100-80g"]
ROW = {
    "gpu": "a100-80g", "n_gpus": 8, "layers": 7, "d_model": 256, "heads": 4, "vocab": 1000, "seq": 64,
    "micro_batch": 3, "tokens_s_gpu": 1e5,
}  # fmt: skip
ROWS = (
    ROW,
    {**ROW, "tied": 1, "grad_accum": 3},
    {**ROW, "n_gpus": 64, "gpu": "h100-80g", "act_ckpt": "full"},
    {**ROW, "n_gpus": 64, "sharding": "keep", "grad_accum": 2},
    {**ROW, "n_gpus": 64, "sharding": "hybrid", "mlp": "swiglu", "kv_heads": 2, "ffn": 512},
    {**ROW, "n_gpus": 128, "gpus_per_node": 4, "internode_gbps_per_node": 400, "precision": "bf16 fp32 reduce"},
    {**ROW, "n_gpus": 1, "layers": 3},
    {**ROW, "micro_batch": 100},
    {**ROW, "micro_batch": 100, "grad_accum": 2, "sharding": "keep"},
    {**ROW, "n_gpus": 16, "micro_batch": 300, "sharding": "hybrid"},
    {**ROW, "gpu": "mi300x"},
    {**ROW, "compile": 1},
)


def unit_of(**times):
    params = (ParamCosts("p", 1024, 1000, gather_itemsize=2, grad_itemsize=2, can_split=True),)
    return UnitCosts("u", params, **{"forward_s": 1.0, "backward_s": 2.0, **times})


def table_of(rows, path):
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["\t".join(names), *("\t".join(str(row.get(name, "")) for name in names) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def simulated(row, run):
    """The same run as plan and simulate see it: all layers, traced, under one strategy."""
    from dshard.testing.training import checkpoint_blocks

    text = {"mlp": "gelu", "tied": "0", **{name: str(value) for name, value in row.items()}}
    model = model_of(text, int(row["layers"]))
    if row.get("act_ckpt"):
        checkpoint_blocks(model)
    reduced = torch.float32 if "precision" in row else torch.bfloat16
    training = Training(
        torch.bfloat16, reduced, num_backwards=int(row.get("grad_accum", 1)), is_compiled="compile" in row
    )
    sample = torch.empty(row["micro_batch"], row["seq"], dtype=torch.int64, device="meta")
    profile = Profile(model, sample, device=run.device, training=training, loss_of=loss_of, rates=SHIPPED)
    cluster = cluster_of(
        run.device, run.num_ranks, ranks_per_host=run.ranks_per_host, between_hosts=run.network, profile=SHIPPED
    )
    name = "hybrid(8)" if run.sharding == "hybrid" else run.sharding
    return profile.given(cluster, name)


@pytest.mark.parametrize("row", ROWS)
def test_what_is_fitted_is_what_plan_and_simulate_predict(row, tmp_path):
    (run,) = read_runs(table_of([row], tmp_path / "runs.tsv"))
    assert predicted_s(run, SHIPPED.values) == pytest.approx(simulated(row, run).step_s, rel=1e-3)


@given(
    flops=st.integers(0, 10**15),
    more_flops=st.integers(0, 10**15),
    num_bytes=st.integers(1, 10**12),
    more=st.integers(0, 10**12),
    name=st.sampled_from(["aten.mm", "aten._scaled_dot_product_flash_attention", "aten.add"]),
    device=st.sampled_from(sorted(DEVICES)),
)
def test_times_are_above_zero_and_more_work_takes_no_less(flops, more_flops, num_bytes, more, name, device):
    def seconds(flops, num_bytes):
        return work_of([Op(name, flops, num_bytes, torch.float16)], DEVICES[device], SHIPPED).total_s

    assert 0 < seconds(flops, num_bytes) <= seconds(flops + more_flops, num_bytes + more)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "keep", "full", "hybrid(8)", "split(2)"])
def test_computation_beside_collectives_loses_a_part_of_their_time(strategy):
    model = ModelCosts((unit_of(), unit_of()), num_backwards=3)
    (quiet, *_), (busy, *_) = (
        options_of(
            model,
            [strategy] * 2,
            dataclasses.replace(cluster_of(A100, 16, profile=SHIPPED), interference=part, stragglers=0.0),
        )
        for part in (0.0, 0.25)
    )
    gathers_s = (quiet.gather_s + 2 * quiet.gather_again_s) / 3 + quiet.forward_comm_s
    reductions_s = (quiet.reduce_s + 2 * quiet.reduce_early_s) / 3 + quiet.backward_comm_s + quiet.gather_backward_s
    assert busy.forward_s == pytest.approx(quiet.forward_s + 0.25 * gathers_s, rel=1e-12)
    assert busy.backward_s == pytest.approx(quiet.backward_s + 0.25 * reductions_s, rel=1e-12)
    assert busy.forward_s + busy.backward_s > quiet.forward_s + quiet.backward_s


def test_of_more_devices_the_slowest_is_slower_and_computes_alone_as_fast_as_one():
    model = ModelCosts((unit_of(),))
    for num_ranks in (1, 8, 1024):
        cluster = dataclasses.replace(cluster_of(A100, num_ranks, profile=SHIPPED), interference=0.0)
        (option,) = options_of(model, ["ddp"], cluster)
        slowest = 1 + SHIPPED.values["stragglers"] * math.log2(num_ranks)
        assert option.forward_s == pytest.approx(slowest)
        assert option.backward_s == pytest.approx(2 * slowest)


@given(num_hosts=st.integers(2, 300), more=st.integers(0, 300), num_bytes=st.floats(1e3, 1e11))
def test_among_more_hosts_nothing_is_faster(num_hosts, more, num_bytes):
    few, many = (cluster_of(A100, 8 * hosts, profile=SHIPPED) for hosts in (num_hosts, num_hosts + more))
    for name in ("all_gather_s", "reduce_scatter_s"):
        assert getattr(few, name)(num_bytes, few.num_ranks) <= getattr(many, name)(num_bytes, many.num_ranks)
    assert few.all_reduce_s(num_bytes) <= many.all_reduce_s(num_bytes)
    assert few.all_gather_s(num_bytes, 8) <= few.all_gather_s(num_bytes, few.num_ranks)


@given(
    st.lists(st.tuples(st.floats(1e-5, 1e-2), st.integers(1, 4000)), min_size=2, max_size=4),
    st.integers(1, 8),
    st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_the_solver_finds_the_shortest_step_with_a_profile_too(drawn, num_hosts, num_backwards):
    units = tuple(
        UnitCosts(f"u{i}", (ParamCosts(f"p{i}", 1024, numel, gather_itemsize=2, grad_itemsize=2),), time_s, 2 * time_s)
        for i, (time_s, numel) in enumerate(drawn)
    )
    model, cluster = ModelCosts(units, num_backwards=num_backwards), cluster_of(H100, 8 * num_hosts, profile=SHIPPED)
    known = tuple(map(Strategy.of, ("ddp", "zero2", "full")))
    choices = list(itertools.product(known, repeat=len(units)))
    peaks = [peak_bytes(model, each, cluster) for each in choices]
    limit = sorted(peaks)[len(peaks) // 2]
    best = min(step_time(model, each, cluster) for each, peak in zip(choices, peaks, strict=True) if peak <= limit)
    solution = solve(model, cluster, known, limit, tolerance=0.0)
    assert step_time(model, solution.strategies, cluster) == pytest.approx(best, rel=1e-9)
    assert solution.certificate.gap == 0


def runs_of(tmp_path):
    rows = [
        {**ROW, "id": f"{gpu} {ranks} {batch} {seq}", "gpu": gpu, "n_gpus": ranks, "micro_batch": batch, "seq": seq,
         "d_model": 1024, "heads": 8, "source": f"of {gpu}"}
        for gpu, ranks, batch, seq in itertools.product(
            ("a100-80g", "h100-80g"), (8, 16, 64, 512), (1, 16), (128, 2048)
        )
    ]  # fmt: skip
    return read_runs(table_of(rows, tmp_path / "runs.tsv"))


def test_constants_are_found_again_that_made_the_runs(tmp_path):
    factors = {
        "product.a100": 0.93, "attention.h100": 1.1, "memory": 0.92, "between": 0.9, "copies": 1.6, "stragglers": 2.0,
    }  # fmt: skip
    truth = {name: constant.value * factors.get(name, 1.0) for name, constant in PRIORS.items()}
    runs = [dataclasses.replace(run, seconds=predicted_s(run, truth)) for run in runs_of(tmp_path)]
    before, after = (np.abs(errors_of(runs, constants)).mean() for constants in (PRIORS, fitted(runs, PRIORS)))
    assert before > 0.04
    assert after < before / 5


def test_few_runs_move_few_constants_and_say_how_far_they_are_known(tmp_path):
    run = next(run for run in runs_of(tmp_path) if run.name == "a100-80g 8 16 2048")
    runs = [dataclasses.replace(run, seconds=1.15 * predicted_s(run, SHIPPED.values))]
    found = calibrated(runs, SHIPPED, "one run")
    assert abs(errors_of(runs, found.constants)[0]) < 0.14
    for name in ("product.h100", "attention.h100", "between", "contention", "fused"):
        assert found.constants[name].value == pytest.approx(SHIPPED.values[name])
        assert found.constants[name].uncertainty == pytest.approx(SHIPPED.constants[name].uncertainty, rel=1e-3)
    assert found.constants["memory"].value < SHIPPED.values["memory"]
    for name, constant in found.constants.items():
        assert constant.uncertainty <= SHIPPED.constants[name].uncertainty * (1 + 1e-6)


def test_a_profile_is_read_as_it_was_written_and_anything_else_refused(tmp_path):
    path = tmp_path / "profile.json"
    SHIPPED.save(path)
    assert Rates.load(path) == SHIPPED
    text = path.read_text()
    for wrong, message in (
        ("{", "must be a profile as JSON, but reading it says"),
        ('{"schema": 0}', "must be a profile of schema 2"),
        (text.replace('"copies"', '"other"'), "but 'copies' is missing or unknown"),
        (text.replace('"value": ', '"value": -'), "must be a finite number above 0"),
        (text.replace('"unit"', '"kind"'), "is unknown"),
    ):
        path.write_text(wrong)
        with pytest.raises(PlanError, match=message) as raised:
            Rates.load(path)
        assert str(path) in str(raised.value)


def test_the_shipped_constants_are_few_and_each_has_a_reason_and_an_uncertainty():
    assert len(SHIPPED.constants) <= 14
    for name, constant in SHIPPED.constants.items():
        prior = PRIORS[name]
        assert (constant.prior, constant.spread, constant.unit, constant.reason) == (
            prior.prior, prior.spread, prior.unit, prior.reason
        )  # fmt: skip
        assert constant.reason
        assert 0 < constant.uncertainty <= constant.spread
    every = {each.source: each for each in SHIPPED.misses}["all"]
    assert every.mean <= 0.10
    assert every.p90 <= 0.22


def test_a_family_without_runs_has_what_is_known_of_it_or_the_mean_of_the_others():
    of = SHIPPED.of_family
    for name in ("product", "attention"):
        low, high = sorted((of(name, A100), of(name, H100)))
        assert low < of(name, DEVICES["l40s"]) < high
        assert of(name, DEVICES["mi300x"]) == OTHER_FAMILIES[f"{name}.mi300x"].value < low
        assert of(name, DEVICES["h200"]) == of(name, H100)


def test_predictions_for_a_family_without_runs_are_less_certain_until_there_are_some(tmp_path):
    shipped, device = SHIPPED.spread, DEVICES["mi300x"]
    assert SHIPPED.spread_on(A100) == SHIPPED.spread_on(DEVICES["h200"]) == shipped
    unseen = SHIPPED.spread_on(device)
    assert unseen.steps.low < shipped.steps.low < shipped.steps.high < unseen.steps.high
    assert unseen.steps.high / unseen.steps.low < 2.5
    assert "none of them on mi300x: calibrate" in cluster_of(device, 8, profile=SHIPPED).source
    assert "none of them" not in cluster_of(A100, 8, profile=SHIPPED).source
    rows = [{**ROW, "gpu": "mi300x", "d_model": 2048, "heads": 16, "seq": 1024, "micro_batch": n} for n in (2, 4, 8)]
    truth = {**SHIPPED.values, "product.mi300x": 0.6, "attention.mi300x": 0.25}
    made = read_runs(table_of(rows, tmp_path / "runs.tsv"))
    found = calibrated([dataclasses.replace(run, seconds=predicted_s(run, truth)) for run in made], SHIPPED, "mine")
    assert set(found.constants) - set(PRIORS) == {"product.mi300x", "attention.mi300x"}
    assert found.of_family("product", device) == pytest.approx(0.6, rel=0.1)
    assert found.of_family("product", A100) == pytest.approx(SHIPPED.of_family("product", A100), rel=1e-6)
    assert found.spread_on(device).steps.high < unseen.steps.high
    assert "none of them" not in cluster_of(device, 8, profile=found).source
    found.save(tmp_path / "mine.json")
    assert Rates.load(tmp_path / "mine.json") == found
    with pytest.raises(PlanError, match=r"'product.abacus' is missing or unknown"):
        Rates({**PRIORS, "product.abacus": PRIORS["memory"]})


def test_the_shipped_interval_holds_most_of_each_source_that_it_did_not_see():
    covered = SHIPPED.spread.covered.values()
    assert len(covered) == SHIPPED.spread.num_sources == 4
    assert np.mean(list(covered)) >= 0.8
    assert min(covered) >= 0.6
    assert SHIPPED.spread.steps.high / SHIPPED.spread.steps.low < 1.5
