"""Errors of functions that programs pass, and of arguments that mean nothing, name the argument."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dshard
from dshard.planner import cluster_of
from dshard.planning.links import measure_links
from dshard.testing import WorldPool, expect_error


def net() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))


def fail(*_: Any, **__: Any) -> Any:
    raise LookupError("of the program's own")


def fail_module(module: nn.Module) -> bool:
    raise LookupError("of the program's own")


def fail_numel(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    raise LookupError("of the program's own")


def plan(sample: Any, **options: Any) -> Any:
    return dshard.plan(net(), sample, cluster=cluster_of("a100-40g", 8), device="a100-40g", **options)


IDS = torch.zeros(2, 3, dtype=torch.int64)


def call(name: str, folder: Path) -> None:
    model = dshard.fully_shard(net())
    dshard.save_safetensors(model, folder / "model.safetensors")
    {
        "shard_placement_fn": lambda: dshard.fully_shard(net(), shard_placement_fn=fail),
        "auto_wrap_policy": lambda: dshard.fully_shard(net(), auto_wrap_policy=fail_module),
        "auto_wrap_policy by numel": lambda: dshard.fully_shard(net(), auto_wrap_policy=fail_numel),
        "rename": lambda: dshard.load_safetensors(model, folder / "model.safetensors", rename=fail),
        "loss_of": lambda: plan(IDS, loss_of=fail),
        "a vector": lambda: plan(IDS, loss_of=lambda out: out),
        "no tensor": lambda: plan(IDS, loss_of=lambda out: 1.0),
        "sample_input": lambda: plan(torch.zeros(2, 3)),
        "mp_policy": lambda: dshard.fully_shard(net(), mp_policy={"nothing.like.this": torch.bfloat16}),
        "patterns": lambda: dshard.fully_shard(net(), mp_policy={"*.scale": torch.bfloat16}),
        "runs": lambda: dshard.run_by_some(model, runs=fail)(lambda: None)(),
    }[name]()


WORDS = {
    "shard_placement_fn": "shard_placement_fn must be a function that can be called as documented, but it raised for "
    "0.weight: LookupError",
    "auto_wrap_policy": "auto_wrap_policy must be a function that can be called as documented, but it raised for a "
    "Embedding: LookupError",
    "auto_wrap_policy by numel": "auto_wrap_policy must be a function that can be called as documented, but it raised "
    "for a Sequential: LookupError",
    "rename": "rename must be a function that can be called as documented, but it raised for '0.weight': LookupError",
    "loss_of": "loss_of must be a function that can be called as documented, but it raised: LookupError",
    "a vector": "loss_of must return a tensor of one element, but it returned a tensor of shape (2, 3, 8)",
    "no tensor": "loss_of must return a tensor of one element, but it returned a float",
    "sample_input": "sample_input must be what a forward and backward of the model run on",
    "mp_policy": "a pattern of mp_policy must match the name of a parameter, but 'nothing.like.this' matches none of",
    "patterns": "a pattern of mp_policy must match the name of a parameter, but '*.scale' matches none of",
    "runs": "run_by_some: runs must be a function that can be called as documented, but it raised: LookupError",
}


@pytest.mark.parametrize("name", WORDS)
def test_the_argument_is_named(worlds: WorldPool, name, tmp_path):
    for _, text in expect_error(worlds.get_world(1), call, name, tmp_path):
        assert WORDS[name] in text


def measured(path: Path, broken: str) -> tuple[bool, bool]:
    """Whether a broken file of link rates was measured anew, and is whole again."""
    mesh = init_device_mesh("cpu", (2,))
    once = measure_links(mesh, sizes=(1 << 12, 1 << 14), num_rounds=1, path=path)
    if dist.get_rank() == 0:
        record = json.loads(path.read_text())
        record["seconds"][0][0][0] = float(broken)
        path.write_text(json.dumps(record))
    dist.barrier()
    again = measure_links(mesh, sizes=(1 << 12, 1 << 14), num_rounds=1, path=path)
    values = torch.tensor(json.loads(path.read_text())["seconds"])[0, :3]
    return once.num_ranks == again.num_ranks, bool((values.isfinite() & (values > 0)).all())


@pytest.mark.parametrize("broken", ["nan", "inf", "0", "-1"])
def test_a_damaged_file_of_link_rates_is_measured_anew(worlds: WorldPool, broken, tmp_path):
    assert worlds.run(2, measured, tmp_path / "links.json", broken) == [(True, True)] * 2


def out_of_memory(_: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_memory_that_runs_out_in_a_function_is_passed_on(worlds: WorldPool):
    for kind, _ in expect_error(worlds.get_world(1), plan, IDS, loss_of=out_of_memory):
        assert kind == "OutOfMemoryError"
