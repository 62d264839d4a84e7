"""Where torch does not ask a subclass of DTensor, its registry of dispatch rules does."""

import pytest
import torch
from torch._library import simple_registry
from torch.distributed.tensor import DTensor

from dshard.tensor import ShardedTensor
from dshard.tensor.older_torch import ask_the_class, asks_subclasses

ADD = torch.ops.aten.add.Tensor


class Echo(DTensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func, args, kwargs


@pytest.fixture
def registry(monkeypatch):
    holder = simple_registry.GenericTorchDispatchRuleHolder
    monkeypatch.setattr(holder, "find", holder.find)  # what the test changes is put back
    return simple_registry


def test_the_registry_answers_for_the_class_and_for_no_other(registry):
    ask_the_class(Echo)
    rule = registry.find_torch_dispatch_rule(ADD, Echo)
    assert rule(Echo, ADD, (Echo,), (1, 2), {"alpha": 3}) == (ADD, (1, 2), {"alpha": 3})
    assert registry.find_torch_dispatch_rule(ADD, DTensor) is None


def test_the_registry_is_left_alone_where_torch_asks_by_itself():
    has_rule = simple_registry.find_torch_dispatch_rule(ADD, ShardedTensor) is not None
    assert has_rule != asks_subclasses()
