"""The order in which virtual ranks are added, and sums that have none."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dshard.collectives import TreeSum, exact_norm, nodes_between


def alone(part: torch.Tensor, group: object, op: object) -> torch.Tensor:
    return part


def added(left: str | None, right: str | None) -> str | None:
    return f"({left}+{right})"


def by_halves(start: int, stop: int) -> str:
    """The documented tree, top down: split at the largest power of two below the number."""
    if stop - start == 1:
        return str(start)
    left = 1 << (stop - start - 1).bit_length() - 1
    return added(by_halves(start, start + left), by_halves(start + left, stop)) or ""


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n), max_size=6))))
def test_any_cut_of_the_ranks_gives_one_tree(case):
    total, cuts = case
    places = sorted({0, total, *cuts})
    together: TreeSum[str] = TreeSum(added)
    for start, stop in itertools.pairwise(places):
        part: TreeSum[str] = TreeSum(added)
        for rank in range(start, stop):
            part.push(rank, 1, str(rank))
        assert [(node.start, node.size) for node in part.nodes] == nodes_between(start, stop)
        for node in part.nodes:
            together.push(node.start, node.size, node.value)
    assert together.total() == by_halves(0, total)


def test_a_block_of_a_power_of_two_is_one_node():
    for size in (1, 2, 4, 8):
        assert all(len(nodes_between(start, start + size)) == 1 for start in range(0, 32, size))


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(floats, min_size=1, max_size=50), st.randoms(), st.sampled_from([1.0, 2.0, math.inf]))
def test_a_norm_does_not_depend_on_order_or_cut(values, random, order):
    whole = torch.tensor(values, dtype=torch.float32)
    norm = exact_norm([([], [whole])], order, alone)
    shuffled = values[:]
    random.shuffle(shuffled)
    cut = random.randint(0, len(values))
    parts = [torch.tensor(part, dtype=torch.float32) for part in (shuffled[:cut], shuffled[cut:])]
    assert exact_norm([([], parts[:1]), ([], parts[1:])], order, alone) == norm
    exact = [abs(Fraction(value)) for value in whole.tolist()]
    if order == math.inf:
        assert norm == float(max(exact))
    elif order == 1:
        assert norm == pytest.approx(float(sum(exact)), rel=1e-15)
    else:
        assert norm**2 == pytest.approx(float(sum(x * x for x in exact)), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_a_norm_of_many_is_torchs(dtype):
    values = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    for order in (1.0, 2.0, math.inf):
        expected = torch.linalg.vector_norm(values.flatten(), order, dtype=wide).real
        assert exact_norm([([], list(values))], order, alone) == pytest.approx(float(expected), rel=1e-7)


def test_what_is_not_finite_stays_so():
    assert exact_norm([([], [torch.tensor([1.0, -math.inf])])], 2.0, alone) == math.inf
    assert math.isnan(exact_norm([([], [torch.tensor([1.0, math.nan])]), ([], [torch.ones(2)])], 2.0, alone))
    assert exact_norm([([], [torch.zeros(3)]), ([], [torch.ones(0)])], 2.0, alone) == 0
    assert exact_norm([([], [torch.full((2,), 5e-324, dtype=torch.float64)])], math.inf, alone) == 5e-324
