"""The names of strategies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshard.errors import ArgumentError, PlacementError, StateError
from dshard.policies import Strategy

BASES = st.sampled_from(["zero1", "zero2", "keep", "full"])


@given(BASES, st.none() | st.integers(1, 64), st.integers(1, 9))
def test_the_text_of_a_strategy_means_that_strategy(base, within, num_slices):
    strategy = Strategy(base, within, num_slices if base == "full" else 1)
    assert Strategy.of(str(strategy)) == strategy


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ddp", Strategy("ddp")),
        ("hybrid(8)", Strategy("full", 8)),
        ("hybrid( 8 , keep)", Strategy("keep", 8)),
        ("split(4)", Strategy("full", None, 4)),
        ("split(4, hybrid(2))", Strategy("full", 2, 4)),
        ("hybrid(2, split(4))", Strategy("full", 2, 4)),
    ],
)
def test_texts(text, expected):
    assert Strategy.of(text) == expected


@pytest.mark.parametrize(
    "value", ["", "zero3", "hybrid", "hybrid(0)", "hybrid(x)", "hybrid(2, hybrid(4))", 3, None, "split(0)"]
)
def test_what_is_no_strategy_is_refused_by_its_value(value):
    with pytest.raises(ArgumentError, match="must be one of"):
        Strategy.of(value)


@pytest.mark.parametrize(
    ("value", "way"),
    [
        ("zero3", r"Pass 'full'\."),
        ("FULL_SHARD", r"Pass 'full'\."),
        ("SHARD_GRAD_OP", r"Pass 'keep'\."),
        ("no_shard", r"Pass 'ddp'\."),
        ("HYBRID_SHARD", r"Pass 'hybrid\(8\)', for 8 ranks"),
        ("zero_2", r"Pass 'zero2'\."),
    ],
)
def test_names_of_other_libraries_are_told_ours(value, way):
    with pytest.raises(ArgumentError, match=way):
        Strategy.of(value)


@pytest.mark.parametrize("value", ["hybrid(2, ddp)", "split(2, keep)", "split(2, ddp)"])
def test_what_does_not_go_together_is_refused(value):
    with pytest.raises(StateError, match="Pass"):
        Strategy.of(value)


@pytest.mark.parametrize(
    ("text", "num_ranks", "expected"),
    [
        ("hybrid(4)", 4, "full"),
        ("hybrid(1)", 4, "ddp"),
        ("hybrid(1, keep)", 4, "ddp"),
        ("hybrid(2, zero2)", 4, "hybrid(2, zero2)"),
        ("full", 1, "ddp"),
        ("split(4)", 1, "split(4)"),
    ],
)
def test_names_that_mean_one_thing_on_a_mesh(text, num_ranks, expected):
    assert str(Strategy.of(text).on(num_ranks)) == expected


def test_ranks_that_do_not_divide_the_mesh_are_refused_with_a_number_that_does():
    with pytest.raises(PlacementError, match=r"Pass hybrid\(3\)"):
        Strategy.of("hybrid(4)").on(6)
