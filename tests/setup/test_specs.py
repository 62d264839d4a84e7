"""What a call asks for is resolved once, into specs that can be read, before anything changes."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import dshard
from dshard.policies import PrecisionRules, StrategyRules
from dshard.setup.specs import Resolver
from dshard.testing import WorldPool


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)), nn.Linear(4, 2))


WAYS: dict[str, dict[str, Any]] = {
    "the root alone": {},
    "wrapped": {"auto_wrap_policy": {nn.Linear}},
    "by strategies": {"strategy": {"0.*": "ddp", "*": "keep"}},
    "in slices": {"strategy": {"*.weight": "split(2)", "*": "full"}},
}


def asked(way: str) -> set[int]:
    """How often the placement of each parameter is asked for, in a call and the first step after it."""
    calls: Counter[int] = Counter()
    net = model()
    known = {id(param): param for param in net.parameters()}

    def place(param: nn.Parameter) -> Shard:
        assert id(param) in known
        calls[id(param)] += 1
        return Shard(0)

    dshard.fully_shard(net, shard_placement_fn=place, **WAYS[way])
    net(torch.ones(2, 4)).sum().backward()
    assert len(calls) == len(known)
    return set(calls.values())


@pytest.mark.parametrize("way", WAYS)
def test_the_placement_of_a_parameter_is_asked_for_once(worlds: WorldPool, way):
    assert worlds.run(2, asked, way) == [{1}, {1}]


def printed() -> list[str]:
    precision = PrecisionRules.of(MixedPrecisionPolicy(param_dtype=torch.bfloat16), None)
    strategies = StrategyRules.of({"3.*": "zero2"})
    resolver = Resolver(init_device_mesh("cpu", (2,)), None, averages=False, precision=precision, strategies=strategies)
    net = model()
    params = resolver.params(list(net.named_parameters()))
    units = resolver.units(params[-4:], [net[2], net[3]], label="tail", reshard=4)
    assert all(type(param) is nn.Parameter for param in net.parameters())  # nothing has changed
    return [repr(params[0]), repr(params[-1]), *map(repr, units)]


def test_specs_say_what_becomes_of_parameters_and_units(worlds: WorldPool):
    first, last, full, zero2 = worlds.run(2, printed)[0]
    assert first.startswith("0.0.weight: (4, 4), Shard(0), over 2, Precision(compute=torch.bfloat16")
    assert last.startswith("3.bias: (2,), Shard(0), over 2, zero2, Precision(")
    assert full == "UnitSpec('tail', 2 parameters of 20 elements, {'reshard_after_forward': 4, 'averages': False})"
    assert zero2 == (
        "UnitSpec('tail', 2 parameters of 10 elements, {'reshard_after_forward': False, "
        "'reshard_after_backward': False, 'strategy': 'zero2', 'averages': False})"
    )


def formed(way: str) -> list[tuple[str, int]]:
    """Units, by label and number of parameters, by one call and by calls from the children up."""
    by_one = dshard.fully_shard(model(), auto_wrap_policy={nn.Linear}, **WAYS[way])
    by_hand = model()
    for layer in [each for each in by_hand.modules() if isinstance(each, nn.Linear)]:
        dshard.fully_shard(layer, **WAYS[way])
    dshard.fully_shard(by_hand, **WAYS[way])
    kinds = [
        [(unit.label, len(unit.params), unit.number, unit.settings) for unit in net._context().units]
        for net in (by_one, by_hand)
    ]
    assert kinds[0] == kinds[1]
    return [kind[:2] for kind in kinds[0]]


def test_a_call_that_wraps_makes_the_units_that_calls_by_hand_make(worlds: WorldPool):
    first, _ = worlds.run(2, formed, "the root alone")
    assert first == [("0.0", 2), ("1.0", 2), ("2.0", 2), ("3", 2), ("Sequential", 0)]
