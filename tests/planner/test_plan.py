"""Plans: kept as JSON whole, explained, compared with what a step took, and planned again from it."""

import errno
import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dshard
from dshard.cli.models import GPT, GPTConfig
from dshard.errors import ArgumentError, PlanError
from dshard.planner import (
    Cluster,
    Link,
    Links,
    Measured,
    ModelCosts,
    ParamCosts,
    Plan,
    UnitCosts,
    cluster_of,
    files,
    peak_bytes,
    solve,
)
from dshard.planner.texts import bytes_text, number_text, seconds_text
from dshard.policies import Strategy
from tests.planner.cases import STRATEGIES
from tests.planner.cases import clusters as cluster_cases
from tests.planner.cases import models as model_cases

seconds = st.floats(0, 10, allow_nan=False)
sizes = st.integers(0, 1 << 40)
names = st.text(st.characters(codec="utf-8"), max_size=8)
links = st.builds(Link, seconds, seconds, seconds, source=names)
triples = st.builds(Links, links, links, links)
params = st.builds(ParamCosts, names, sizes, sizes, can_split=st.booleans())
units = st.builds(
    UnitCosts, names, st.lists(params, max_size=2).map(tuple), seconds, seconds, sizes, sizes, sizes, source=names
)
models = st.builds(
    ModelCosts, st.lists(units, min_size=1, max_size=3).map(tuple), st.integers(1, 64), buffer_bytes=sizes
)
clusters = st.builds(
    Cluster,
    st.just(8),
    st.sampled_from([4, 8]),
    triples,
    triples,
    sizes,
    st.booleans(),
    st.dictionaries(st.sampled_from([2, 4, 8]), triples),
)
KNOWN_TEXTS = ("ddp", "zero1", "zero2", "keep", "full", "hybrid(8)", "hybrid(8, keep)", "split(2)", "split(4)", "plan")
KNOWN = tuple(map(Strategy.of, ("ddp", "zero2", "keep", "full", "hybrid(4)", "split(2, hybrid(4))")))


@st.composite
def plans(draw):
    model = draw(models)
    chosen = draw(st.lists(st.sampled_from(KNOWN), min_size=len(model.units), max_size=len(model.units)))
    return Plan(model, draw(clusters), tuple(chosen), draw(st.sampled_from([(), KNOWN])), flops=draw(seconds))


@given(plans())
def test_a_plan_is_the_same_after_json(plan):
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()


def memory_between(share):
    """A limit that lies between what all full and all ddp take, as a function of model and cluster."""

    def limit(model, cluster):
        low, high = (peak_bytes(model, [name] * len(model.units), cluster) for name in ("full", "ddp"))
        return low + int((high - low) * share)

    return limit


def small(limit=None, num_units=4, names=("ddp", "full")):
    """A plan of some units that communicate longer than they compute."""
    unit = UnitCosts("unit", (ParamCosts("w", 1 << 10, 1 << 10, can_split=True),), 0.01, 0.02, 1 << 20)
    named = (
        replace(unit, name=f"layers.{i}", params=(replace(unit.params[0], name=f"layers.{i}.w"),))
        for i in range(num_units)
    )
    model = ModelCosts(tuple(named), batch_size=4)
    cluster = Cluster(8, 8, Links.of(Link(1e-4, 1e-8)), memory_bytes=1 << 30, source="given by hand")
    limit = cluster.memory_bytes if limit is None else limit(model, cluster)
    solution = solve(model, cluster, names, limit)
    return Plan(model, cluster, solution.strategies, tuple(map(Strategy.of, names)), solution.certificate, 1e9)


def test_json_keeps_the_certificate_and_the_predictions(tmp_path):
    plan = small()
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert (again.step_s, again.peak_bytes, again.certificate) == (plan.step_s, plan.peak_bytes, plan.certificate)
    assert plan.certificate.step_s == pytest.approx(plan.step_s)
    assert plan.certificate.peak_bytes == plan.peak_bytes


@pytest.mark.parametrize("kinds", [[], [{"checkpointing": "bogus", "is_offloaded": False}]])
def test_kinds_of_the_fastest_choice_that_are_none_are_refused(kinds):
    record = json.loads(small().to_json())
    record["certificate"]["fastest_kinds"] = kinds * len(record["model"]["units"])
    with pytest.raises(dshard.PlanError, match="one of none, selective, full for each of the"):
        Plan.from_json(json.dumps(record))


def choosing(**more):
    """One whose units have alternatives, and parts of time."""
    with torch.device("meta"):
        model = GPT(GPTConfig(16, 2, 32, 4, 64))
    given = {"cluster": cluster_of("a100-80g", 8, profile="published"), "device": "a100-80g", "profile": "published"}
    return dshard.plan(model, torch.zeros(2, 16, dtype=torch.int64), **given, checkpointing="auto", **more)


@pytest.mark.parametrize("offload", ["none", "all"])
def test_a_plan_with_choices_is_the_same_after_json(offload):
    plan = choosing(offload=offload)
    assert Plan.from_json(plan.to_json()) == plan


def broken(change):
    record = json.loads(small().to_json())
    change(record)
    return json.dumps(record)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan: must be a plan as JSON, but reading it says"),
        ("[]", "plan: must be a plan as JSON, but it is none: a plan has the field 'schema'"),
        (broken(lambda r: r.update(cluster=[])), "plan.cluster: must be an object"),
        (
            broken(lambda r: r.update(schema=6)),
            "must be a plan of schema 10, but it is of 6. Plan again",
        ),
        (broken(lambda r: r.update(schema=0)), "plan: must be a plan of schema [0-9]+, but it is of 0"),
        (broken(lambda r: r.update(colour="red")), "plan: must have the fields .* but 'colour' is unknown"),
        (broken(lambda r: r.pop("model")), "but 'model' is missing"),
        (
            broken(lambda r: r["model"]["units"][1].update(name=3)),
            r"plan.model.units\[1\].name: must be str, but it is 3",
        ),
        (
            broken(lambda r: r["model"]["units"][0]["params"][0].update(x=1)),
            r"units\[0\].params\[0\]: .* 'x' is unknown",
        ),
        (broken(lambda r: r.update(strategies=["full"])), "needs a strategy for each of the 4 units, but it has 1"),
        (broken(lambda r: r.update(strategies="full")), "plan.strategies: must be a list, but it is 'full'"),
        (broken(lambda r: r["cluster"].update(shards=[])), "plan.cluster.shards: must be an object"),
        (broken(lambda r: r.update(flops="many")), "plan.flops: must be float, but it is 'many'"),
    ],
)
def test_json_that_is_no_plan_is_refused_by_the_name_of_the_field(text, message):
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "^{path}: must be a plan as JSON, but there is no such file. Pass a path that exists.$"),
        (b"", "^{path}: must be a plan as JSON, but reading it says: Expecting value"),
        (b"\x80\xff", "^{path}: must be a plan as JSON, but it is no text"),
        (b'{"format": 1}', "^{path}: must be a plan as JSON, but it is none: a plan has the field 'schema'"),
        (b'{"schema": 0}', "^{path}: must be a plan of schema [0-9]+, but it is of 0. Plan again with this version.$"),
        (broken(lambda r: r.update(flops="many")).encode(), "^{path}: flops: must be float, but it is 'many'"),
    ],
)
def test_a_file_that_holds_no_plan_is_refused_by_its_path(tmp_path, content, message):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError, match=message.format(path=re.escape(str(path)))):
        Plan.load(path)


def test_a_file_that_cannot_be_written_is_refused_by_its_path(tmp_path):
    with pytest.raises(PlanError, match=f"^{re.escape(str(tmp_path))}: must be a file that can be written, but"):
        small().save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_can_be_written_to_what_is_no_file_and_through_a_link(tmp_path):
    (tmp_path / "null").symlink_to("/dev/null")
    small().save(tmp_path / "null")
    assert (tmp_path / "null").is_char_device()
    (tmp_path / "link.json").symlink_to("plan.json")
    small().save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert Plan.load(tmp_path / "plan.json") == small()


def test_a_failed_write_leaves_the_plan_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    small().save(path)
    before = path.read_bytes()

    def full_disk(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full_disk)
    with pytest.raises(PlanError, match="No space left on device"):
        small(num_units=2).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_table_names_strategies_bytes_and_the_certificate():
    plan = small()
    text = plan.explain()
    assert "layers.0 .. 3 (4 alike)" in text
    assert "ranks: 8 on 1 host; batch: 4 per rank" in text
    assert f"peak: {bytes_text(plan.peak_bytes)} of 1 GiB" in text
    assert f"certificate: {plan.certificate}" in text
    assert "links: given by hand" in text
    assert set(plan.by_parameter) == {f"layers.{i}.w" for i in range(4)}
    assert tuple(plan.by_parameter.values()) == plan.strategies


def rows_of(text):
    """Cells of the table of choices, by their names; columns are apart by two blanks."""
    lines = text.split("\nchoice ")[1].split("\n\n")[0].splitlines()
    cells = (re.split(r"\s{2,}", line.strip()) for line in lines[1:])
    return re.split(r"\s{2,}", lines[0].strip()), {first: rest for first, *rest in cells}


def test_the_plan_is_beside_every_single_strategy_with_what_it_would_cost():
    plan = small(memory_between(0.5), names=("ddp", "keep", "full"))
    assert len(set(plan.strategies)) > 1
    head, rows = rows_of(plan.explain())
    assert head == ["step", "vs plan", "waits", "samples/s", "peak", "vs plan", "fits"]
    assert set(rows) == {"this plan", "ddp", "keep", "full"}
    step, waits, samples, peak, fits = rows.pop("this plan")
    assert (step, samples, fits) == (seconds_text(plan.step_s), number_text(plan.samples_per_s), "yes")
    assert (waits, peak) == (f"{plan.exposed_s / plan.step_s:.1%}", bytes_text(plan.peak_bytes))
    for name, (step, slower, waits, samples, peak, more, fits) in rows.items():
        single = replace(plan, strategies=(Strategy(name),) * 4)
        assert (step, samples) == (seconds_text(single.step_s), number_text(single.samples_per_s))
        assert slower == f"{single.step_s / plan.step_s - 1:+.1%}"
        assert waits == f"{single.exposed_s / single.step_s:.1%}"
        difference = single.peak_bytes - plan.peak_bytes
        assert peak == bytes_text(single.peak_bytes)
        assert more == f"{'+' if difference > 0 else ''}{bytes_text(difference)}"
        assert fits == ("yes" if single.peak_bytes <= plan.certificate.limit_bytes else "no")
    assert {row[-1] for row in rows.values()} == {"yes", "no"}


def test_a_plan_of_one_strategy_stands_in_its_row_and_the_fastest_choice_above_it():
    full = replace(small(), strategies=(Strategy("full"),) * 4)
    certificate = full.certificate
    preferred = replace(certificate, step_s=full.step_s, peak_bytes=full.peak_bytes, margin=1.0)
    _, rows = rows_of(replace(full, certificate=preferred).explain())
    assert list(rows) == ["ddp", "full (this plan)"]  # in order of their steps; all ddp is the fastest
    mixed = (Strategy("ddp"), Strategy("ddp"), Strategy("ddp"), Strategy("full"))
    _, rows = rows_of(replace(full, certificate=replace(preferred, fastest=mixed)).explain())
    assert set(rows) == {"ddp", "full (this plan)", "fastest: 3 ddp, 1 full"}
    assert rows["fastest: 3 ddp, 1 full"][0] == seconds_text(replace(full, strategies=mixed).step_s)


def test_a_plan_that_was_given_is_beside_the_five_single_strategies():
    plan = replace(small(), candidates=(), certificate=None)
    _, rows = rows_of(plan.explain())
    assert set(rows) == {"ddp (this plan)", "zero1, zero2", "keep", "full"}  # two that take the same


def test_tokens_per_second_are_told_where_a_sample_has_tokens():
    plan = small()
    assert "tokens/s" not in plan.explain()
    assert plan.tokens_per_s is None
    with_tokens = replace(plan, model=replace(plan.model, tokens_per_sample=1000))
    assert with_tokens.tokens_per_s == plan.samples_per_s * 1000
    text, rates = with_tokens.explain(), (with_tokens.samples_per_s, with_tokens.tokens_per_s)
    assert f"rate: {number_text(rates[0])} samples/s; {number_text(rates[1])} tokens/s" in text
    head, rows = rows_of(text)
    assert head[3] == "tokens/s"
    assert rows["ddp (this plan)"][2] == number_text(with_tokens.tokens_per_s)


@given(model_cases(4), cluster_cases(), st.data())
def test_categories_add_up_to_the_peak(model, cluster, data):
    chosen = tuple(Strategy.of(data.draw(st.sampled_from(STRATEGIES))) for _ in model.units)
    parts = Plan(model, cluster, chosen).memory_at_peak
    assert sum(parts.by_category.values()) == parts.num_bytes == Plan(model, cluster, chosen).peak_bytes
    assert min(parts.by_category.values()) >= 0
    assert parts.by_category["buffers and inputs"] == model.buffer_bytes


@pytest.mark.parametrize(("name", "share"), [("ddp", 1), ("zero1", 8), ("keep", 8), ("full", 8)])
def test_the_peak_is_told_by_category(name, share):
    """Four units of a matrix of 4 MiB, on 8 ranks; the optimizer steps at the peak, or a backward runs."""
    matrix, activation = 4 << 20, 1 << 20
    plan = replace(small(), strategies=(Strategy(name),) * 4)
    parts = plan.memory_at_peak
    found = parts.by_category
    assert found["parameters"] == 4 * matrix // share
    assert found["optimizer"] >= 4 * (2 * matrix // share)
    assert found["optimizer"] < 4 * (2 * matrix // share) + 64
    assert found["activations"] % activation == 0
    if parts.phase == "step":
        assert found["activations"] == 0
    copies = found["copies and communication"]
    if name == "zero1":
        assert copies >= 4 * matrix  # whole copies that stay
    if name == "keep" and parts.phase != "step":
        assert copies >= (parts.unit + 1) * matrix  # of the units whose backward is to come
    text = plan.explain()
    for category, num_bytes in found.items():
        assert (f"{category} {bytes_text(num_bytes)}" in text) == (num_bytes > 0)
    assert f"in the {parts.phase} of layers.{parts.unit}" in text


def test_the_text_is_readable_on_a_terminal():
    plan = small(memory_between(0.3), names=("ddp", "zero1", "keep", "full", "split(4)"), num_units=60)
    long = "a_model.with_long.names_of.modules_and_more.and_more."
    given = enumerate(plan.model.units)
    units = [replace(unit, name=f"{long}{unit.name}", forward_s=unit.forward_s * (1 + i)) for i, unit in given]
    model = replace(plan.model, units=tuple(units), tokens_per_sample=4096, source="traced, a100-40g")
    lines = replace(plan, model=model).explain().splitlines()
    assert max(map(len, lines)) <= 120
    assert len(lines) < 70
    assert any("20 more units" in line for line in lines)


def test_a_report_says_by_how_much_the_prediction_was_wrong():
    plan = small()
    report = plan.compared(Measured(plan.step_s * 2, plan.peak_bytes // 2))
    assert report.step_error == pytest.approx(-0.5)
    assert report.peak_error == pytest.approx(1, rel=1e-6)
    assert "error -50.0%" in str(report)
    assert "error +100.0%" in str(report)
    assert plan.compared(Measured(1.0)).peak_error is None
    assert "peak" not in str(plan.compared(Measured(1.0)))


def test_planning_again_fits_what_was_measured_and_keeps_the_limit():
    plan = small()
    assert {str(strategy) for strategy in plan.strategies} == {"ddp"}  # all of it fits
    more = (1 << 30) + plan.peak_bytes // 4
    again = plan.replanned(Measured(plan.step_s * 3, more))
    assert again.certificate.limit_bytes == plan.certificate.limit_bytes
    assert again.peak_bytes <= plan.certificate.limit_bytes
    assert Strategy("full") in again.strategies  # for what was measured takes more than there is
    same = plan.replanned(Measured(plan.step_s * 3, plan.peak_bytes))
    assert same.strategies == plan.strategies
    assert same.step_s == pytest.approx(plan.step_s * 3)
    assert plan.replanned(Measured(plan.step_s), memory_bytes=100 << 20).peak_bytes <= 100 << 20
    assert plan.replanned(Measured(plan.step_s), memory_bytes="100MiB").certificate.limit_bytes == 100 << 20
    with pytest.raises(ArgumentError, match=r"memory_bytes must be .* bytes above 0, .* but it is 'much'"):
        plan.replanned(Measured(plan.step_s), memory_bytes="much")
    with pytest.raises(PlanError, match="only what was planned can be planned again"):
        replace(plan, candidates=()).replanned(Measured(1.0))


def test_a_plan_draws_its_timeline(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "timeline.png"
    small().plot(path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1 MiB"), (int(1.5 * 2**30), "1.5 GiB")]
)
def test_bytes_are_told_in_powers_of_1024(num_bytes, text):
    assert bytes_text(num_bytes) == text
