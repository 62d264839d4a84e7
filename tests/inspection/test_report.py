"""Bytes by what they are for, held against tensors that are counted one by one."""

import html
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dshard
from dshard.testing import WorldPool
from tests.inspection.models import ids, sharded
from tests.tensor.extended import Int8


def counted(options: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What a report says of each category, and what it should."""
    model = sharded(options)
    optimizer = torch.optim.AdamW(model.parameters())
    found: dict[str, tuple[Any, Any]] = {}
    shards = sum(p.to_local().nbytes for p in model.parameters())
    before = dshard.report(model).num_bytes
    found["parameters"] = before["parameters"], shards
    found["no gradients"] = before["gradients"], 0
    found["no optimizer"] = before["states"], None
    found["buffers"] = before["buffers"], 20
    found["other"] = before["other"], None  # on a CPU
    (model(ids()) @ model.head.weight.t()).square().mean().backward()
    there = [p.grad.shard_storage.tensor for p in model.parameters()]
    arrived = sum(shard.nbytes for shard in there if shard is not None)
    found["gradients that are there"] = dshard.report(model).num_bytes["gradients"], arrived
    for param in model.parameters():
        param.grad.to_local()
    found["gradients"] = dshard.report(model).num_bytes["gradients"], shards
    optimizer.step()
    steps = 4 * len(optimizer.state)
    found["states"] = dshard.report(model, optimizer).num_bytes["states"], 2 * shards + steps
    found["of several"] = dshard.report(model, [optimizer]).num_bytes["states"], 2 * shards + steps
    optimizer.zero_grad()
    found["gradients that are gone"] = dshard.report(model).num_bytes["gradients"], 0
    return found


@pytest.mark.parametrize("options", [{}, {"strategy": "ddp"}, {"strategy": "zero1"}, {"reshard_after_forward": False}])
def test_each_category_has_the_bytes_of_its_tensors(worlds: WorldPool, options):
    for found in worlds.run(2, counted, options):
        assert {name: own for name, (own, _) in found.items()} == {name: right for name, (_, right) in found.items()}


class Flattened(Int8):
    """One that says what it is made of."""

    def __tensor_flatten__(self) -> Any:
        return ["ints", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, dtype: Any, size: Any, stride: Any) -> Any:
        return cls(inner["ints"], inner["scale"], dtype)


def of_subclasses() -> tuple[list[int], int]:
    """Bytes of weights that are integers and a scale each, by a report and by the table of units; and counted."""
    net: Any = torch.nn.Sequential(torch.nn.Linear(8, 6, bias=False), torch.nn.Linear(6, 8, bias=False))
    for layer in net:
        layer.weight = torch.nn.Parameter(Flattened.of(layer.weight.detach()))
        dshard.fully_shard(layer)
    dshard.fully_shard(net)
    told = dshard.report(net)
    shards: list[Any] = [p.to_local() for p in net.parameters()]
    found = [told.num_bytes["parameters"], sum(unit.here_bytes for unit in told.units.units)]
    return found, sum(shard.ints.nbytes + shard.scale.nbytes for shard in shards)


def test_weights_of_a_tensor_subclass_have_the_bytes_of_what_they_are_made_of(worlds: WorldPool):
    for found, right in worlds.run(2, of_subclasses):
        assert found == [right, right]


def held() -> tuple[list[int], int]:
    model = sharded({})
    full = sum(p.numel() * 4 for p in model.parameters())
    gathered = [dshard.report(model).num_bytes["gathered"]]
    with dshard.gathered(model):
        gathered.append(dshard.report(model).num_bytes["gathered"])
    gathered.append(dshard.report(model).num_bytes["gathered"])
    dist.barrier()
    return gathered, full


def test_full_values_count_while_they_are_there(messaging: WorldPool):
    for gathered, full in messaging.run(2, held):
        assert gathered[0] == gathered[2] == 0
        assert full <= gathered[1] <= 2.1 * full  # small ones lie in rows, too, from which they were unpacked


def test_a_report_is_a_table_and_a_dict(worlds: WorldPool):
    for text, told in worlds.run(2, told_of):
        assert all(name in text for name in told["bytes"])
        assert [unit["label"] for unit in told["units"]] == ["embed", "head", "blocks.0", "blocks.1", "blocks.2"]


def told_of() -> tuple[str, dict[str, Any]]:
    report = dshard.report(sharded({}))
    assert report._repr_html_() == f"<pre>{html.escape(str(report))}</pre>"
    return str(report), report.as_dict()
