"""Every pair of options of the API, and of what programs do around them, against the plain model in one process.

The rows are a covering array of `factors.py`; what is right is computed by `oracle.py`.
"""

import inspect
from collections import Counter
from itertools import combinations, product

import pytest
from torch import nn

import dshard
from dshard.testing import WorldPool, expect_error
from tests.crossings import api, oracle, program
from tests.crossings.comparing import differences
from tests.crossings.factors import (
    CONSTRAINTS,
    FACTORS,
    NUM_IN_TRIPLES,
    default_row,
    name_of,
    num_ranks_of,
    rows,
)


def compare(worlds: WorldPool, row: dict[str, str]) -> None:
    expected = oracle.train(row)
    timeout_s = 300.0 if row["compile"] == "step" else 60.0  # dynamo takes its time where four ranks share a core
    for rank, result in enumerate(worlds.run(num_ranks_of(row), program.run, row, timeout_s=timeout_s)):
        assert differences(row, rank, result, expected) == [], f"rank {rank} of {name_of(row)}"


@pytest.mark.parametrize("row", rows(), ids=name_of)
def test_a_crossing_trains_as_one_process(worlds: WorldPool, row):
    compare(worlds, row)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_what_does_not_go_together_raises(worlds: WorldPool, name):
    row = default_row() | dict(CONSTRAINTS[name].levels)
    for kind, text in expect_error(worlds.get_world(num_ranks_of(row)), program.run, row):
        assert CONSTRAINTS[name].why in text, f"{kind}: {text}"


def forbidden(row: dict[str, str]) -> bool:
    return any(each.levels.items() <= row.items() for each in CONSTRAINTS.values())


def test_the_rows_have_every_pair_and_where_asked_every_triple_of_the_first_six(record_property):
    """Counted by itself: what is not in any row has to be named by a constraint."""
    assert len({tuple(row.items()) for row in rows()}) == len(rows())
    assert not any(forbidden(row) or list(row) != list(FACTORS) for row in rows())
    counts, missing = Counter[str](), []
    groups = [("pairs", group) for group in combinations(FACTORS, 2)]
    groups += [("triples", group) for group in combinations(list(FACTORS)[:NUM_IN_TRIPLES], 3)]
    for kind, group in groups:
        found = {tuple(row[factor] for factor in group) for row in rows()}
        wanted = set(product(*(FACTORS[factor] for factor in group)))
        assert found <= wanted
        counts[kind] += len(found)
        missing += [dict(zip(group, levels, strict=True)) for levels in wanted - found]
    assert [levels for levels in missing if not forbidden(levels)] == []
    print(
        f"\n{len(rows())} rows cover {counts['pairs']} pairs of {len(FACTORS)} factors and {counts['triples']} triples"
    )
    print(f"left out: {'; '.join(f'{name} ({each.why})' for name, each in CONSTRAINTS.items())}")
    record_property("rows, pairs, triples", (len(rows()), counts["pairs"], counts["triples"]))


def settable() -> set[str]:
    return {name for name in dir(dshard.FSDPModule) if name.startswith("set_") and name not in dir(nn.Module)}


def methods() -> set[str]:
    own = {name for kind in dshard.FSDPModule.__mro__ if kind.__module__.startswith("dshard") for name in vars(kind)}
    return {n for n in own if n[0] != "_" and not n.startswith("set_") and callable(getattr(dshard.FSDPModule, n))}


TABLES = {
    "arguments of fully_shard": (lambda: set(inspect.signature(dshard.fully_shard).parameters), api.ARGUMENTS),
    "arguments of checkpoint.save": (lambda: set(inspect.signature(dshard.checkpoint.save).parameters), api.SAVING),
    "names": (lambda: {n for n in dshard.__all__ if not n.endswith("Error")}, api.NAMES),
    "setters": (settable, api.SETTERS),
    "methods": (methods, api.METHODS),
}


@pytest.mark.parametrize("kind", TABLES)
def test_every_option_is_crossed_or_has_a_reason(kind):
    there, table = TABLES[kind]
    assert there() - set(table) == set(), (
        f"put these {kind} into crossings/api.py, and a level into crossings/factors.py"
    )
    assert set(table) - there() == set(), f"these {kind} are gone"
    for name, where in table.items():
        factor, _, level = where.partition(": ")
        is_crossed = factor in FACTORS and (not level or level in FACTORS[factor])
        assert is_crossed or where.startswith(api.NOT_HERE), f"{name}: there is no {where}"
