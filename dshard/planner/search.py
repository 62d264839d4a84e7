"""The fastest choice under a memory limit, and a proof that no other is faster; and the one with the smallest peak.

Memory rows are put into the objective with a price per byte (Lagrange). What is left is a shortest path through the
chain of units: its length bounds every choice that fits from below, whatever the prices. The best prices come from a
small linear program over the paths so far. They close most options; an exact search along the chain decides the rest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import permutations
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from dshard.planner.costs import Cluster, ModelCosts, ParamCosts, UnitCosts
from dshard.planner.memory import Ints, MemoryRows
from dshard.planner.options import Option, options_of_unit, table_of
from dshard.planner.owners import Owners
from dshard.planner.texts import Progress, silent
from dshard.policies import Strategy

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Options = npt.NDArray[np.void]  # see `table_of`
_BETTER = 1e-12  # relative: a choice that is better by less is no better
_NARROW = 100  # labels per unit of the first search, which looks for a good choice
_CLOSE = 5e-4  # a relative gap that a wide search of a long chain would rarely close
_MOST_IN_ROWS = 6000  # labels per unit where several rows tell them apart, for each is compared with each
_EARLY, _EARLY_LABELS = 8, 4000  # so many units may have more labels: what they do decides which row is the highest
_MAX_ROWS = 12  # that the relaxation looks for itself
_MOST_BETWEEN = 20_000  # labels of all units and searches that look for the smallest peak


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
        owners = Owners(model, cluster)
        known: dict[object, int] = {}  # layers that repeat are computed once
        distinct, kinds = list[list[Option]](), []
        for unit in model.units:
            key = _content(unit)
            if key not in known:
                known[key] = len(distinct)
                each = [unit.of_kind(kind) for kind in model.kinds]
                distinct.append(options_of_unit(each, strategies, cluster, owners, model.num_backwards))
            kinds.append(known[key])
        again = model.num_backwards > 1
        table = table_of(distinct)
        rows = MemoryRows.of(model, table)
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


@dataclass(frozen=True, slots=True)
class Fastest:
    """What `fastest` has found.

    Args:
        chosen: The option of each unit.
        cost: Seconds of a step.
        proven: No choice that fits takes less.
        relaxed: The same by the relaxation alone.
        num_labels: How many labels the searches made.
    """

    chosen: Ints
    cost: float
    proven: float
    relaxed: float
    num_labels: int


def fastest(chain: Chain, limit_bytes: int, start: Ints, max_labels: int, progress: Progress = silent) -> Fastest:
    """Find the fastest choice whose peak fits.

    Each row of the chain is the memory at one moment, and few of them decide. So a row counts from when a choice is
    found that violates it: leaving rows out only allows more choices, and so keeps the bounds valid.

    Args:
        chain: Of the model.
        limit_bytes: Of the peak.
        start: A choice to start from, that fits.
        max_labels: Of all units and all searches together; beyond it the bound may stay below the choice's time.
        progress: Hears how far it is.
    """
    chain, best = chain.copy(), Best(chain, limit_bytes)
    best.offer(start)
    relaxation = Relaxation(chain, limit_bytes, best)
    proven, num_labels = -np.inf, 0
    while num_labels <= max_labels:
        relaxation.ascend()
        progress(f"bounding at {len(relaxation.rows)} moments")
        relaxation.round()
        relaxation.isolate()
        violated = list[int]()
        for width in (_NARROW, max(_NARROW, max_labels // chain.num_units)):
            relaxation.tighten()
            if relaxation.bound >= best.cost * (1 - _BETTER):
                return best.found(best.cost, relaxation.bound, num_labels)
            width = min(width, _MOST_IN_ROWS) if len(relaxation.rows) > 1 else width
            found = search(relaxation, best.cost, width, progress)
            num_labels += found.num_labels
            least = best.cost if found.chosen is None else chain.cost(found.chosen)
            proven = max(proven, min(least, found.dropped_bound))
            if found.chosen is not None:
                best.repair(found.chosen)
                violated = relaxation.violated(chain.rows.values(found.chosen))
            is_long = max_labels < 10 * _NARROW * chain.num_units
            if violated or not np.isfinite(found.dropped_bound):
                break
            if is_long and max(proven, relaxation.bound) >= best.cost * (1 - _CLOSE):
                break
        if not violated:
            break
        for row in violated:
            relaxation.add(row)
    return best.found(max(proven, relaxation.bound), relaxation.bound, num_labels)


class Best:
    """The best choice so far that fits.

    Args:
        chain: Of the model.
        limit_bytes: Of the peak.
    """

    def __init__(self, chain: Chain, limit_bytes: int) -> None:
        self._chain, self._limit_bytes = chain, limit_bytes
        self.chosen: Ints | None = None
        self.cost = float("inf")

    def found(self, proven: float, relaxed: float, num_labels: int) -> Fastest:
        """The result of a search, with bounds that never exceed the choice's time."""
        assert self.chosen is not None
        return Fastest(self.chosen, self.cost, min(proven, self.cost), min(relaxed, self.cost), num_labels)

    def offer(self, chosen: Ints) -> None:
        """Take a choice if it is better and fits."""
        cost = self._chain.cost(chosen)
        if cost < self.cost and self._chain.peak_bytes(chosen) <= self._limit_bytes:
            self.chosen, self.cost = chosen.copy(), cost

    def repair(self, chosen: Ints) -> None:
        """Make a choice fit by changes that cost little for their bytes in the highest row, and offer it."""
        chosen, units = chosen.copy(), np.arange(self._chain.num_units)
        for _ in range(30):
            values = self._chain.rows.values(chosen)
            row = int(values.argmax())
            over = int(values[row]) - self._limit_bytes
            if over <= 0:
                self.offer(chosen)
                return
            terms = self._chain.rows.terms(row)
            less = np.minimum(terms[units, chosen][:, None] - terms, over)
            costs = np.where(less > 0, np.maximum(self.losses(chosen), 0) / np.maximum(less, 1), np.inf)
            options = costs.argmin(axis=1)
            costs, less = costs[units, options], less[units, options]
            changed = list(_apart(np.argsort(costs, kind="stable")[: int(np.isfinite(costs).sum())]))
            changed = changed[: int(np.searchsorted(np.cumsum(less[changed]), over)) + 1]
            if not changed:
                return
            chosen[changed] = options[changed]

    def losses(self, chosen: Ints) -> Floats:
        """Seconds that a step gets longer if one unit takes another option; shape (units, S)."""
        chain, units = self._chain, np.arange(self._chain.num_units)
        before, after = chain.neighbours(chosen)
        changed = chain.costs[units, before, :, after].copy()
        changed[1:] += chain.costs[units[:-1], before[:-1], chosen[:-1], :][:, chain.after]
        changed[:-1] += chain.costs[units[1:], :, chosen[1:], after[1:]][:, chain.before]
        return changed - changed[units, chosen][:, None]


def _apart(units: Ints) -> Iterator[int]:
    """Units that are far enough from those before them for their changes to add up."""
    taken = set[int]()
    for unit in units.tolist():
        if not any(near in taken for near in range(unit - 2, unit + 3)):
            taken.add(unit)
            yield unit


class Relaxation:
    """The chain with prices on the bytes of some memory rows.

    Args:
        chain: Of the model; options are closed in it.
        limit_bytes: Of every row.
        best: Is offered every choice on the way.
    """

    def __init__(self, chain: Chain, limit_bytes: int, best: Best) -> None:
        self.chain, self._limit_bytes, self._best = chain, limit_bytes, best
        self.rows: list[int] = []
        self.terms: Floats = np.zeros((0, chain.num_units, chain.num_options))
        self.caps: Floats = np.zeros(0)
        self.prices: Floats = np.zeros(0)
        self.bound = -np.inf
        self._alone: Floats = np.zeros((0, 0))
        self._known: list[tuple[Ints, float, Ints]] = []  # choices, their seconds, and their bytes in all rows
        self._evaluate(self.prices)

    def add(self, row: int) -> None:
        """Have a memory row count."""
        self.rows.append(row)
        self.terms = np.concatenate([self.terms, self.chain.rows.terms(row)[None].astype(np.float64)])
        self.caps = np.append(self.caps, float(self._limit_bytes - int(self.chain.rows.constant[row])))
        self.prices = np.append(self.prices, 0.0)
        self._alone = np.zeros((0, len(self.rows)))

    def violated(self, values: Ints | Floats) -> list[int]:
        """Up to two rows that exceed the limit most, that do not lie side by side and do not count yet."""
        found, num = list[int](), self.chain.num_units
        for row in np.argsort(-values, kind="stable").tolist():
            if values[row] <= self._limit_bytes * (1 + 1e-12) or len(found) == 2:
                break
            if all(abs(row % num - other % num) > 1 for other in found):
                found.append(row)
        return [row for row in found if row not in self.rows]

    @property
    def vectors(self) -> Floats:
        """The best prices, and those that are best where one row alone counts; shape (vectors, rows).

        Each gives a bound. What the units near a peak do decides which row is the highest: with that settled, the bound
        of one row alone is the better one.
        """
        return np.concatenate([self.prices[None], self._alone])

    def round(self) -> None:
        """Make choices that fit of those in the cheapest mix."""
        shares, *_ = self._mixed(range(len(self.rows)))
        for k in np.flatnonzero(shares[1:]).tolist():
            self._best.repair(self._known[k][0])

    def isolate(self) -> None:
        """Find the best price of each row alone, where there are several."""
        priced = np.flatnonzero(self.prices)
        self._alone = np.zeros((len(priced) if len(priced) > 1 else 0, len(self.rows)))
        for k, alone in zip(priced.tolist(), self._alone, strict=False):
            for _ in range(12):
                _, alone[k : k + 1], mixed = self._mixed([k])
                if mixed - self._evaluate(alone) <= 1e-7 * abs(mixed):
                    break

    def ascend(self) -> None:
        """Find the best prices, of the rows that count and of those that turn out to."""
        for _ in range(60):
            shares, prices, mixed = self._mixed(range(len(self.rows)))
            # Prices of a mix leap at first, so some of the best ones so far are kept.
            self._evaluate(0.7 * prices + 0.3 * self.prices)
            if mixed - self.bound > 1e-4 * abs(mixed):
                continue
            more = list[int]()
            if shares[0] == 0 and len(self.rows) < _MAX_ROWS:
                values = shares[1:] @ np.array([values for *_, values in self._known[: len(shares) - 1]])
                more = self.violated(values)[:1]
            if more:
                self.add(more[0])
            elif mixed - self.bound <= 1e-7 * abs(mixed):
                break

    def _mixed(self, which: Sequence[int]) -> tuple[Floats, Floats, float]:
        """The cheapest mix of known choices under some of the rows that count: shares, prices, seconds.

        The first choice is none of them: it fits, and is so slow that no mix needs it that fits otherwise.
        """
        rows, caps = [self.rows[k] for k in which], self.caps[list(which)]
        costs = np.array([cost for _, cost, _ in self._known])
        costs = np.concatenate([[100 * costs.max()], costs])
        over = np.array([values[rows] for *_, values in self._known]).reshape(len(self._known), len(rows))
        over = over - (self.chain.rows.constant[rows] + caps)
        over = np.concatenate([np.full((1, len(rows)), -float(self._limit_bytes)), over]) / self._limit_bytes
        shares, prices = mix(costs, over)
        return shares, prices / self._limit_bytes, float(shares @ costs)

    def _evaluate(self, prices: Floats) -> float:
        """Find the cheapest choice at some prices, keep and offer it; returns the bound."""
        least, chosen = self.chain.cheapest(np.tensordot(prices, self.terms, axes=1))
        bound = least - float(prices @ self.caps)
        bound -= 1e-10 * abs(bound)  # rounding
        if bound > self.bound:
            self.bound, self.prices = bound, prices.copy()
        if np.isfinite(least):
            self._best.offer(chosen)
            self._known.append((chosen, self.chain.cost(chosen), self.chain.rows.values(chosen)))
        return bound

    def tighten(self) -> None:
        """Close options that only choices have which are no better than the best known."""
        num_open, vectors = self.chain.is_open.sum(), self.vectors
        bounds = self.chain.through(np.tensordot(vectors, self.terms, axes=1)) - (vectors @ self.caps)[:, None, None]
        self.chain.close(bounds.max(axis=0) >= self._best.cost * (1 - _BETTER))
        if not self.chain.is_open.any(axis=1).all():
            self.bound = self._best.cost
            return
        self._known = [known for known in self._known if np.isfinite(self.chain.cost(known[0]))]
        if not self._known:
            self._evaluate(self.prices)
        if self.chain.is_open.sum() < 0.99 * num_open:
            self.ascend()


def mix(costs: Floats, over: Floats) -> tuple[Floats, Floats]:
    """The cheapest mix of choices whose mean holds every row's limit, by the simplex method.

    Args:
        costs: Seconds of each choice.
        over: By how much each choice exceeds each row; shape (choices, rows). The first one exceeds none.

    Returns:
        The shares, which add up to 1, and what a unit of each row is worth, none below 0.
    """
    num, num_rows, epsilon = *over.shape, 1e-11
    matrix = np.block([[over.T, np.eye(num_rows)], [np.ones((1, num)), np.zeros((1, num_rows))]])
    objective = np.concatenate([costs, np.zeros(num_rows)])
    basis = np.concatenate([[0], np.arange(num, num + num_rows)])  # the first choice, and what it leaves of each row
    for _ in range(20 * (num_rows + 2)):
        inverse = np.linalg.inv(matrix[:, basis])
        shares = inverse[:, -1]
        prices = objective[basis] @ inverse
        saved = prices @ matrix - objective
        entering = int(saved.argmax())
        moved = inverse @ matrix[:, entering]
        if saved[entering] <= epsilon * np.abs(costs[1:]).max(initial=0.0) or moved.max() <= epsilon:
            break
        steps = np.where(moved > epsilon, np.maximum(shares, 0) / np.maximum(moved, epsilon), np.inf)
        basis[steps.argmin()] = entering
    found = np.zeros(num + num_rows)
    found[basis] = np.maximum(shares, 0)
    return found[:num], np.maximum(-prices[:num_rows], 0)


@dataclass(frozen=True, slots=True)
class Search:
    """What a search has found.

    Args:
        chosen: The best choice under the rows that count, if it is better than the one that was known.
        dropped_bound: No choice that was dropped for want of room is better than this; infinite if none was.
        num_labels: How many were made.
    """

    chosen: Ints | None
    dropped_bound: float
    num_labels: int


def search(relaxation: Relaxation, upper: float, max_labels: int, progress: Progress = silent) -> Search:
    """Find the best choice below `upper` under the relaxation's rows, by dynamic programming over the chain.

    A label is a choice for the last units: its seconds and its bytes in each row. It is dropped if another that means
    the same to the other units takes no more time and no more bytes, if its bytes can no longer fit, or if its bound
    is not below `upper`. Of more than `max_labels` at a unit, those with the worst bounds are dropped, too, and the
    least of their bounds is returned.

    The search starts at the last unit because the peak of most models is near the start of backward: once those units
    are decided, so is which row is the highest, and each bound is nearly tight.
    """
    front = _Front(relaxation, upper)
    for stage in range(1, relaxation.chain.num_units):
        progress(f"searching among {len(front.labels.own)} choices, unit {stage + 1} of {relaxation.chain.num_units}")
        front.advance(stage, max_labels if stage > _EARLY else max(max_labels, _EARLY_LABELS))
    return Search(front.best(), front.dropped_bound, front.num_labels)


@dataclass(frozen=True, slots=True)
class _Labels:
    """Choices for the units so far.

    Args:
        before: The class of the last unit but one.
        own: The option of the last unit.
        cost: Seconds of all units but the last.
        used: Bytes in each row; shape (labels, rows).
        parent: Number of the label that each continues.
    """

    before: Ints
    own: Ints
    cost: Floats
    used: Floats
    parent: Ints

    def take(self, which: npt.NDArray[np.intp]) -> "_Labels":
        return _Labels(self.before[which], self.own[which], self.cost[which], self.used[which], self.parent[which])


class _Front:
    """The labels of a search, unit by unit from the last to the first."""

    def __init__(self, relaxation: Relaxation, upper: float) -> None:
        self._chain, self._terms = relaxation.chain.mirrored(), relaxation.terms[:, ::-1]
        self._caps, self._prices = relaxation.caps, relaxation.vectors
        self._upper = upper * (1 - _BETTER)
        self._follow = self._chain.following(np.tensordot(self._prices, self._terms, axes=1))
        closed = np.where(self._chain.is_open, 0.0, np.inf)
        self._least = _after((self._terms + closed).min(axis=2).T)  # bytes that later units add; (units, rows)
        self._most = _after((self._terms - closed).max(axis=2).T)
        self._parted = _parted(self._terms, closed)
        first = np.flatnonzero(self._chain.is_open[0])
        first = first[(self._terms[:, 0, first].T + self._least[0] <= self._caps).all(axis=1)]
        zeros = np.zeros(len(first), dtype=np.int64)
        self.labels = _Labels(zeros, first, np.zeros(len(first)), self._terms[:, 0, first].T, zeros)
        self._stages = [self.labels]
        self.dropped_bound, self.num_labels = float("inf"), len(first)

    def advance(self, stage: int, max_labels: int) -> None:
        """Continue the labels with each option of the next unit, and keep no more than so many."""
        chain, labels = self._chain, self.labels
        totals = labels.cost[:, None] + chain.costs[stage - 1, labels.before, labels.own][:, chain.after]
        over = (labels.used - self._caps) @ self._prices.T
        follow = self._follow[stage][:, chain.before[labels.own]]
        bounds = totals + (follow + over.T[:, :, None]).max(axis=0)
        parent, own = np.nonzero(bounds < self._upper)
        used = labels.used[parent] + self._terms[:, stage, own].T
        fits = (used + self._least[stage] <= self._caps).all(axis=1)
        parent, own, used = parent[fits], own[fits], used[fits]
        bounds = bounds[parent, own]
        kept = self._most_promising(bounds, 3 * max_labels)  # as many are compared with one another
        made = _Labels(chain.before[labels.own[parent]], own, totals[parent, own], used, parent).take(kept)
        unbeaten = self._unbeaten(made, stage)
        kept = kept[unbeaten]
        made = made.take(unbeaten)
        self.labels = made.take(self._most_promising(bounds[kept], max_labels))
        self._stages.append(self.labels)
        self.num_labels += len(self.labels.own)

    def _most_promising(self, bounds: Floats, num: int) -> npt.NDArray[np.intp]:
        """Numbers of the labels with the least bounds; keeps the least bound of those it drops."""
        if len(bounds) <= num:
            return np.arange(len(bounds))
        order = np.argsort(bounds, kind="stable")
        self.dropped_bound = min(self.dropped_bound, float(bounds[order[num]]))
        return order[:num]

    def _unbeaten(self, labels: _Labels, stage: int) -> npt.NDArray[np.intp]:
        """Numbers of the labels that no other beats, or of a few more.

        Those compare that mean the same to the units that follow: the last option's class is the same, and what the
        next unit's class adds to the seconds of the last one.
        """
        costs = self._chain.costs[stage, labels.before, labels.own]
        more = np.unique(costs - costs[:, :1], axis=0, return_inverse=True)[1].reshape(-1) if len(costs) else labels.own
        group = more * self._chain.costs.shape[1] + self._chain.before[labels.own]
        values = np.column_stack([labels.cost + costs[:, 0], self._excess(labels.used, stage)])
        order = np.lexsort([*values.T[::-1], group])
        parts = np.split(order, np.flatnonzero(np.diff(group[order])) + 1)
        return np.concatenate([part[_pareto(values[part])] for part in parts])

    def _excess(self, used: Floats, stage: int) -> Floats:
        """Bytes beyond the caps with the least that may come, as far as they tell labels apart; (labels, rows).

        Rows to which all that may come adds as much are one, of which the fullest counts; and less is not better where
        a row holds whatever comes.
        """
        excess, enough = used + self._least[stage] - self._caps, self._least[stage] - self._most[stage]
        is_one, found = self._parted <= stage, list[Floats]()
        for k in range(excess.shape[1]):
            if len(used) and not is_one[k, :k].any():
                fullest = excess[:, is_one[k]].max(axis=1)
                if fullest.max() > enough[k] and not any(np.ptp(fullest - other) == 0 for other in found):
                    found.append(np.maximum(fullest, enough[k]))
        return np.array(found).reshape(len(found), len(used)).T

    def best(self) -> Ints | None:
        """The best choice, once there are no more units, if it is better than `upper`; in the order of the model."""
        labels = self.labels
        if not len(labels.own):
            return None
        final = labels.cost + self._chain.costs[-1, labels.before, labels.own, 0]
        label = int(final.argmin())
        if final[label] >= self._upper:
            return None
        chosen = []
        for labels in reversed(self._stages):
            chosen.append(int(labels.own[label]))
            label = int(labels.parent[label])
        return np.array(chosen)


def _after(values: Floats) -> Floats:
    """For each unit the sum over those after it; shape (units, rows)."""
    return np.cumsum(values[::-1], axis=0)[::-1] - values


def _parted(terms: Floats, closed: Floats) -> Ints:
    """For each two rows the last unit of which an option adds more to one than to the other; -1 for none."""
    found, units = np.full((len(terms), len(terms)), -1), np.arange(terms.shape[1])
    for k in range(len(terms)):
        more = terms - terms[k]
        does_tell = (more - closed).max(axis=2) > (more + closed).min(axis=2)
        found[k] = np.where(does_tell, units, -1).max(axis=1)
    return found


def _pareto(values: Floats) -> npt.NDArray[np.bool_]:
    """Which labels no other beats in every value, of labels that are sorted by these, the first value first.

    Those of a block are compared with each other and with the first block: some that are beaten may stay.
    """
    if values.shape[1] == 1:
        return np.arange(len(values)) == 0
    if values.shape[1] == 2:
        return np.diff(np.minimum.accumulate(values[:, 1]), prepend=np.inf) < 0
    kept, size = np.ones(len(values), dtype=bool), 1024
    for start in range(0, len(values), size):
        block = values[start : start + size]
        rivals = block if start == 0 else np.concatenate([values[:size], block])
        beats = np.arange(len(rivals))[:, None] < np.arange(len(block)) + len(rivals) - len(block)
        for rival, own in zip(rivals.T[1:], block.T[1:], strict=True):  # it takes no more time, for it comes first
            beats &= rival[:, None] <= own
        kept[start : start + size] = ~beats.any(axis=0)
    return kept


@dataclass(frozen=True, slots=True)
class Smallest:
    """The choice with the smallest peak that was found.

    Args:
        chosen: The option of each unit.
        peak_bytes: Its peak.
        least_bytes: No choice has a smaller one.
    """

    chosen: Ints
    peak_bytes: int
    least_bytes: int

    @property
    def is_exact(self) -> bool:
        """Whether it is the smallest there is."""
        return self.peak_bytes == self.least_bytes


def smallest_peak(chain: Chain, *, enough_bytes: int = 0, is_exact: bool = False) -> Smallest:
    """Find a choice whose peak is as small as possible, and a bound on all of them.

    Args:
        chain: Of the model.
        enough_bytes: A peak that is no larger need not be made smaller.
        is_exact: Whether to search between the bounds, where they differ.
    """
    floor = chain.rows.least(chain.is_open)
    terms = np.where(chain.is_open, chain.rows.terms(int(floor.argmax())), np.iinfo(np.int64).max)
    chosen = terms.argmin(axis=1)
    best = Smallest(chosen, chain.peak_bytes(chosen), int(floor.max()))
    if best.is_exact or best.peak_bytes <= enough_bytes:
        return best
    best = _leveled(chain, best, enough_bytes)
    return _between(chain, best) if is_exact and not best.is_exact else best


def _leveled(chain: Chain, best: Smallest, enough_bytes: int) -> Smallest:
    """Change one unit after the other so that the highest rows, which join as they turn up, become lower together.

    A row counts by an exponential of its bytes. It starts flat, so that all high rows count, and becomes steeper,
    until it is nearly their maximum. Whatever each row counts, the choice with the least weighted bytes is a bound.
    """
    chosen, rows = best.chosen.copy(), list[int]()
    terms, scale = np.zeros((chain.num_units, chain.num_options, 0)), 0.05 * best.peak_bytes
    closed = np.where(chain.is_open, 0.0, np.inf)
    for _ in range(60):
        values = chain.rows.values(chosen)
        if values.max() < best.peak_bytes:
            best = replace(best, chosen=chosen.copy(), peak_bytes=int(values.max()))
        if best.is_exact or best.peak_bytes <= enough_bytes:
            break
        row, is_new = int(values.argmax()), int(values.argmax()) not in rows
        if is_new:
            rows.append(row)
            terms = np.concatenate([terms, chain.rows.terms(row)[:, :, None].astype(np.float64)], axis=2)
        loads, is_same = values[rows].astype(np.float64), not is_new
        for unit in range(chain.num_units):
            others = loads - terms[unit, chosen[unit]]
            option = int((_worth(others + terms[unit], scale) + closed[unit]).argmin())
            if option != chosen[unit]:
                loads, is_same = others + terms[unit, option], False
                chosen[unit] = option
        weights = np.exp((loads - loads.max()) / scale)
        weights /= weights.sum()
        cheapest = (terms @ weights + closed).min(axis=1).sum() + chain.rows.constant[rows] @ weights
        best = replace(best, least_bytes=max(best.least_bytes, int(np.ceil(cheapest * (1 - 1e-12)))))
        if is_same:
            if scale <= 1e-4 * best.peak_bytes:
                break
            scale *= 0.7
    return best


def _worth(loads: Floats, scale: float) -> Floats:
    """The logarithm of what rows of so many bytes count together; shape (options)."""
    most = loads.max(axis=1)
    return most + scale * np.log(np.exp((loads - most[:, None]) / scale).sum(axis=1))


def _between(chain: Chain, best: Smallest) -> Smallest:
    """Halve what lies between the bounds: does any choice fit into the middle?"""
    free = replace(chain, costs=np.where(np.isfinite(chain.costs), 0.0, np.inf))
    rows, num_labels = list[int](), 0
    while not best.is_exact and num_labels < _MOST_BETWEEN:
        limit_bytes = (best.least_bytes + best.peak_bytes) // 2
        relaxation = Relaxation(free, limit_bytes, Best(free, limit_bytes))
        for row in rows:
            relaxation.add(row)
        while num_labels < _MOST_BETWEEN:
            found = search(relaxation, np.inf, max(10, _MOST_BETWEEN // chain.num_units))
            num_labels += found.num_labels + 1
            if found.chosen is None:
                if np.isfinite(found.dropped_bound):
                    return best
                best = replace(best, least_bytes=limit_bytes + 1)
                break
            values = chain.rows.values(found.chosen)
            if values.max() < best.peak_bytes:
                best = replace(best, chosen=found.chosen, peak_bytes=int(values.max()))
            if values.max() <= limit_bytes:
                break
            rows.append(int(values.argmax()))
            relaxation.add(rows[-1])
    return best
