"""Covering arrays: few rows that contain every pair of levels, and every triple of those of some factors."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

Factors = Mapping[str, Sequence[str]]
Row = dict[str, str]
Combination = tuple[tuple[str, str], ...]  # (factor, level), in the order of the factors


@dataclass(frozen=True, slots=True)
class Constraint:
    """Levels that do not go together.

    Args:
        levels: One for each of some factors.
        why: Words of the error; or, where there is none, why rows do without.
    """

    levels: Mapping[str, str]
    why: str

    def forbids(self, row: Mapping[str, str]) -> bool:
        """Whether a row, or a part of one, has one of the levels for each of the factors."""
        return all(row.get(factor) == level for factor, level in self.levels.items())


def combinations_of(factors: Factors, triples_among: int) -> Iterator[Combination]:
    """Every pair of levels of different factors, and every triple of those of the first so many factors."""
    names = list(factors)
    groups = [*combinations(names, 2), *combinations(names[:triples_among], 3)]
    for group in groups:
        for levels in product(*(factors[name] for name in group)):
            yield tuple(zip(group, levels, strict=True))


def is_allowed(row: Mapping[str, str], constraints: Iterable[Constraint]) -> bool:
    """Whether no constraint forbids a row, or a part of one."""
    return not any(each.forbids(row) for each in constraints)


def covered_by(row: Mapping[str, str], triples_among: int) -> Iterator[Combination]:
    """The pairs and triples that a row has."""
    items = list(row.items())
    yield from combinations(items, 2)
    yield from combinations(items[:triples_among], 3)


class _Greedy:
    """Row by row, each level the one that covers most of what is left."""

    def __init__(self, factors: Factors, triples_among: int, constraints: Sequence[Constraint]) -> None:
        self.factors, self.constraints = factors, constraints
        self.names = list(factors)
        self.at = {name: i for i, name in enumerate(self.names)}
        self.in_triples = set(self.names[:triples_among])
        needed = combinations_of(factors, triples_among)
        self.left: dict[Combination, None] = {c: None for c in needed if is_allowed(dict(c), constraints)}

    def _gain(self, row: Row, name: str, level: str) -> int:
        """How many combinations of what is left a level completes beside those that are chosen."""
        one, at = (name, level), self.at[name]
        others = [(other, row[other]) for other in self.names if other in row]
        pairs = ((other, one) if self.at[other[0]] < at else (one, other) for other in others)
        gain = sum(pair in self.left for pair in pairs)
        if name in self.in_triples:
            near = [other for other in others if other[0] in self.in_triples]
            for couple in combinations(near, 2):
                gain += tuple(sorted((*couple, one), key=lambda each: self.at[each[0]])) in self.left
        return gain

    def row(self) -> Row:
        """The next row: the first combination that is left, and beside it what covers most; or the first level."""
        row: Row = dict(next(iter(self.left)))
        for name in self.names:
            if name not in row:
                levels = [x for x in self.factors[name] if is_allowed(row | {name: x}, self.constraints)]
                assert levels, f"no level of {name} goes with {row}"
                row[name] = max(levels, key=lambda level: self._gain(row, name, level))
        return {name: row[name] for name in self.names}


def covering_array(factors: Factors, triples_among: int, constraints: Sequence[Constraint]) -> list[Row]:
    """Rows that have every allowed pair of levels, and every allowed triple among the first so many factors.

    The first level of a factor is taken where nothing is left to cover. The same arguments give the same rows.
    """
    names = list(factors)
    rest = sorted(names[triples_among:], key=lambda name: -len(factors[name]))  # those with few levels fit in anywhere
    ordered = {name: factors[name] for name in names[:triples_among] + rest}
    greedy, rows = _Greedy(ordered, triples_among, constraints), []
    greedy.left = dict(sorted(greedy.left.items(), key=lambda item: -len(item[0])))  # triples first
    while greedy.left:
        row = greedy.row()
        before = len(greedy.left)
        for combination in covered_by(row, triples_among):
            greedy.left.pop(combination, None)
        assert len(greedy.left) < before, f"{row} covers nothing new"
        rows.append({name: row[name] for name in names})
    return rows
