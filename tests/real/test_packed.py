"""Weights whose bits are no numbers of their dtype are never cast."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dshard
from dshard.testing import WorldPool, expect_error

BF16 = torch.bfloat16


class Packed(nn.Parameter):
    """As bitsandbytes' Params4bit: bytes, in any dtype of storage, with what unpacks them beside."""

    def __new__(cls, codes: Tensor, storage: torch.dtype, *, is_packed: bool = True) -> "Packed":
        self = torch.Tensor._make_subclass(cls, codes.view(storage) if is_packed else codes, False)
        self.quant_state = {"scale": 0.1} if is_packed else None
        return self


class PackedLinear(nn.Module):
    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        codes = torch.randint(256, (64 * 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        self.weight = Packed(codes, storage)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        codes = torch.empty_like(weight).copy_(weight).view(torch.uint8) if weight.dtype.itemsize > 1 else weight + 0
        return x @ ((codes.to(x.dtype) - 128) * weight.quant_state["scale"]).view(64, 8)


def net(storage: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(PackedLinear(storage), nn.Linear(8, 4))


def outputs_and_bits(storage: torch.dtype, converts: bool) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.linspace(-1, 1, 2 * 64).view(2, 64)
    plain, model = net(storage), net(storage)
    dshard.fully_shard(model, mp_policy=dshard.MixedPrecisionPolicy(param_dtype=BF16))
    if converts:
        model.to(torch.float64)
    model(x).sum().backward()
    bits = model[0].weight.full_tensor().view(torch.uint8)
    return model[0](x.to(BF16)), plain[0](x.to(BF16)), (bits != plain[0].weight.data.view(torch.uint8)).sum()


@pytest.mark.parametrize("converts", [False, True], ids=["as it is", "model.to(dtype)"])
@pytest.mark.parametrize("storage", [torch.float16, torch.float32, BF16, torch.uint8], ids=str)
def test_packed_weights_are_computed_with_as_they_are(worlds: WorldPool, storage, converts):
    for found, expected, num_changed in worlds.run(2, outputs_and_bits, storage, converts):
        assert torch.equal(found, expected)
        assert num_changed == 0


class Labelled(nn.Parameter):
    """A class of its own, of which nobody says what its bits mean."""


def shard_labelled(policy: Any) -> torch.dtype:
    model = nn.Linear(4, 4)
    model.weight = Labelled(torch.ones(4, 4))
    dshard.fully_shard(model, mp_policy=policy)
    model.register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
    seen: list[torch.dtype] = []
    x = torch.ones(2, 4)
    if policy["weight"] is None:
        nn.functional.linear(x, model.weight)
        return model.weight.dtype
    model(x)
    return seen[0]


def test_a_class_of_its_own_is_cast_if_it_is_named_alone(worlds: WorldPool):
    policy = {"*": BF16}
    for kind, text in expect_error(worlds.get_world(2), shard_labelled, policy):
        assert kind == "UnsupportedOpError"
        assert "weight: mp_policy casts values, but this parameter is a Labelled" in text
    assert worlds.run(2, shard_labelled, {"weight": BF16, "*": BF16}) == [BF16] * 2
    assert worlds.run(2, shard_labelled, {"weight": None, "*": BF16}) == [torch.float32] * 2
