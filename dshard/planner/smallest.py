"""The smallest peak that a chain can have: whether anything fits, and by how much it does not."""

from dataclasses import dataclass, replace

import numpy as np

from dshard.planner.bounds import Relaxation
from dshard.planner.chain import Chain
from dshard.planner.incumbent import Incumbent
from dshard.planner.labels import search
from dshard.planner.memory import Ints

_MAX_ROUNDS = 20
_MAX_SEARCHES = 200
_MAX_LABELS = 10_000


@dataclass(frozen=True, slots=True)
class Smallest:
    """The choice with the smallest peak that was found.

    Args:
        chosen: The choice.
        peak_bytes: Its peak.
        least_bytes: No choice has a smaller one.
    """

    chosen: Ints
    peak_bytes: int
    least_bytes: int

    @property
    def is_exact(self) -> bool:
        """Whether it is the smallest."""
        return self.peak_bytes == self.least_bytes


def smallest_peak(chain: Chain, *, is_exact: bool = False) -> Smallest:
    """The smallest peak: each unit with what is smallest in the row that decides, in turn for some rows.

    Args:
        chain: Of the model.
        is_exact: Whether to search for it between the bounds, where they differ.
    """
    floor = chain.rows.least(chain.is_open)
    row, least_bytes = int(floor.argmax()), int(floor.max())
    best: Smallest | None = None
    for _ in range(_MAX_ROUNDS):
        chosen = np.where(chain.is_open, chain.rows.terms(row), np.iinfo(np.int64).max).argmin(axis=1)
        values = chain.rows.values(chosen)
        if best is None or values.max() < best.peak_bytes:
            best = Smallest(chosen, int(values.max()), least_bytes)
        if best.is_exact or int(values.argmax()) == row:
            break
        row = int(values.argmax())
    assert best is not None
    return _between(chain, best) if is_exact and not best.is_exact else best


def _between(chain: Chain, best: Smallest) -> Smallest:
    """Halve what lies between the bounds: does any choice fit into the middle?"""
    free = chain.with_costs(np.where(np.isfinite(chain.costs), 0.0, np.inf))
    rows: list[int] = []
    num_searches = 0
    while not best.is_exact and num_searches < _MAX_SEARCHES:
        limit_bytes = (best.least_bytes + best.peak_bytes) // 2
        relaxation = Relaxation(free, limit_bytes, Incumbent(free, limit_bytes))
        for row in rows:
            relaxation.add(row)
        while num_searches < _MAX_SEARCHES:
            num_searches += 1
            found = search(free, relaxation, np.inf, _MAX_LABELS)
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
