"""Lower bounds on the time of a chain under a memory limit, and good choices on the way.

Memory rows are put into the objective with a price per byte (Lagrange). What is left is a shortest path through the
chain; its length is a lower bound whatever the prices, and best prices make it nearly tight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dshard.planner.chain import Chain, Floats
from dshard.planner.memory import Ints

_MAX_STEPS = 40
_MAX_SWAPS = 200
_NUM_TRIED = 16
_ENOUGH_CLOSED = 0.01  # of all options, for more of them to be likely
_TOLERANCE = 1e-7  # relative: bounds that differ by less do not pay for more steps
_BRACKET = (1.003, 1.1, 2.0)  # of a price that was the best ahead of a small change


class Incumbent:
    """The best choice so far that fits.

    Args:
        chain: Of the model.
        limit_bytes: That its peak must not exceed.
    """

    def __init__(self, chain: Chain, limit_bytes: int) -> None:
        self._chain, self.limit_bytes = chain, limit_bytes
        self.chosen: Ints | None = None
        self.cost = float("inf")

    def offer(self, chosen: Ints) -> bool:
        """Take a choice if it is better and fits; says whether."""
        cost = self._chain.cost(chosen)
        if cost < self.cost and self._chain.peak_bytes(chosen) <= self.limit_bytes:
            self.chosen, self.cost = chosen.copy(), cost
            return True
        return False

    def splice(self, one: Ints, other: Ints) -> None:
        """Try the front of one choice with the back of the other: of two that lie on either side of the limit."""
        for front, back in ((one, other), (other, one)):
            costs = self._splice_costs(front, back)
            below = np.flatnonzero(costs < self.cost)
            for cut in below[np.argsort(costs[below])][:_NUM_TRIED]:
                self.offer(np.concatenate([front[:cut], back[cut:]]))
            is_front_larger = self._chain.peak_bytes(front) > self.limit_bytes
            low, high = 0, len(front)  # peaks are nearly monotone in the cut
            while low < high:
                cut = (low + high) // 2
                spliced = np.concatenate([front[:cut], back[cut:]])
                self.offer(spliced)
                fits = self._chain.peak_bytes(spliced) <= self.limit_bytes
                low, high = (cut + 1, high) if fits == is_front_larger else (low, cut)

    def _splice_costs(self, front: Ints, back: Ints) -> Floats:
        """Seconds of each splice, but for the two units at the cut."""
        ahead = np.concatenate([[0.0], np.cumsum(self._chain.stage_costs(front))])
        behind = np.concatenate([np.cumsum(self._chain.stage_costs(back)[::-1])[::-1], [0.0]])
        return ahead + behind

    def improve(self) -> None:
        """Change the option of one unit at a time, as long as that helps."""
        for _ in range(_MAX_SWAPS if self.chosen is not None else 0):
            assert self.chosen is not None
            gains = self._swap_gains(self.chosen)
            found = np.flatnonzero(gains.ravel() > 1e-12 * self.cost)
            for place in found[np.argsort(-gains.ravel()[found])][:_NUM_TRIED]:
                changed = self.chosen.copy()
                changed[place // gains.shape[1]] = place % gains.shape[1]
                if self.offer(changed):
                    break
            else:
                return

    def _swap_gains(self, chosen: Ints) -> Floats:
        """Seconds that each other option of each unit saves, alone."""
        chain, units = self._chain, np.arange(self._chain.num_units)
        before, after = chain.neighbours(chosen)
        changed = chain.costs[units, before, :, after].copy()
        changed[1:] += chain.costs[units[:-1], before[:-1], chosen[:-1], :][:, chain.after]
        changed[:-1] += chain.costs[units[1:], :, chosen[1:], after[1:]][:, chain.before]
        now: Floats = changed[units, chosen]
        gains: Floats = now[:, None] - changed
        return gains


@dataclass(frozen=True, slots=True)
class _Line:
    """A choice, and the bound that it gives as a line in one price.

    Args:
        chosen: The choice.
        value: At a price of 0.
        slope: By how many bytes it exceeds the row's limit.
    """

    chosen: Ints
    value: float
    slope: float


def following(chain: Chain, penalties: Floats) -> Floats:
    """The least that a unit and those after it add, for its own option and the class of the unit before it.

    Args:
        chain: Of the model.
        penalties: Of each option of each unit, for some prices; shape (vectors, units, S).

    Returns:
        Shape (units + 1, vectors, A, S), zero after the last unit.
    """
    vectors, num, size = penalties.shape
    classes, later = chain.costs.shape[1], _Classes(chain.after)
    follow = np.zeros((num + 1, vectors, classes, size))
    each = np.empty((chain.costs.shape[3], vectors, classes, size))
    for i in range(num - 1, -1, -1):
        own = chain.costs[i].transpose(2, 0, 1)[:, None]  # the unit after comes first: to add up and compare long rows
        after = later.least(follow[i + 1])[:, chain.before]
        np.add(own, after.transpose(2, 0, 1)[:, :, None], out=each)
        np.minimum.reduce(each, axis=0, out=follow[i])
        follow[i] += penalties[:, i, None]
    return follow


class _Classes:
    """Options by their classes.

    Args:
        classes: Of each option.
    """

    def __init__(self, classes: Ints) -> None:
        self._order = np.argsort(classes, kind="stable")
        self._starts = np.flatnonzero(np.diff(classes[self._order], prepend=-1))

    def least(self, values: Floats, axis: int = -1) -> Floats:
        """The least of each class along an axis of options."""
        found: Floats = np.minimum.reduceat(np.take(values, self._order, axis), self._starts, axis)
        return found


class Relaxation:
    """The chain with prices on some memory rows.

    Args:
        chain: Of the model.
        limit_bytes: Of every row.
        incumbent: That is offered every choice on the way.
    """

    def __init__(self, chain: Chain, limit_bytes: int, incumbent: Incumbent) -> None:
        self._chain, self._limit_bytes, self._incumbent = chain, limit_bytes, incumbent
        self.rows: list[int] = []
        self.terms: Floats = np.zeros((0, chain.num_units, chain.num_options))
        self.caps: Floats = np.zeros(0)
        self.prices: Floats = np.zeros(0)
        self._alone: list[float] = []
        self.bound = -np.inf
        self.chosen = self._evaluate(self.prices)

    def add(self, row: int) -> None:
        """Have a memory row count."""
        constant = int(self._chain.rows.constant[row])
        self.rows.append(row)
        self.terms = np.concatenate([self.terms, self._chain.rows.terms(row)[None].astype(np.float64)])
        self.caps = np.append(self.caps, float(self._limit_bytes - constant))
        self.prices = np.append(self.prices, 0.0)
        self._alone.append(0.0)

    def new_of(self, rows: Sequence[int]) -> list[int]:
        """Constraints that do not count yet."""
        return [row for row in rows if row not in self.rows]

    @property
    def known_prices(self) -> Floats:
        """The best prices, and those that are best where one row alone counts; shape (vectors, rows).

        Each gives a bound. What the units near a peak do decides which row is the highest: with that settled, the bound
        of one row alone is the better one.
        """
        alone = (
            np.diag(self._alone)[np.flatnonzero(self._alone)] if len(self.rows) > 1 else np.zeros((0, len(self.rows)))
        )
        return np.concatenate([self.prices[None], alone])

    def ascend(self) -> None:
        """Find good prices: of each new row alone, and then one row at a time with those of the others."""
        for k, alone in enumerate(self._alone):
            if not alone:
                prices = np.zeros(len(self.rows))
                prices[k] = self.prices.sum()
                self._alone[k], _ = self._ascend(k, prices)
            if alone or len(self.rows) > 1:
                self._ascend(k, self.prices.copy())
        self.chosen = self._evaluate(self.prices)

    def _evaluate(self, prices: Floats) -> Ints:
        """The cheapest choice at these prices, and its value as a bound."""
        chain = self._chain
        follow = following(chain, np.tensordot(prices, self.terms, axes=1)[None])[:, 0]
        chosen = np.zeros(chain.num_units, dtype=np.int64)
        before, own = 0, int(follow[0][0].argmin())
        for i in range(chain.num_units):
            chosen[i], costs = own, chain.costs[i, before, own]
            before = int(chain.before[own])
            own = int((costs[chain.after] + follow[i + 1, before]).argmin())
        bound = float(follow[0][0].min() - prices @ self.caps)
        if bound > self.bound or len(prices) != len(self.prices):
            self.bound, self.prices = bound, prices.copy()
        self._incumbent.offer(chosen)
        return chosen

    def _line(self, chosen: Ints, prices: Floats, k: int) -> "_Line":
        """The bound that one choice gives as a line in the price of row `k`."""
        over = self.terms[:, np.arange(self._chain.num_units), chosen].sum(axis=1) - self.caps
        rest = prices.copy()
        rest[k] = 0.0
        return _Line(chosen, self._chain.cost(chosen) + float(rest @ over), float(over[k]))

    def _line_at(self, price: float, prices: Floats, k: int) -> "_Line":
        """The line of the cheapest choice at a price of row `k`, which is set in `prices`."""
        prices[k] = price
        return self._line(self._evaluate(prices), prices, k)

    def _ascend(self, k: int, prices: Floats) -> tuple[float, Ints]:
        """The best price of row `k`, those of the others as they are: where two lines cross, again and again.

        Returns:
            The price, and the cheapest choice on the way that fits into the row.
        """
        low, high = self._bracket(prices, k)
        if low is None:
            low = self._line_at(0.0, prices, k)
            if low.slope <= 0:
                return 0.0, low.chosen
        if high is None:
            least = np.where(self._chain.is_open, self.terms[k], np.inf).argmin(axis=1)
            self._incumbent.offer(least)
            high = self._line(least, prices, k)
        price = 0.0
        for _ in range(_MAX_STEPS):
            if high.slope >= low.slope:
                break
            price = (high.value - low.value) / (low.slope - high.slope)
            if price <= 0:
                break
            line = self._line_at(price, prices, k)
            crossing = low.value + price * low.slope
            if line.value + price * line.slope >= crossing - _TOLERANCE * abs(crossing):
                break
            low, high = (line, high) if line.slope > 0 else (low, line)
        self._incumbent.splice(low.chosen, high.chosen)
        return max(price, 0.0), high.chosen

    def _bracket(self, prices: Floats, k: int) -> tuple["_Line | None", "_Line | None"]:
        """Lines of choices on both sides of the limit, near the price that row `k` has; None where none is near."""
        price, low, high = float(prices[k]), None, None
        if price <= 0:
            return None, None
        line = self._line_at(price, prices, k)
        is_too_low = line.slope > 0
        for factor in _BRACKET:
            low, high = (line, high) if line.slope > 0 else (low, line)
            if low is not None and high is not None:
                break
            line = self._line_at(price * factor if is_too_low else price / factor, prices, k)
        return low, high

    def dive(self, head: Ints) -> Ints:
        """Look for good choices with some options given: one row is then the highest.

        Args:
            head: Option of each unit, -1 where it is open.

        Returns:
            A choice that fits into that row.
        """
        chain = self._chain.copy()
        chain.close((head >= 0)[:, None] & (np.arange(chain.num_options) != head[:, None]))
        below = Relaxation(chain, self._limit_bytes, self._incumbent)
        for row in self.rows:
            below.add(row)
        below.caps = self.caps
        prices = self.known_prices
        follow = following(chain, np.tensordot(prices, self.terms, axes=1))
        best = prices[int((follow[0, :, 0].min(axis=1) - prices @ self.caps).argmax())].copy()
        return below._ascend(int(best.argmax()), best)[1]

    def tighten(self) -> None:
        """Close options that only choices no better than the incumbent have, and round the rows' limits down.

        With what is left, the bytes of a row are a constant and multiples of some number; what the limit has beyond
        those is of no use. Both keep every choice that is better than the incumbent.
        """
        closes = self._through() >= self._incumbent.cost * (1 - 1e-12)
        num_open = int(self._chain.is_open.sum())
        self._chain.close(closes)
        caps = np.array([self._rounded_cap(k) for k in range(len(self.rows))])
        num_closed = num_open - int(self._chain.is_open.sum())
        if num_closed <= _ENOUGH_CLOSED * num_open and (caps == self.caps).all():
            return
        if not self._chain.is_open.any(axis=1).all():
            self.bound = self._incumbent.cost
            return
        self.caps = caps
        self.ascend()

    def _through(self) -> Floats:
        """Bound, for each option of each unit, all choices that have it."""
        chain, prices = self._chain, self.known_prices
        penalties = np.tensordot(prices, self.terms, axes=1)
        follow = following(chain, penalties)
        earlier = _Classes(chain.before)
        ahead = np.full((len(prices), chain.costs.shape[1], chain.num_options), np.inf)
        ahead[:, 0] = 0.0
        through = np.empty((chain.num_units, len(prices), chain.num_options))
        for i in range(chain.num_units):
            np.minimum.reduce(ahead + follow[i], axis=1, out=through[i])
            own = np.minimum.reduce(ahead[..., None] + chain.costs[i], axis=1) + penalties[:, i, :, None]
            ahead = earlier.least(own, axis=1)[:, :, chain.after]
        bounds: Floats = (through - (prices @ self.caps)[None, :, None]).max(axis=1)
        return bounds

    def _rounded_cap(self, k: int) -> float:
        """What the units' bytes of row `k` can be at most, if they fit."""
        terms, is_open = self.terms[k].astype(np.int64), self._chain.is_open
        base = np.where(is_open, terms, np.iinfo(np.int64).max).min(axis=1)
        step = int(np.gcd.reduce(np.where(is_open, terms - base[:, None], 0), axis=None))
        total = int(base.sum())
        over = int(self.caps[k]) - total
        return float(total + over // step * step) if step > 1 and over >= 0 else float(self.caps[k])
