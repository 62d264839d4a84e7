"""Lower bounds on the time of a chain under a memory limit, and good choices on the way.

Memory rows are put into the objective with a price per byte (Lagrange). What is left is a shortest path through the
chain; its length is a lower bound whatever the prices, and best prices make it nearly tight. They are found with the
cheapest mix of the choices so far that fits on average: its prices lead to a choice that is new, or are the best.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from dshard.planner.chain import Chain, Floats
from dshard.planner.incumbent import Incumbent, Priced
from dshard.planner.memory import Ints
from dshard.planner.mixing import mix
from dshard.planner.paths import Paths

_MAX_STEPS = 60
_STEPS_ALONE = 12
_CAUTION = 0.3  # of the best prices so far in what is tried next: those of a mix leap at first
_MAX_ROWS = 12
_MOST_SPLICED = 3
_ENOUGH_CLOSED = 0.01  # of all options, for more of them to be likely
_TOLERANCE, _NEAR = 1e-7, 1e-4  # relative: bounds that differ by less do not pay for more steps; or for another row
_SLOW = 100.0  # times the longest step that there is, for a mix that fits always


@dataclass(frozen=True, slots=True)
class _Known:
    """A choice that was the cheapest at some prices.

    Args:
        chosen: The choice.
        cost: Its seconds.
        values: Bytes of all memory rows.
    """

    chosen: Ints
    cost: float
    values: Floats


class Relaxation:
    """The chain with prices on some memory rows.

    Args:
        chain: Of the model.
        limit_bytes: Of every row.
        incumbent: That is offered every choice on the way.
    """

    def __init__(self, chain: Chain, limit_bytes: int, incumbent: Incumbent) -> None:
        self._chain, self._limit_bytes, self._incumbent = chain, limit_bytes, incumbent
        self._paths = Paths(chain)
        self.rows: list[int] = []
        self.terms: Floats = np.zeros((0, chain.num_units, chain.num_options))
        self.caps: Floats = np.zeros(0)
        self.prices: Floats = np.zeros(0)
        self._alone: Floats = np.zeros((0, 0))
        self._known: list[_Known] = []
        self.bound = -np.inf
        self.chosen = self._evaluate(self.prices)

    def add(self, row: int) -> None:
        """Have a memory row count."""
        constant = int(self._chain.rows.constant[row])
        self.rows.append(row)
        self.terms = np.concatenate([self.terms, self._chain.rows.terms(row)[None].astype(np.float64)])
        self.caps = np.append(self.caps, float(self._limit_bytes - constant))
        self.prices = np.append(self.prices, 0.0)
        self._alone = np.zeros((0, len(self.rows)))

    def new_of(self, rows: Sequence[int]) -> list[int]:
        """Constraints that do not count yet."""
        return [row for row in rows if row not in self.rows]

    @property
    def known_prices(self) -> Floats:
        """The best prices, and those that are best where one row alone counts; shape (vectors, rows).

        Each gives a bound. What the units near a peak do decides which row is the highest: with that settled, the bound
        of one row alone is the better one.
        """
        return np.concatenate([self.prices[None], self._alone])

    def ascend(self) -> None:
        """Find the best prices, of the rows that count and of those that turn out to."""
        for _ in range(_MAX_STEPS):
            shares, prices, mixed = self._mixed(range(len(self.rows)))
            self._evaluate((1 - _CAUTION) * prices + _CAUTION * self.prices)
            if mixed - self.bound > _NEAR * abs(mixed):
                continue
            row = self._exceeded(shares)
            if row is not None:
                self.add(row)
            elif mixed - self.bound <= _TOLERANCE * abs(mixed):
                break

    def _exceeded(self, shares: Floats) -> int | None:
        """The row that a mix exceeds most, if it does not count yet."""
        if shares[0] > 0 or len(self.rows) >= _MAX_ROWS:
            return None
        values = shares[1:] @ np.array([known.values for known in self._known[: len(shares) - 1]])
        row = int(values.argmax())
        return row if values[row] > self._limit_bytes * (1 + 1e-9) and row not in self.rows else None

    def isolate(self) -> None:
        """Find the best price of each row alone, where there are several."""
        priced = np.flatnonzero(self.prices)
        self._alone = np.zeros((len(priced) if len(priced) > 1 else 0, len(self.rows)))
        for k, alone in zip(priced.tolist(), self._alone, strict=False):
            for _ in range(_STEPS_ALONE):
                _, price, mixed = self._mixed([k])
                alone[k] = price[0]
                if mixed - self._evaluate(alone) <= _TOLERANCE * abs(mixed):
                    break

    def _mixed(self, rows: Sequence[int]) -> tuple[Floats, Floats, float]:
        """The cheapest mix of known choices under some of the rows that count: shares, prices, seconds.

        The first one is none of them: it fits, and is so slow that no other mix that fits needs it.
        """
        costs = np.array([known.cost for known in self._known])
        costs = np.concatenate([[_SLOW * costs.max()], costs])
        mine = [self.rows[k] for k in rows]
        over = np.array([known.values[mine] for known in self._known]).reshape(len(self._known), len(mine))
        over -= self._chain.rows.constant[mine] + self.caps[list(rows)]
        over = np.concatenate([np.full((1, len(mine)), -float(self._limit_bytes)), over]) / self._limit_bytes
        shares, prices = mix(costs, over)
        return shares, prices / self._limit_bytes, float(shares @ costs)

    def _evaluate(self, prices: Floats) -> float:
        """The cheapest choice at these prices, offered and kept; gives its value, which is a bound."""
        least, chosen = self._paths.cheapest(np.tensordot(prices, self.terms, axes=1))
        bound = least - float(prices @ self.caps)
        if bound > self.bound:
            self.bound, self.prices = bound, prices.copy()
        self._incumbent.offer(chosen)
        self._keep(chosen)
        return bound

    def _keep(self, chosen: Ints) -> None:
        cost = self._chain.cost(chosen)
        if np.isfinite(cost):
            self._known.append(_Known(chosen, cost, self._chain.rows.values(chosen).astype(np.float64)))

    def round(self) -> None:
        """Make choices that fit of those in the cheapest mix."""
        shares, _, _ = self._mixed(range(len(self.rows)))
        order = np.argsort(-shares[1:], kind="stable")[: int((shares[1:] > 0).sum())]
        mixed = [self._known[k].chosen for k in order]
        for chosen in mixed:
            self._incumbent.repair(chosen)
        for one, other in combinations(mixed[:_MOST_SPLICED], 2):
            self._incumbent.splice(one, other)
        self._incumbent.improve(self.priced)

    @property
    def priced(self) -> Priced:
        """The rows at their best prices."""
        return Priced(self.rows, self.terms, self.prices)

    def dive(self, head: Ints) -> None:
        """Look for good choices with some options given: few rows are then the highest.

        Args:
            head: Option of each unit, -1 where it is open.
        """
        chain = self._chain.copy()
        chain.close((head >= 0)[:, None] & (np.arange(chain.num_options) != head[:, None]))
        below = Relaxation(chain, self._limit_bytes, self._incumbent)
        for row in self.rows:
            below.add(row)
        below.caps = self.caps
        below.ascend()
        below.round()

    def tighten(self) -> None:
        """Close options that only choices no better than the incumbent have, and round the rows' limits down.

        With what is left, the bytes of a row are a constant and multiples of some number; what the limit has beyond
        those is of no use. Both keep every choice that is better than the incumbent.
        """
        prices = self.known_prices
        bounds = self._paths.through(np.tensordot(prices, self.terms, axes=1)) - (prices @ self.caps)[None, :, None]
        num_open = int(self._chain.is_open.sum())
        self._chain.close(bounds.max(axis=1) >= self._incumbent.cost * (1 - 1e-12))
        caps = np.array([self._rounded_cap(k) for k in range(len(self.rows))])
        num_closed = num_open - int(self._chain.is_open.sum())
        if not self._chain.is_open.any(axis=1).all():
            self.bound = self._incumbent.cost
            return
        self._paths = Paths(self._chain)
        self._known = [known for known in self._known if np.isfinite(self._chain.cost(known.chosen))]
        if not self._known:
            self._evaluate(self.prices)
        if num_closed <= _ENOUGH_CLOSED * num_open and (caps == self.caps).all():
            return
        self.caps = caps
        self.ascend()

    def _rounded_cap(self, k: int) -> float:
        """What the units' bytes of row `k` can be at most, if they fit."""
        terms, is_open = self.terms[k].astype(np.int64), self._chain.is_open
        base = np.where(is_open, terms, np.iinfo(np.int64).max).min(axis=1)
        step = int(np.gcd.reduce(np.where(is_open, terms - base[:, None], 0), axis=None))
        total = int(base.sum())
        over = int(self.caps[k]) - total
        return float(total + over // step * step) if step > 1 and over >= 0 else float(self.caps[k])
