"""Lower bounds on the time of a chain under a memory limit, and good choices on the way.

Memory rows are put into the objective with a price per byte (Lagrange). What is left is a shortest path through the
chain; its length is a lower bound whatever the prices, and best prices make it nearly tight.
"""

import numpy as np

from dshard.planner.chain import Chain, Floats
from dshard.planner.memory import Ints

__all__ = ["Incumbent", "Relaxation"]

_MAX_STEPS = 40
_MAX_SWAPS = 200
_NUM_TRIED = 16
_MAX_TIGHTENINGS = 4


class Incumbent:
    """The best choice so far that fits.

    Args:
        chain: Of the model.
        limit_bytes: That its peak must not exceed.
    """

    def __init__(self, chain: Chain, limit_bytes: int) -> None:
        self._chain, self._limit_bytes = chain, limit_bytes
        self.chosen: Ints | None = None
        self.cost = float("inf")

    def offer(self, chosen: Ints) -> bool:
        """Take a choice if it is better and fits; says whether."""
        cost = self._chain.cost(chosen)
        if cost < self.cost and self._chain.peak_bytes(chosen) <= self._limit_bytes:
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
            is_front_larger = self._chain.peak_bytes(front) > self._limit_bytes
            low, high = 0, len(front)  # peaks are nearly monotone in the cut
            while low < high:
                cut = (low + high) // 2
                spliced = np.concatenate([front[:cut], back[cut:]])
                self.offer(spliced)
                fits = self._chain.peak_bytes(spliced) <= self._limit_bytes
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
        costs, num = self._chain.costs, self._chain.num_units
        units, zero = np.arange(num), np.zeros(1, dtype=np.int64)
        one_before, one_after = np.concatenate([zero, chosen[:-1]]), np.concatenate([chosen[1:], zero])
        changed = costs[units, one_before, :, one_after].copy()
        two_before = np.concatenate([zero, one_before[:-1]])
        changed[1:] += costs[units[:-1], two_before[1:], chosen[:-1], :]
        two_after = np.concatenate([one_after[1:], zero])
        changed[:-1] += costs[units[1:], :, chosen[1:], two_after[:-1]]
        now: Floats = changed[units, chosen]
        gains: Floats = now[:, None] - changed
        return gains


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
        self.follow: Floats = np.zeros((chain.num_units + 1, chain.num_options, chain.num_options))
        self.bound = -np.inf
        self.chosen = self._evaluate(self.prices)

    def add(self, row: int) -> None:
        """Have a memory row count."""
        constant = int(self._chain.rows.constant[row])
        self.rows.append(row)
        self.terms = np.concatenate([self.terms, self._chain.rows.terms(row)[None].astype(np.float64)])
        self.caps = np.append(self.caps, float(self._limit_bytes - constant))
        self.prices = np.append(self.prices, 0.0)

    def ascend(self) -> None:
        """Find good prices, one row at a time, and then all of them again."""
        num_rounds = 1 if len(self.rows) == 1 else 3
        for _ in range(num_rounds):
            before = self.bound
            for k in range(len(self.rows)):
                self._ascend(k)
            if self.bound <= before * (1 + 1e-9):
                break
        self.chosen = self._evaluate(self.prices)

    def _evaluate(self, prices: Floats) -> Ints:
        """The cheapest choice at these prices, and its value as a bound."""
        chain = self._chain
        penalties = np.tensordot(prices, self.terms, axes=1)
        follow = np.zeros_like(self.follow)
        for i in range(chain.num_units - 1, -1, -1):
            np.add((chain.costs[i] + follow[i + 1]).min(axis=2), penalties[i], out=follow[i])
        chosen = np.zeros(chain.num_units, dtype=np.int64)
        before, own = 0, int(follow[0][0].argmin())
        for i in range(chain.num_units):
            chosen[i] = own
            before, own = own, int((chain.costs[i, before, own] + follow[i + 1, own]).argmin())
        bound = float(follow[0][0].min() - prices @ self.caps)
        if bound > self.bound or len(prices) != len(self.prices):
            self.bound, self.prices, self.follow = bound, prices.copy(), follow
        self._incumbent.offer(chosen)
        return chosen

    def _line(self, chosen: Ints, prices: Floats, k: int) -> tuple[float, float]:
        """The bound that one choice gives as a line in the price of row `k`: its value at 0, and its slope."""
        over = self.terms[:, np.arange(self._chain.num_units), chosen].sum(axis=1) - self.caps
        rest = prices.copy()
        rest[k] = 0.0
        return self._chain.cost(chosen) + float(rest @ over), float(over[k])

    def _ascend(self, k: int) -> None:
        """The best price of row `k`, those of the others as they are: where two lines cross, again and again."""
        prices = self.prices.copy()
        prices[k] = 0.0
        low = self._evaluate(prices)
        value_low, slope_low = self._line(low, prices, k)
        if slope_low <= 0:
            return
        high = np.where(self._chain.is_open, self.terms[k], np.inf).argmin(axis=1)
        self._incumbent.offer(high)
        value_high, slope_high = self._line(high, prices, k)
        for _ in range(_MAX_STEPS):
            if slope_high >= slope_low:
                break
            prices[k] = (value_high - value_low) / (slope_low - slope_high)
            if prices[k] <= 0:
                break
            chosen = self._evaluate(prices)
            value, slope = self._line(chosen, prices, k)
            crossing = value_low + prices[k] * slope_low
            if value + prices[k] * slope >= crossing - 1e-12 * abs(crossing):
                break
            if slope > 0:
                low, value_low, slope_low = chosen, value, slope
            else:
                high, value_high, slope_high = chosen, value, slope
        self._incumbent.splice(low, high)

    def tighten(self) -> None:
        """Close options that only choices no better than the incumbent have, and round the rows' limits down.

        With what is left, the bytes of a row are a constant and multiples of some number; what the limit has beyond
        those is of no use. Both keep every choice that is better than the incumbent.
        """
        for _ in range(_MAX_TIGHTENINGS):
            closes = self._through() >= self._incumbent.cost * (1 - 1e-12)
            num_open = int(self._chain.is_open.sum())
            self._chain.close(closes)
            caps = np.array([self._rounded_cap(k) for k in range(len(self.rows))])
            if int(self._chain.is_open.sum()) == num_open and (caps == self.caps).all():
                return
            if not self._chain.is_open.any(axis=1).all():
                self.bound = self._incumbent.cost
                return
            self.caps = caps
            self.ascend()

    def _through(self) -> Floats:
        """For each option of each unit, a bound for all choices that have it."""
        chain = self._chain
        penalties = np.tensordot(self.prices, self.terms, axes=1)
        ahead = np.full((chain.num_options, chain.num_options), np.inf)
        ahead[0] = 0.0
        through = np.empty((chain.num_units, chain.num_options))
        for i in range(chain.num_units):
            through[i] = (ahead + self.follow[i]).min(axis=0)
            ahead = (ahead[:, :, None] + chain.costs[i]).min(axis=0) + penalties[i][:, None]
        bounds: Floats = through - self.prices @ self.caps
        return bounds

    def _rounded_cap(self, k: int) -> float:
        """What the units' bytes of row `k` can be at most, if they fit."""
        terms, is_open = self.terms[k].astype(np.int64), self._chain.is_open
        base = np.where(is_open, terms, np.iinfo(np.int64).max).min(axis=1)
        step = int(np.gcd.reduce(np.where(is_open, terms - base[:, None], 0), axis=None))
        total = int(base.sum())
        over = int(self.caps[k]) - total
        return float(total + over // step * step) if step > 1 and over >= 0 else float(self.caps[k])
