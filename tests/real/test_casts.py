"""What mixed precision makes of arguments and results: containers stay what they are."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import dshard
from dshard.runtime.module_hooks import Casts
from dshard.testing import WorldPool, expect_error

BF16, F32 = torch.bfloat16, torch.float32
Pair = namedtuple("Pair", "a b")


class Keys(dict[str, Any]):
    """A dict with something of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.note = "kept"


class Items(list[Any]):
    """A list of its own class."""


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    note: Any


class Opaque:
    """What is looked into by nobody."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


NOTE = object()  # which must be the same afterwards
CONTAINERS = {
    "dict": lambda x: {"x": x, "note": NOTE},
    "OrderedDict": lambda x: OrderedDict(x=x, note=NOTE),
    "defaultdict": lambda x: defaultdict(list, x=x, note=NOTE),
    "subclass of dict": lambda x: Keys(x=x, note=NOTE),
    "UserDict": lambda x: UserDict(x=x, note=NOTE),
    "MappingProxyType": lambda x: MappingProxyType({"x": x, "note": NOTE}),
    "list": lambda x: [x, NOTE],
    "subclass of list": lambda x: Items([x, NOTE]),
    "tuple": lambda x: (x, NOTE),
    "namedtuple": lambda x: Pair(x, NOTE),
    "frozen dataclass": lambda x: Frozen(x, NOTE),
    "nested": lambda x: {"x": [Pair(x, NOTE)], "note": NOTE},
}


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (dict, UserDict, MappingProxyType)):
        return [each for item in value.values() for each in tensors(item)]
    if isinstance(value, (list, tuple)):
        return [each for item in value for each in tensors(item)]
    return tensors(value.x) if isinstance(value, Frozen) else []


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_without_anything_to_cast_is_the_same_object(name):
    for value in (torch.ones(2, dtype=BF16), torch.ones(2, dtype=torch.int64), None):
        container = CONTAINERS[name](value)
        (found,), kwargs = Casts(BF16, None).cast_inputs((container,), {"container": container})
        assert found is container
        assert kwargs["container"] is container


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_with_something_to_cast_becomes_one_of_its_type(name):
    container = CONTAINERS[name](torch.ones(2))
    found = Casts(None, BF16).cast_outputs(container)
    assert type(found) is type(container)
    assert [each.dtype for each in tensors(found)] == [BF16]
    assert [each.dtype for each in tensors(container)] == [F32]
    if isinstance(found, Keys):
        assert found.note == "kept"
    if isinstance(found, defaultdict):
        assert found["new"] == []
    note = found["note"] if hasattr(found, "keys") else found.note if isinstance(found, Frozen) else found[1]
    assert note is NOTE


def test_what_is_packed_is_cast_and_what_is_opaque_is_not():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    found = Casts(BF16, None).cast_inputs((packed,), {})[0][0]
    assert type(found) is PackedSequence
    assert found.data.dtype == BF16
    opaque = Opaque(torch.ones(2))
    assert Casts(BF16, None).cast_inputs((opaque,), {})[0][0] is opaque


class Passing(nn.Module):
    """Blocks that hand on what they have found by a dict, also while others give them floats to be cast."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer, self.index = nn.Linear(8, 8), index

    def forward(self, x: Tensor, shared: dict[int, Tensor]) -> Tensor:
        if self.index == 0:
            shared[0] = self.layer(x)
        return x + self.layer(shared[0])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Passing(i) for i in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shared: dict[int, Tensor] = defaultdict(lambda: torch.zeros(1))
        for block in self.blocks:
            x = block(x, shared=shared)
        assert list(shared) == [0]
        return x


def hand_on() -> None:
    net = Net()
    policy = dshard.MixedPrecisionPolicy(param_dtype=BF16)
    for block in net.blocks:
        dshard.fully_shard(block, mp_policy=policy)
    dshard.fully_shard(net, mp_policy=policy)
    net(torch.randn(2, 8)).sum().backward()


def test_blocks_hand_on_what_they_write_to_a_dict(worlds: WorldPool):
    worlds.run(2, hand_on)


def normed(policy: Any) -> Tensor:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.BatchNorm1d(8)), nn.Linear(8, 8))
    dshard.fully_shard(net, mp_policy=policy)
    out = net(torch.randn(4, 8))
    out.sum().backward()
    return out.detach()


def test_batch_norm_in_bf16_is_named_with_the_policy_that_helps(worlds: WorldPool):
    for kind, text in expect_error(worlds.get_world(2), normed, dshard.MixedPrecisionPolicy(param_dtype=BF16)):
        assert kind == "UnsupportedOpError"
        assert "1.0: a BatchNorm1d computes in the dtype of its running statistics" in text
        assert 'mp_policy={"1.0.*": None, "*": ...}' in text
    assert all(out.dtype == BF16 for out in worlds.run(2, normed, {"1.0.*": None, "*": BF16}))
