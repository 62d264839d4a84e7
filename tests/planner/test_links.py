"""The line through measured collectives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshard.errors import PlanError
from dshard.planning.links import SIZES, fit


@given(st.floats(1e-6, 1e-1), st.floats(1e-12, 1e-6), st.integers(2, 4096))
def test_a_line_is_found_again(alpha, slope, num_ranks):
    wire = [size * (num_ranks - 1) / num_ranks for size in SIZES]
    link = fit(wire, [alpha + slope * each for each in wire])
    for size, each in zip(SIZES, wire, strict=True):
        assert link.time_s(size, num_ranks) == pytest.approx(alpha + slope * each, rel=1e-6)


@given(st.lists(st.floats(1e-6, 10), min_size=3, max_size=5))
def test_neither_the_start_nor_the_rate_is_ever_negative(seconds):
    wire = SIZES[: len(seconds)]
    link = fit(wire, seconds)
    assert link.alpha_s >= 0
    assert link.seconds_per_byte >= 0
    told = [link.alpha_s + link.seconds_per_byte * size for size in wire]
    best = sum((1 - t / s) ** 2 for t, s in zip(told, seconds, strict=True))
    for alpha, slope in ((1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99)):
        told = [alpha * link.alpha_s + slope * link.seconds_per_byte * size for size in wire]
        assert best <= sum((1 - t / s) ** 2 for t, s in zip(told, seconds, strict=True)) + 1e-9


def test_noise_of_a_tenth_moves_the_line_by_little():
    noise = (1.1, 0.9, 1.05, 0.95, 1.0)
    link = fit(SIZES, [(1e-4 + 1e-9 * size) * n for size, n in zip(SIZES, noise, strict=True)])
    assert link.alpha_s == pytest.approx(1e-4, rel=0.1)
    assert link.seconds_per_byte == pytest.approx(1e-9, rel=0.1)


def test_one_size_makes_no_line():
    with pytest.raises(PlanError, match="a line needs two sizes or more"):
        fit([1024.0, 1024.0], [0.1, 0.2])
