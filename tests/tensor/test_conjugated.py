"""Conjugated and negated views of complex parameters: bits that kernels ignore within `__torch_dispatch__`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dshard
from dshard.errors import UnsupportedOpError
from dshard.testing import WorldPool

Change = Callable[[Any], Any]

READS: dict[str, Change] = {
    "beside a plain tensor": lambda w: other() * w.conj(),
    "beside itself": lambda w: w * w.conj(),
    "its absolute square": lambda w: (w * w.conj()).real,
    "imaginary part": lambda w: w.conj().imag * 2,
    "real part": lambda w: w.conj().real + 1,
    "imaginary part of the whole": lambda w: w.imag * 2,
    "adjoint": lambda w: w.mH + 1,
    "adjoint in a product": lambda w: w.mH @ other(),
    "a function": lambda w: w.conj().exp(),
    "a row": lambda w: w.t().conj()[0] * 2,
    "negated": lambda w: torch._neg_view(w) * 2,
    "resolved": lambda w: w.conj().resolve_conj() * 2,
    "summed": lambda w: w.conj().sum(),
    "a norm": lambda w: w.conj().imag.norm(),
    "in a list": lambda w: torch.cat([w.conj(), other()]),
    "chosen": lambda w: torch.where(other().real > 0, w.conj(), other()),
    "each": lambda w: torch._foreach_mul([w.conj(), other()], 2.0)[0],
    "a product that autograd conjugates": lambda w: w * (w + 1),
}
WRITES: dict[str, Change] = {
    "scaled": lambda w: w.conj().mul_(2 + 1j),
    "copied to": lambda w: w.conj().copy_(other()),
    "imaginary part": lambda w: w.conj().imag.add_(1),
    "real part": lambda w: w.conj().real.mul_(3),
    "a row": lambda w: w.t().conj()[0].fill_(1 + 2j),
    "by itself": lambda w: w.mul_(w.conj()),
    "from a conjugated one": lambda w: w.copy_(other().conj()),
    "negated": lambda w: torch._neg_view(w).add_(1),
    "negated imaginary part": lambda w: torch._neg_view(w.imag).mul_(other().real),
}


def other() -> Tensor:
    return torch.randn(6, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))


def plain_and_sharded() -> tuple[Any, Any]:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(nn.Linear(5, 6, dtype=torch.complex64))
    dshard.fully_shard(found[1])
    return found[0], found[1]


def are_equal(value: Any, expected: Tensor) -> bool:
    full: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return torch.allclose(full.resolve_conj().resolve_neg(), expected.resolve_conj().resolve_neg(), atol=1e-4)


def read(name: str) -> list[bool]:
    """Whether values are as of the plain tensor, and gradients."""
    plain, model = plain_and_sharded()
    use, found = READS[name], []
    with torch.no_grad():
        found.append(are_equal(use(model.weight), use(plain.weight)))
    for each in (plain, model):
        result = use(each.weight)
        (result.abs() if result.is_complex() else result).square().sum().backward()
    return [*found, are_equal(model.weight.grad, plain.weight.grad)]


@pytest.mark.parametrize("name", READS)
def test_a_conjugated_view_is_used_as_that_of_a_plain_tensor(worlds: WorldPool, name):
    assert worlds.run(2, read, name) == [[True, True]] * 2


def write(name: str) -> bool:
    plain, model = plain_and_sharded()
    with torch.no_grad():
        for each in (plain, model):
            WRITES[name](each.weight)
    return are_equal(model.weight, plain.weight)


@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_a_conjugated_view_is_one_to_the_parameter(worlds: WorldPool, name):
    assert worlds.run(2, write, name) == [True, True]


def view_as_real() -> None:
    _, model = plain_and_sharded()
    with torch.no_grad(), pytest.raises(UnsupportedOpError, match="Call resolve_conj"):
        torch.view_as_real(model.weight.conj()) * 2


def test_a_conjugated_tensor_has_no_view_as_real_numbers(worlds: WorldPool):
    worlds.run(2, view_as_real)
