"""Tables of what a model is cut into, held against the shards themselves."""

import html
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import dshard
from dshard.errors import StateError
from dshard.planner import cluster_of
from dshard.testing import WorldPool, fake_world
from tests.inspection.models import Net, sharded
from tests.models import ResidualMlp

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
CASES: dict[str, tuple[int, dict[str, Any], tuple[str, str, str]]] = {  # strategy, placement, dtype of a block
    "default": (2, {}, ("full", "S(0) over 2", "float32")),
    "ddp": (2, {"strategy": "ddp"}, ("ddp", "whole", "float32")),
    "zero1": (2, {"strategy": "zero1"}, ("zero1", "S(0) over 2", "float32")),
    "keep": (2, {"reshard_after_forward": False}, ("keep", "S(0) over 2", "float32")),
    "keep 2": (4, {"reshard_after_forward": 2}, ("keep 2", "S(0) over 4", "float32")),
    "hybrid": (4, {"strategy": "hybrid(2)"}, ("hybrid(2)", "S(0) over 2 x 2 replicas", "float32")),
    "mixed": (2, {"mp_policy": BF16}, ("full", "S(0) over 2", "float32 -> bfloat16, reduced in float64")),
    "columns": (2, {"shard_placement_fn": lambda p: Shard(p.ndim - 1)}, ("full", "S(0) and S(1) over 2", "float32")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_says_strategy_placement_and_dtypes(name):
    num_ranks, options, expected = CASES[name]
    with fake_world(1, num_ranks):
        model = sharded(options)
        rows = {row.label: row for row in dshard.explain(model).units}
    block = rows["blocks.1"]
    assert (block.strategy, block.placement, block.dtype) == expected
    assert block.params == tuple(f"blocks.1.{part}.{kind}" for part in ("up", "down") for kind in ("weight", "bias"))


def test_hsdp_has_replicas_and_a_split_layer_its_slices():
    with fake_world(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        (row,) = dshard.explain(dshard.fully_shard(nn.Linear(8, 8), mesh=mesh, reshard_after_forward=True)).units
        assert (row.strategy, row.placement) == ("hybrid(2)", "S(0) over 2 x 2 replicas")
        split = dshard.explain(dshard.fully_shard(nn.Linear(8, 8, bias=False), strategy="split(2)")).units
        assert [row.strategy for row in split] == ["split(2)"]


def numbers(options: dict[str, Any]) -> tuple[list[int], list[int]]:
    model = sharded(options)
    found = dshard.explain(model).units
    own = [sum(p.to_local().nbytes for p in model.parameters()), sum(p.numel() for p in model.parameters())]
    with dshard.gathered(model.head):
        gathered = [row.label for row in dshard.explain(model).units if row.is_gathered]
    assert gathered == ["head"]
    return [sum(row.here_bytes for row in found), sum(row.numel for row in found)], own


@pytest.mark.parametrize("options", [{}, {"strategy": "ddp"}, {"strategy": "zero2"}, {"mp_policy": BF16}])
def test_bytes_and_elements_are_those_of_the_shards(worlds: WorldPool, options):
    for found, own in worlds.run(4, numbers, options):
        assert found == own


def test_units_that_the_first_use_would_form_are_told_before_it():
    with fake_world(0, 2):
        model = dshard.fully_shard(nn.Sequential(*(ResidualMlp(64, 256) for _ in range(4))))
        assert [row.label for row in dshard.explain(model).units] == ["0", "1", "2", "3"]


def test_what_is_set_ignored_and_planned_is_told():
    with fake_world(0, 2):
        net = Net()
        model: Any = dshard.fully_shard(net, ignored_params=[net.head.weight])
        model.set_requires_gradient_sync(False)
        text = str(dshard.explain(model))
        assert "not sharded: head.weight" in text
        assert re.search(r": requires_sync set$", text, re.M)
        planned = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        cluster = cluster_of("a100-40g", 2)
        plan = dshard.plan(planned, torch.ones(2, 8), cluster=cluster, device="a100-40g", strategies=("full",))
        text = str(dshard.explain(dshard.fully_shard(planned, plan=plan)))
        assert f"planned: {plan}" in text


def test_a_notebook_gets_a_table_with_nothing_of_the_text_left_out():
    with fake_world(0, 2):
        told = dshard.explain(sharded({}))
    cells = [cell for row in told.units for cell in row.cells]
    assert all(cell in str(told) for cell in cells)
    assert told._repr_html_() == f"<pre>{html.escape(str(told))}</pre>"


@pytest.mark.parametrize("call", [dshard.explain, dshard.report, dshard.trace])
def test_what_is_not_sharded_is_refused(call):
    with pytest.raises(StateError, match=r"must be sharded, but no module of this Linear is. Call dshard.fully_shard"):
        call(nn.Linear(2, 2))
