"""The table of OSDP's families is that of the committed result, and OSDP's rule does what the docs say of it."""

import itertools
import json
import random
from pathlib import Path

import pytest

from benchmarks import osdp_families as families
from dshard.planner import EFFICIENCY, Cluster, Link, Links, ModelCosts, ParamCosts, UnitCosts, peak_bytes

REPO = Path(__file__).parents[2]
MB = 2**20
CLUSTER = Cluster(8, 8, Links.of(Link(1e-5, 1e-10)), keeps_received_rows=False)


def unit(name, num_mb):
    weight = ParamCosts(f"{name}.weight", length=1024, index_numel=num_mb * MB // 4096)
    return UnitCosts(name, (weight,), forward_s=1e-3, backward_s=2e-3)


def model(*blocks_mb):
    blocks = (unit(f"blocks.{i}", num_mb) for i, num_mb in enumerate(blocks_mb))
    return ModelCosts((unit("tokens", 8), *blocks))


def test_the_committed_result_is_of_these_models_and_its_table_is_in_the_docs():
    content = json.loads((REPO / "benchmarks" / "results" / "osdp_families.json").read_text())
    assert content["efficiency"] == EFFICIENCY.source
    assert content["batches"] == list(families.BATCHES)
    named = [(row["model"], row["limit_bytes"]) for row in content["rows"]]
    assert named == list(itertools.product(families.MODELS, families.LIMITS))
    assert families.table(content) in (REPO / "docs" / "planner.md").read_text()


def test_the_knapsack_is_exact():
    rng = random.Random(0)
    for _ in range(100):
        weights = [rng.randrange(0, 12) for _ in range(6)]
        gains = [rng.choice((-0.5, 0.25, 1.0, 1.7, 3.1)) for _ in weights]
        room = rng.randrange(0, 30)
        taken = families.knapsack(weights, gains, room)
        subsets = itertools.chain.from_iterable(itertools.combinations(range(6), n) for n in range(7))
        best = max(sum(gains[i] for i in s) for s in subsets if sum(weights[i] for i in s) <= room)
        assert sum(weights[i] for i in taken) <= room
        assert sum(gains[i] for i in taken) == pytest.approx(best)


@pytest.mark.parametrize(
    ("limit_mb", "strategies"),
    [
        (1024, ("keep", "ddp", "ddp")),
        (12 + 4 * 64 + 4 * 32 // 8, ("keep", "ddp", "full")),
        (12 + 4 * 64 // 8 + 4 * 32, ("keep", "full", "ddp")),
        (12 + 4 * 96 // 8, ("keep", "full", "full")),
        (12 + 4 * 96 // 8 - 1, ()),
    ],
)
def test_osdps_rule_replicates_the_blocks_that_gain_most_in_what_it_counts(limit_mb, strategies):
    choice = families.osdp_rule(model(64, 32), CLUSTER, limit_mb * MB)
    assert tuple(map(str, choice.strategies)) == strategies


def test_osdps_rule_counts_no_transients():
    costs, limit_bytes = model(64, 32), (12 + 4 * 96 // 8) * MB
    choice = families.osdp_rule(costs, CLUSTER, limit_bytes)
    assert choice.counted_bytes <= limit_bytes < peak_bytes(costs, choice.strategies, CLUSTER)
