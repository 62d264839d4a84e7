"""Devices at hand, measured as a profile: all ranks agree, and what is planned with it takes what was measured."""

import json
from dataclasses import replace

import pytest
import torch
from torch.distributed import init_device_mesh

import dshard
from benchmarks.calibration import measuring
from dshard.cli import main
from dshard.cli.models import GPT, GPTConfig
from dshard.planner import Cluster, Link, Links, Rates, Training, cluster_of, published
from dshard.planner.flops import Op
from dshard.planner.rates import HERE, Here
from dshard.testing import WorldPool

SMALL = {"cpu": ((16, 32, 16), (64, 16, 16))}


@pytest.fixture
def is_quick(monkeypatch):
    make_quick(monkeypatch)


def make_quick(patch):
    patch.setattr(measuring, "_SHAPES", SMALL)
    patch.setattr(measuring, "_LENGTHS", {"cpu": (16, 32)})
    patch.setattr(measuring, "_COPIED", {"cpu": (1 << 10, 1 << 12)})
    patch.setattr(measuring, "_ROUNDS", 1)


def measured_by_rank():
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        patch.setattr(measuring, "measure_links", lambda mesh, again: known_links(mesh.size()))
        found = measuring.measure_here(torch.device("cpu"), published(), init_device_mesh("cpu", (2,)))
    return found.rates, found.reached


def known_links(num_ranks):
    own = Links.of(Link(1e-4, 1e-9), in_place=Link(1e-6, 1e-12))
    return Cluster(num_ranks, num_ranks, own, overlaps=False, shards={num_ranks: own}, source="measured")


def test_all_ranks_get_the_rates_of_the_slowest_and_the_links(worlds: WorldPool):
    (rates, reached), other = worlds.run(2, measured_by_rank)
    assert (rates, reached) == other
    assert rates.here is not None
    assert rates.here.cluster == replace(known_links(2), memory_bytes=rates.here.device.limit_bytes)
    assert set(reached) == {
        *(f"{what} {dtype}" for what in ("products", "attention") for dtype in ("float32", "bfloat16")), "memory"
    }  # fmt: skip
    assert all(0 < each.per_s < float("inf") and each.uncertainty >= 0 for each in reached.values())


def test_what_a_profile_predicts_here_is_what_was_measured(is_quick):
    found = measuring.measure_here(torch.device("cpu"), published())
    rates, here = found.rates, found.rates.here
    assert here.cluster is None
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        product = rates.seconds(here.device, [Op("aten.mm", 10**12, 0, dtype)])
        assert product == pytest.approx(1e12 / found.reached[f"products {name}"].per_s)
    traffic = rates.seconds(here.device, [Op("aten.add", 0, 10**9, torch.float32)])
    assert traffic == pytest.approx(1e9 / found.reached["memory"].per_s)


def test_a_profile_with_devices_is_kept_and_planned_with(is_quick, tmp_path):
    found = measuring.measure_here(torch.device("cpu"), published())
    here = Here(replace(found.rates.here.device, per_host=2), known_links(2))
    rates, path = replace(found.rates, here=here), tmp_path / "here.json"
    rates.save(path)
    assert Rates.load(path) == rates
    record = json.loads(path.read_text())
    del record["here"]
    path.write_text(json.dumps(record))
    assert Rates.load(path) == replace(rates, here=None)
    assert cluster_of(here.device, 2, profile=rates) == here.cluster
    more = cluster_of(here.device, 4, profile=rates)  # by the rates, as no links were measured among so many
    assert more.num_ranks == 4
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=16, num_layers=2, width=32, num_heads=2))
    sample = torch.zeros(2, 16, dtype=torch.int64)
    given = {"device": here.device, "profile": rates, "memory": "1GiB", "training": Training()}
    plan = dshard.plan(model, sample, cluster=cluster_of(here.device, 2, profile=rates), **given)
    assert plan.cluster == here.cluster


def test_the_command_measures_and_its_profile_is_taken(is_quick, tmp_path, capsys):
    path = tmp_path / "here.json"
    measuring.main(["--out", str(path)])
    assert "| products float32 |" in capsys.readouterr().out
    options = ["--world", "1", "--device", HERE, "--dtype", "float32", "--sequence", "16"]
    assert main(["plan", "gpt-nano", *options, "--profile", str(path)]) == 0
    assert "the step is bound by" in capsys.readouterr().out
