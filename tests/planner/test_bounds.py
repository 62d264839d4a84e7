"""The parts of the solver, each against what it stands for: paths, mixes, changes of a choice."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dshard.planner.search import Best, Chain, mix
from dshard.policies import Strategy
from tests.planner.cases import STRATEGIES, clusters, models, units_with_alternatives

SOME = settings(max_examples=80, deadline=None)
NAMES = st.lists(st.sampled_from(STRATEGIES), min_size=1, max_size=3, unique=True)


def chain_of(model, cluster, names):
    return Chain.of(model, [Strategy.of(name).on(cluster.num_ranks) for name in names], cluster)


@SOME
@given(models(3, units=units_with_alternatives), clusters(), NAMES, st.integers(0, 2**32 - 1))
def test_the_cheapest_way_is_that_of_all_choices_and_so_is_each_option_of_it(model, cluster, names, seed):
    chain = chain_of(model, cluster, names)
    penalties = np.random.default_rng(seed).random((2, chain.num_units, chain.num_options))
    units = np.arange(chain.num_units)
    every = [np.array(each) for each in itertools.product(range(chain.num_options), repeat=chain.num_units)]
    sums = np.array([chain.cost(each) + penalties[:, units, each].sum(axis=1) for each in every])
    least, chosen = chain.cheapest(penalties[0])
    assert least == pytest.approx(sums[:, 0].min())
    assert chain.cost(chosen) + penalties[0, units, chosen].sum() == pytest.approx(least)
    through = chain.through(penalties)
    for unit, option in itertools.product(units, range(chain.num_options)):
        having = sums[[each[unit] == option for each in every]].min(axis=0)
        assert through[:, unit, option] == pytest.approx(having)


@SOME
@given(models(7), clusters(), NAMES, st.randoms(use_true_random=False))
def test_a_unit_that_takes_another_option_makes_a_step_longer_by_what_was_told(model, cluster, names, rng):
    chain = chain_of(model, cluster, names)
    chosen = np.array([rng.choice(np.flatnonzero(is_open).tolist()) for is_open in chain.is_open])
    losses = Best(chain, 1).losses(chosen)
    for unit, option in itertools.product(range(chain.num_units), range(chain.num_options)):
        changed = chosen.copy()
        changed[unit] = option
        if chain.is_open[unit, option]:
            longer_s = chain.cost(changed) - chain.cost(chosen)
            assert losses[unit, option] == pytest.approx(longer_s, rel=1e-9, abs=1e-12)


@SOME
@given(models(4), clusters(), NAMES, st.data())
def test_a_choice_that_is_repaired_fits_and_is_no_slower_than_before(model, cluster, names, data):
    chain = chain_of(model, cluster, names)
    every = [np.array(each) for each in itertools.product(range(chain.num_options), repeat=chain.num_units)]
    every = [each for each in every if np.isfinite(chain.cost(each))]
    limit = data.draw(st.sampled_from([chain.peak_bytes(each) for each in every]))
    best = Best(chain, limit)
    for chosen in data.draw(st.lists(st.sampled_from(every), min_size=1, max_size=5)):
        known = best.cost
        best.repair(chosen)
        assert best.cost <= known
        if chain.peak_bytes(chosen) <= limit:
            assert best.cost <= chain.cost(chosen)
        if best.chosen is not None:
            assert chain.peak_bytes(best.chosen) <= limit
            assert best.cost == chain.cost(best.chosen)


@SOME
@given(st.integers(0, 12), st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_a_mix_fits_and_no_choice_is_cheaper_at_its_prices(num, num_rows, seed):
    rng = np.random.default_rng(seed)
    costs, over = rng.random(num + 1), rng.random((num + 1, num_rows)) - 0.5
    costs[0], over[0] = 100.0, -1.0
    shares, prices = mix(costs, over)
    assert shares.sum() == pytest.approx(1)
    assert (shares >= 0).all()
    assert (prices >= 0).all()
    assert (shares @ over <= 1e-9).all()
    assert shares @ costs == pytest.approx((costs + over @ prices).min())  # so no other mix is cheaper
