"""The smallest peak that a chain can have: whether anything fits, and by how much it does not."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dshard.errors import PlanError
from dshard.planner.bounds import Relaxation
from dshard.planner.chain import Chain, Floats
from dshard.planner.costs import ModelCosts
from dshard.planner.few_rows import few_rows_advice
from dshard.planner.incumbent import Incumbent
from dshard.planner.labels import search
from dshard.planner.memory import Ints
from dshard.planner.tables import named
from dshard.policies import Strategy

_MAX_ROUNDS = 20
_MAX_LABELS = 20_000  # of all units and all searches together
_FEWEST = 10  # labels of each unit
_MAX_SWEEPS = 60
_FIRST, _LAST, _COOLER = 0.05, 1e-4, 0.7  # of a peak: differences of rows that hardly count, and what they become


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


def smallest_peak(chain: Chain, *, enough_bytes: int = 0, is_exact: bool = False) -> Smallest:
    """The smallest peak: each unit with what is smallest in the row that decides, in turn for some rows.

    Args:
        chain: Of the model.
        enough_bytes: A peak that is no larger need not be made smaller.
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
    if best.is_exact or best.peak_bytes <= enough_bytes:
        return best
    best = _leveled(chain, best, enough_bytes)
    return _between(chain, best) if is_exact and not best.is_exact else best


def does_not_fit(
    model: ModelCosts, chain: Chain, known: Sequence[Strategy], limit_bytes: int, num_ranks: int
) -> PlanError:
    """Tell by how many bytes, at which moment, and which units hold most then."""
    smallest = smallest_peak(chain, is_exact=True)
    row = int(chain.rows.values(smallest.chosen).argmax())
    phase, unit = chain.rows.name(row)
    terms = chain.rows.terms(row)[np.arange(chain.num_units), smallest.chosen]
    largest = np.argsort(-terms, kind="stable")[:3]
    kinds, places = np.divmod(chain.numbers[smallest.chosen], len(known))
    choices = [named(known[place], model.kinds[kind]) for kind, place in zip(kinds, places, strict=True)]
    held = ", ".join(f"{model.units[i].name} ({terms[i]} bytes, {choices[i]})" for i in largest)
    when = f"{phase} of {model.units[unit].name}"
    found = "there is" if smallest.is_exact else "that was found"
    advice = few_rows_advice([model.units[i] for i in largest], known, num_ranks)
    others = ["a smaller batch", "more ranks"]
    others += [] if any(kind.checkpointing != "none" for kind in model.kinds) else ["activation checkpointing"]
    others += ["split(q)"] if all(each.num_slices == 1 for each in known) else []
    others += [] if any(kind.is_offloaded for kind in model.kinds) else ["offload"]
    return PlanError(
        f"plan: the peak must fit into {limit_bytes} bytes, but the smallest {found} takes "
        f"{smallest.peak_bytes} bytes, {smallest.peak_bytes - limit_bytes} too many, in the {when}; most of it is of "
        f"{held}. Use {advice}{', '.join(others)}, or units of fewer parameters."
    )


def _leveled(chain: Chain, best: Smallest, enough_bytes: int) -> Smallest:
    """Change one unit after the other so that the highest rows, which join as they turn up, become lower together.

    A row counts by an exponential of its bytes; the steeper, the nearer to their maximum is what is made least.
    Whatever each row is worth, no choice has a smaller peak than the cheapest one has bytes.
    """
    chosen, rows, units = best.chosen.copy(), list[int](), range(chain.num_units)
    terms, scale = np.zeros((chain.num_units, chain.num_options, 0)), _FIRST * best.peak_bytes
    closed = np.where(chain.is_open, 0.0, np.inf)
    for _ in range(_MAX_SWEEPS):
        values = chain.rows.values(chosen)
        if values.max() < best.peak_bytes:
            best = replace(best, chosen=chosen.copy(), peak_bytes=int(values.max()))
        if best.is_exact or best.peak_bytes <= enough_bytes:
            break
        row = int(values.argmax())
        if row not in rows:
            rows.append(row)
            terms = np.concatenate([terms, chain.rows.terms(row)[:, :, None].astype(np.float64)], axis=2)
        loads, is_same = values[rows].astype(np.float64), True
        for unit in units:
            others = loads - terms[unit, chosen[unit]]
            option = int((_worth(others + terms[unit], scale) + closed[unit]).argmin())
            if option != chosen[unit]:
                loads, is_same = others + terms[unit, option], False
                chosen[unit] = option
        weights = np.exp((loads - loads.max()) / scale)
        weights /= weights.sum()
        cheapest = (terms @ weights + closed).min(axis=1).sum() + chain.rows.constant[rows] @ weights
        best = replace(best, least_bytes=max(best.least_bytes, int(np.ceil(cheapest * (1 - 1e-12)))))
        if is_same and int(chain.rows.values(chosen).argmax()) in rows:
            if scale <= _LAST * best.peak_bytes:
                break
            scale *= _COOLER
    peak = chain.peak_bytes(chosen)
    return replace(best, chosen=chosen, peak_bytes=peak) if peak < best.peak_bytes else best


def _worth(loads: Floats, scale: float) -> Floats:
    """The logarithm of what rows of so many bytes are worth together; shape (options)."""
    most = loads.max(axis=1)
    found: Floats = most + scale * np.log(np.exp((loads - most[:, None]) / scale).sum(axis=1))
    return found


def _between(chain: Chain, best: Smallest) -> Smallest:
    """Halve what lies between the bounds: does any choice fit into the middle?"""
    free = chain.with_costs(np.where(np.isfinite(chain.costs), 0.0, np.inf))
    rows: list[int] = []
    num_labels = 0
    while not best.is_exact and num_labels < _MAX_LABELS:
        limit_bytes = (best.least_bytes + best.peak_bytes) // 2
        relaxation = Relaxation(free, limit_bytes, Incumbent(free, limit_bytes))
        for row in rows:
            relaxation.add(row)
        while num_labels < _MAX_LABELS:
            found = search(free, relaxation, np.inf, max(_FEWEST, _MAX_LABELS // chain.num_units))
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
