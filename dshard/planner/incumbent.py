"""The best choice so far that fits, and how others are made of choices that are nearly as good."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dshard.planner.chain import Chain, Floats
from dshard.planner.memory import Ints
from dshard.planner.swaps import Swaps

_MAX_ROUNDS, _MAX_REPAIRS = 100, 30
_NUM_TRIED = 16
_MOST_SWAPS = 256  # of one kind that are looked at
_APART = 3  # units between which changes neither add up nor take away


@dataclass(frozen=True, slots=True)
class Priced:
    """Memory rows with a price per byte.

    Args:
        rows: Their numbers.
        terms: Bytes of each option of each unit; shape (rows, units, S).
        prices: One for each.
    """

    rows: list[int]
    terms: Floats
    prices: Floats

    @property
    def penalties(self) -> Floats:
        """Seconds that the bytes of each option of each unit are worth."""
        found: Floats = np.tensordot(self.prices, self.terms, axes=1)
        return found


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

    def repair(self, chosen: Ints) -> None:
        """Make a choice fit: while a row is over the limit, those changes that cost least for the bytes."""
        chosen, units = chosen.copy(), np.arange(self._chain.num_units)
        for _ in range(_MAX_REPAIRS):
            swaps = Swaps(self._chain, chosen)
            row = int(swaps.values.argmax())
            over = int(swaps.values[row]) - self.limit_bytes
            if over <= 0:
                self.offer(chosen)
                return
            terms = self._chain.rows.terms(row)
            less = np.minimum(terms[units, chosen][:, None] - terms, over)
            costs = np.where(less > 0, np.maximum(-swaps.gains, 0) / np.maximum(less, 1), np.inf)
            options = costs.argmin(axis=1)
            costs, less = costs[units, options], less[units, options]
            order = np.argsort(costs, kind="stable")
            order = order[: int(np.isfinite(costs).sum())]
            apart = order[list(_apart(order[:_MOST_SWAPS]))]
            apart = apart[: int(np.searchsorted(np.cumsum(less[apart]), over)) + 1]
            if not len(apart):
                return
            chosen[apart] = options[apart]

    def improve(self, priced: Priced | None = None) -> None:
        """Change the options of some units, one or two at a time, as long as that helps.

        Args:
            priced: Tells of which units one can give up what another gains by.
        """
        for _ in range(_MAX_ROUNDS if self.chosen is not None else 0):
            assert self.chosen is not None
            swaps = Swaps(self._chain, self.chosen)
            if not self._change_some(swaps) and (priced is None or not self._exchange(swaps, priced)):
                return

    def _change_some(self, swaps: Swaps) -> bool:
        """Take those changes that save time and fit, as many as together do."""
        gains = swaps.gains.ravel()
        found = np.flatnonzero(gains > 1e-12 * self.cost)
        found = found[np.argsort(-gains[found])[:_MOST_SWAPS]]
        units, options = np.divmod(found, swaps.gains.shape[1])
        fits = np.flatnonzero(swaps.peaks(units, options) <= self.limit_bytes)
        apart = list(_apart(units[fits]))
        while apart:
            changed = swaps.chosen.copy()
            changed[units[fits[apart]]] = options[fits[apart]]
            if self.offer(changed):
                return True
            apart = apart[: len(apart) // 2]
        return False

    def _exchange(self, swaps: Swaps, priced: Priced) -> bool:
        """Have one unit give up bytes by which another saves more."""
        worth, gains = priced.penalties, swaps.gains
        units, chosen = np.arange(len(gains)), swaps.chosen
        loss = worth - worth[units, chosen][:, None] - gains  # hardly anything, for what is nearly as good
        some, eps = [], 1e-12 * self.cost
        for mask in (gains > eps, (gains <= eps) & (worth < worth[units, chosen][:, None])):
            found = np.flatnonzero(mask & np.isfinite(loss))
            some.append(np.divmod(found[np.argsort(loss.ravel()[found])[:_MOST_SWAPS]], gains.shape[1]))
        (one, takes), (other, gives) = some
        saved = gains[one, takes][:, None] + gains[other, gives]
        fits = (saved > eps) & (np.abs(one[:, None] - other) >= _APART)
        for row, terms in zip(priced.rows, priced.terms, strict=True):
            more = terms - terms[units, chosen][:, None]
            fits &= more[one, takes][:, None] + more[other, gives] <= self.limit_bytes - swaps.values[row]
        pairs = np.flatnonzero(fits)
        for place in pairs[np.argsort(-saved.ravel()[pairs])[:_NUM_TRIED]]:
            i, j = divmod(int(place), len(other))
            changed = chosen.copy()
            changed[one[i]], changed[other[j]] = takes[i], gives[j]
            if self.offer(changed):
                return True
        return False


def _apart(units: Ints) -> Iterator[int]:
    """Places of units that are far enough from those before them for what they change to add up."""
    taken = set[int]()
    for place, unit in enumerate(units.tolist()):
        if not any(near in taken for near in range(unit - _APART + 1, unit + _APART)):
            taken.add(unit)
            yield place
