"""The planner's problem as a chain: costs of neighbours, rows of memory, and which options a unit has."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import permutations
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from dshard.planner.costs import Cluster, ModelCosts, ParamCosts, UnitCosts
from dshard.planner.memory import Ints, MemoryRows
from dshard.planner.options import Option, options_of_unit, table_of
from dshard.policies import Strategy

Floats = npt.NDArray[np.float64]
_NAMES, _NESTED = ("name", "source", "modules"), ("params", "alternatives")


@dataclass(frozen=True, slots=True)
class Chain:
    """Units in order, each with `S` options.

    What a unit's neighbours do matters by what they send alone, and many options send the same: those of the unit
    before are of `A` classes, those of the unit after of `C`.

    Args:
        costs: Seconds of unit `i` under option `b`, where its neighbours' options are of classes `a` and `c`; shape
            (units, A, S, C). The first unit knows only `a = 0`, the last only `c = 0`; infinite where an option is not
            worth having.
        rows: Bytes at each moment.
        is_open: Which options are worth having; shape (units, S).
        numbers: Of the options among those that were given (see `Chain.of`); the others are worth having for no unit.
        before: The class of each option as that of the unit before; shape (S).
        after: The same as that of the unit after.
    """

    costs: Floats
    rows: MemoryRows
    is_open: npt.NDArray[np.bool_]
    numbers: Ints
    before: Ints
    after: Ints

    @classmethod
    def of(cls, model: ModelCosts, strategies: Sequence[Strategy], cluster: Cluster) -> "Chain":
        """The chain of a model in which each unit may have any of some strategies, and be of any kind that it knows.

        Options are numbered by `ModelCosts.kinds` first: of the second kind there, the first strategy is
        `len(strategies)`.
        """
        strategies = [strategy.on(cluster.num_ranks) for strategy in strategies]
        known: dict[object, int] = {}  # layers that repeat
        distinct, kinds = list[list[Option]](), []
        for unit in model.units:
            key = _content(unit)
            if key not in known:
                known[key] = len(distinct)
                each = [unit.of_kind(kind) for kind in model.kinds]
                distinct.append(options_of_unit(each, strategies, cluster, model.num_backwards))
            kinds.append(known[key])
        again = model.num_backwards > 1
        table = table_of(distinct)
        rows = MemoryRows.of_table(model, table)
        is_open = _worth_having(table, rows, again=again)[kinds]
        numbers = np.flatnonzero(is_open.any(axis=0))
        times = _Times(table[:, numbers], kinds)
        before, after = times.classes(("gather_backward_s",)), times.classes(_SENT if again else _SENT[:2])
        costs = times.costs(before, after, model.num_backwards, overlaps=cluster.overlaps)
        costs += np.where(is_open[:, numbers], 0.0, np.inf)[:, None, :, None]
        return cls(_laid_out(costs), rows.of_units(kinds, numbers), is_open[:, numbers], numbers, before, after)

    @property
    def num_units(self) -> int:
        """Number of units of the model."""
        return self.costs.shape[0]

    @property
    def num_options(self) -> int:
        """Per unit."""
        return self.costs.shape[2]

    def copy(self) -> "Chain":
        """The same, of which options can be closed."""
        return replace(self, costs=self.costs.copy(order="K"), is_open=self.is_open.copy())

    def mirrored(self) -> "Chain":
        """The same from its other end; its rows are not."""
        costs = _laid_out(self.costs[::-1].transpose(0, 3, 2, 1))
        return Chain(costs, self.rows, self.is_open[::-1].copy(), self.numbers, self.after, self.before)

    def with_costs(self, costs: Floats) -> "Chain":
        """The same with other seconds."""
        return replace(self, costs=costs)

    def close(self, closes: npt.NDArray[np.bool_]) -> None:
        """Have options no more; in place."""
        self.is_open[closes] = False
        self.costs[np.broadcast_to(closes[:, None, :, None], self.costs.shape)] = np.inf

    def alike(self) -> Ints:
        """The first class that costs a unit just the same, for each class of the unit before it; shape (units, A)."""
        num, size = self.num_units, self.costs.shape[1]
        found = np.tile(np.arange(size), (num, 1))
        for a in range(size - 1, 0, -1):
            for other in range(a - 1, -1, -1):
                is_same = (self.costs[:, a] == self.costs[:, other]).all(axis=(1, 2))
                found[is_same, a] = other
        return found

    def neighbours(self, chosen: Ints) -> tuple[Ints, Ints]:
        """Classes of the units before and after each one, for the options that are chosen."""
        zero = np.zeros(1, dtype=np.int64)
        return np.concatenate([zero, self.before[chosen[:-1]]]), np.concatenate([self.after[chosen[1:]], zero])

    def stage_costs(self, chosen: Ints) -> Floats:
        """Seconds of each unit, for the options that are chosen."""
        before, after = self.neighbours(chosen)
        return self.costs[np.arange(self.num_units), before, chosen, after]

    def cost(self, chosen: Ints) -> float:
        """Seconds of a step."""
        return float(self.stage_costs(chosen).sum())

    def peak_bytes(self, chosen: Ints) -> int:
        """Peak memory of a step."""
        return int(self.rows.values(chosen).max())


def _laid_out(costs: Floats) -> Floats:
    """The same with the option of the unit after in front of the others in memory, as `bounds.following` reads it."""
    return costs.transpose(0, 3, 1, 2).copy().transpose(0, 2, 3, 1)


_UNIT = attrgetter(*(f.name for f in fields(UnitCosts) if f.name not in _NAMES and f.name not in _NESTED))
_PARAM = attrgetter(*(field.name for field in fields(ParamCosts) if field.name not in _NAMES))


def _content(unit: UnitCosts) -> tuple[object, ...]:
    """What of a unit decides its costs: all but names."""
    return _UNIT(unit), *map(_PARAM, unit.params), *map(_content, unit.alternatives)


def _worth_having(table: Floats, rows: MemoryRows, *, again: bool) -> npt.NDArray[np.bool_]:
    """Whether, for each option of each unit, no other costs less or the same in every row and in every time."""
    names = [name for name in Option._fields if name.endswith("_s")]
    names = [name for name in names if again or name not in ("gather_again_s", "reduce_early_s")]
    times = table[:, :, [Option._fields.index(name) for name in names]].transpose(2, 1, 0)
    parts = rows.phases.reshape(-1, *rows.phases.shape[2:]).transpose(0, 2, 1).astype(np.float64)
    unlike = {each.tobytes(): each for each in (*parts, *times)}  # many are the same
    terms = np.array(list(unlike.values()))  # (rows and times, options, units)
    is_open = np.ones(table.shape[:2], dtype=bool)
    for i, j in permutations(range(terms.shape[1]), 2):
        no_worse = (terms[:, j] <= terms[:, i]).all(axis=0)
        if no_worse.any():
            is_same = (terms[:, j] == terms[:, i]).all(axis=0)
            is_open[:, i] &= ~(no_worse & (~is_same | (j < i)))
    return is_open


_SENT = ("gather_s", "reduce_s", "gather_again_s", "reduce_early_s")  # the latter two by all but one micro-batch


class _Times:
    """Seconds of options.

    Args:
        table: Options of units that differ, as `table_of` gives them.
        kinds: For each unit of the model, which of these it is.
    """

    def __init__(self, table: Floats, kinds: Sequence[int]) -> None:
        self._table, self._kinds = table, kinds

    def of(self, name: str) -> Floats:
        """One field; shape (units, S)."""
        found: Floats = self._table[:, :, Option._fields.index(name)][self._kinds]
        return found

    def classes(self, names: Sequence[str]) -> Ints:
        """Numbers for options of which each unit has the same in some fields; shape (S)."""
        values = np.concatenate([self.of(name) for name in names])
        return np.unique(values, axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)

    def costs(self, before: Ints, after: Ints, num_backwards: int, *, overlaps: bool) -> Floats:
        """Seconds of each unit for each triple of a class, an option and a class; see `timeline.step_time`."""
        num, again = len(self._kinds), num_backwards - 1
        together: Any = np.maximum if overlaps else np.add
        forward, forward_comm = self.of("forward_s")[:, None, :, None], self.of("forward_comm_s")[:, None, :, None]
        backward, backward_comm = self.of("backward_s")[:, None, :, None], self.of("backward_comm_s")[:, None, :, None]
        gather_backward = self.of("gather_backward_s")
        ahead = _shifted(gather_backward[:-1, _firsts(before)], first=True)[:, :, None, None]
        behind = _firsts(after)

        costs = np.zeros((num, int(before.max()) + 1, len(before), int(after.max()) + 1))
        for gather, reduce, weight in (
            (self.of("gather_s"), self.of("reduce_s"), 1),
            (self.of("gather_again_s"), self.of("reduce_early_s"), again),
        ):
            if not weight:
                continue
            next_gather, next_reduce = (
                _shifted(each[1:, behind], first=False)[:, None, None, :] for each in (gather, reduce)
            )
            costs += weight * together(forward, forward_comm + next_gather)
            costs += weight * together(backward, next_reduce + backward_comm + ahead)
            costs[0] += weight * (gather[0] + reduce[0])[None, :, None]
        costs[-1] += num_backwards * gather_backward[-1][None, :, None]
        return costs + self.of("optimizer_s")[:, None, :, None]


def _firsts(classes: Ints) -> Ints:
    """The first option of each class."""
    return np.unique(classes, return_index=True)[1]


def _shifted(values: Floats, *, first: bool) -> Floats:
    """With nothing for the first unit, or for the last."""
    none = np.zeros((1, values.shape[1]))
    return np.concatenate([none, values] if first else [values, none])
