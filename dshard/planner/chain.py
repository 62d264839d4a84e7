"""The planner's problem as a chain: what each option of a unit costs beside its neighbours' options, and its bytes."""

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
Bools = npt.NDArray[np.bool_]
Options = npt.NDArray[np.void]  # see `table_of`


@dataclass(frozen=True, slots=True)
class Chain:
    """Units in order, each with `S` options: an option is a strategy together with a kind of unit.

    A unit's time depends on its neighbours only by what they send beside it, and many options send the same. So
    options are grouped into `A` classes by what they send as the unit before, and `C` classes as the unit after.

    Args:
        costs: Seconds of unit `i` under option `b`, where its neighbours' options are of classes `a` and `c`; shape
            (units, A, S, C). The first unit has the same for all `a`, the last for all `c`; infinite for a closed
            option.
        rows: Bytes at each moment of a step.
        is_open: Which options a unit may still take; shape (units, S).
        numbers: For each option its number among all that `Chain.of` was given; those no unit wants are left out.
        before: The class of each option as the unit before; shape (S).
        after: The class of each option as the unit after; shape (S).
    """

    costs: Floats
    rows: MemoryRows
    is_open: Bools
    numbers: Ints
    before: Ints
    after: Ints

    @classmethod
    def of(cls, model: ModelCosts, strategies: Sequence[Strategy], cluster: Cluster) -> "Chain":
        """Build the chain of a model whose units may each have any of the strategies and be of any kind they know.

        Options are numbered by `ModelCosts.kinds` first: of the second kind there, the first strategy is
        `len(strategies)`.
        """
        strategies = [strategy.on(cluster.num_ranks) for strategy in strategies]
        known: dict[object, int] = {}  # layers that repeat are computed once
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
        times = table[:, numbers][kinds]
        before, after = _classes(times, ("gather_backward_s",)), _classes(times, _SENT if again else _SENT[:2])
        costs = _costs(times, before, after, model.num_backwards, overlaps=cluster.overlaps)
        costs += np.where(is_open[:, numbers], 0.0, np.inf)[:, None, :, None]
        return cls(costs, rows.of_units(kinds, numbers), is_open[:, numbers], numbers, before, after)

    @property
    def num_units(self) -> int:
        """Number of units of the model."""
        return self.costs.shape[0]

    @property
    def num_options(self) -> int:
        """Number of options per unit."""
        return self.costs.shape[2]

    def copy(self) -> "Chain":
        """Return the same chain with own arrays for what `close` changes."""
        return replace(self, costs=self.costs.copy(), is_open=self.is_open.copy())

    def mirrored(self) -> "Chain":
        """Return the chain from its last unit to its first; the rows stay in the old order."""
        costs = self.costs[::-1].transpose(0, 3, 2, 1).copy()
        return Chain(costs, self.rows, self.is_open[::-1].copy(), self.numbers, self.after, self.before)

    def close(self, closes: Bools) -> None:
        """Take options out, in place; shape (units, S)."""
        self.is_open[closes] = False
        self.costs[np.broadcast_to(closes[:, None, :, None], self.costs.shape)] = np.inf

    def neighbours(self, chosen: Ints) -> tuple[Ints, Ints]:
        """Return for each unit the classes of the chosen options of the units before and after it."""
        zero = np.zeros(1, dtype=np.int64)
        return np.concatenate([zero, self.before[chosen[:-1]]]), np.concatenate([self.after[chosen[1:]], zero])

    def cost(self, chosen: Ints) -> float:
        """Seconds of a step for the chosen option of each unit."""
        before, after = self.neighbours(chosen)
        return float(self.costs[np.arange(self.num_units), before, chosen, after].sum())

    def peak_bytes(self, chosen: Ints) -> int:
        """Peak memory of a step for the chosen option of each unit."""
        return int(self.rows.values(chosen).max())

    def following(self, penalties: Floats) -> Floats:
        """The least that a unit and all after it add, by its option and the class of the unit before it.

        Args:
            penalties: Seconds added to each option; shape (vectors, units, S).

        Returns:
            Shape (units + 1, vectors, A, S), zero after the last unit.
        """
        found = np.zeros((self.num_units + 1, len(penalties), self.costs.shape[1], self.num_options))
        order, starts = _by_class(self.after)
        for i in range(self.num_units - 1, -1, -1):
            behind = np.minimum.reduceat(found[i + 1][..., order], starts, axis=-1)[:, self.before]
            found[i] = (self.costs[i] + behind[:, None]).min(axis=-1) + penalties[:, i, None]
        return found

    def cheapest(self, penalties: Floats) -> tuple[float, Ints]:
        """The least sum of seconds and penalties of any choice, and that choice; `penalties` of shape (units, S)."""
        follow = self.following(penalties[None])[:, 0]
        before, chosen = 0, [int(follow[0, 0].argmin())]
        for i in range(self.num_units - 1):
            costs = self.costs[i, before, chosen[-1]][self.after]
            before = self.before[chosen[-1]]
            chosen.append(int((costs + follow[i + 1, before]).argmin()))
        return float(follow[0, 0].min()), np.array(chosen)

    def through(self, penalties: Floats) -> Floats:
        """The least sum over all choices in which a unit has an option, for each of them; shape (vectors, units, S)."""
        follow, found = self.following(penalties), np.empty_like(penalties)
        order, starts = _by_class(self.before)
        ahead = np.full((len(penalties), self.costs.shape[1], self.costs.shape[3]), np.inf)
        ahead[:, 0] = 0.0  # by the classes of the unit before and of the unit itself
        for i in range(self.num_units):
            mine = ahead[..., self.after]
            found[:, i] = (mine + follow[i]).min(axis=1)
            steps = (mine[..., None] + self.costs[i]).min(axis=1) + penalties[:, i, :, None]
            ahead = np.minimum.reduceat(steps[:, order], starts, axis=1)
        return found


def _by_class(classes: Ints) -> tuple[Ints, Ints]:
    """An order of the options in which classes follow each other, and where each class starts."""
    order = np.argsort(classes, kind="stable")
    return order, np.searchsorted(classes[order], np.arange(int(classes.max()) + 1))


_NAMES, _NESTED = ("name", "source", "modules"), ("params", "alternatives")
_UNIT = attrgetter(*(f.name for f in fields(UnitCosts) if f.name not in _NAMES and f.name not in _NESTED))
_PARAM = attrgetter(*(field.name for field in fields(ParamCosts) if field.name not in _NAMES))


def _content(unit: UnitCosts) -> tuple[object, ...]:
    """Everything that decides a unit's costs, which names do not."""
    return _UNIT(unit), *map(_PARAM, unit.params), *map(_content, unit.alternatives)


def _worth_having(table: Options, rows: MemoryRows, *, again: bool) -> Bools:
    """For each option of each unit, whether no other option is at least as good in every row and every time."""
    names = [name for name in Option._fields if name.endswith("_s")]
    names = [name for name in names if again or name not in ("gather_again_s", "reduce_early_s")]
    times = [table[name].T for name in names]
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


def _classes(times: Options, names: Sequence[str]) -> Ints:
    """Number the options so that two with the same values of some fields in every unit share a number."""
    values = np.concatenate([times[name] for name in names])
    return np.unique(values, axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _costs(times: Options, before: Ints, after: Ints, num_backwards: int, *, overlaps: bool) -> Floats:
    """Seconds of each unit for each triple of a class, an option and a class; see `timeline.step_time`."""
    together: Any = np.maximum if overlaps else np.add
    names = ("forward_s", "forward_comm_s", "backward_s", "backward_comm_s")
    forward, forward_comm, backward, backward_comm = (times[name][:, None, :, None] for name in names)
    gather_backward = times["gather_backward_s"]
    ahead = _shifted(gather_backward[:-1, _firsts(before)], first=True)[:, :, None, None]
    behind = _firsts(after)
    costs = np.zeros((len(times), int(before.max()) + 1, len(before), int(after.max()) + 1))
    kinds = (("gather_s", "reduce_s", 1), ("gather_again_s", "reduce_early_s", num_backwards - 1))
    for gather, reduce, weight in (
        (times[gather], times[reduce], weight) for gather, reduce, weight in kinds if weight
    ):
        next_gather, next_reduce = (
            _shifted(each[1:, behind], first=False)[:, None, None, :] for each in (gather, reduce)
        )
        costs += weight * together(forward, forward_comm + next_gather)
        costs += weight * together(backward, next_reduce + backward_comm + ahead)
        costs[0] += weight * (gather[0] + reduce[0])[None, :, None]
    costs[-1] += num_backwards * gather_backward[-1][None, :, None]
    return costs + times["optimizer_s"][:, None, :, None]


def _firsts(classes: Ints) -> Ints:
    """The first option of each class."""
    return np.unique(classes, return_index=True)[1]


def _shifted(values: Floats, *, first: bool) -> Floats:
    """Add a row of zeros, for the first unit or for the last."""
    none = np.zeros((1, values.shape[1]))
    return np.concatenate([none, values] if first else [values, none])
