"""The smallest peak that a chain can have: whether anything fits, and by how much it does not."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dshard.errors import PlanError
from dshard.planner.chain import Chain, Floats
from dshard.planner.costs import ModelCosts, ParamCosts, UnitCosts
from dshard.planner.memory import Ints
from dshard.planner.search import Best, Relaxation, search
from dshard.planner.sizes import sharing
from dshard.planner.tables import named
from dshard.planner.texts import bytes_text
from dshard.policies import Strategy

_MAX_LABELS = 20_000  # of all units and all searches together
_MUCH = 0.05  # of a peak, or of the elements of some units


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
    found: Floats = most + scale * np.log(np.exp((loads - most[:, None]) / scale).sum(axis=1))
    return found


def _between(chain: Chain, best: Smallest) -> Smallest:
    """Halve what lies between the bounds: does any choice fit into the middle?"""
    free = replace(chain, costs=np.where(np.isfinite(chain.costs), 0.0, np.inf))
    rows, num_labels = list[int](), 0
    while not best.is_exact and num_labels < _MAX_LABELS:
        limit_bytes = (best.least_bytes + best.peak_bytes) // 2
        relaxation = Relaxation(free, limit_bytes, Best(free, limit_bytes))
        for row in rows:
            relaxation.add(row)
        while num_labels < _MAX_LABELS:
            found = search(relaxation, np.inf, max(10, _MAX_LABELS // chain.num_units))
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


def does_not_fit(
    model: ModelCosts, chain: Chain, known: Sequence[Strategy], limit_bytes: int, num_ranks: int
) -> PlanError:
    """Say by how many bytes nothing fits, at which moment, and which units hold most then."""
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
    others = [*_longer_dim([model.units[i] for i in largest], known, num_ranks), "a smaller batch", "more ranks"]
    others += [] if any(kind.checkpointing != "none" for kind in model.kinds) else ["activation checkpointing"]
    others += ["split(q)"] if all(each.num_slices == 1 for each in known) else []
    others += [] if any(kind.is_offloaded for kind in model.kinds) else ["offload"]
    return PlanError(
        f"plan: the peak must fit into {limit_bytes} bytes, but the smallest {found} takes "
        f"{smallest.peak_bytes} bytes, {smallest.peak_bytes - limit_bytes} too many, in the {when}; most of it is of "
        f"{held}. Use {', '.join(others)}, or units of fewer parameters."
    )


def _longer_dim(units: Sequence[UnitCosts], strategies: Sequence[Strategy], num_ranks: int) -> list[str]:
    """Advise to shard along a longer dim, where much of some units is cut along one of fewer elements than ranks."""
    within = max(sharing(strategy, num_ranks) for strategy in strategies)
    found = [param for unit in units for param in _of_few_rows(unit, within)]
    if sum(param.numel for param in found) <= _MUCH * sum(unit.numel for unit in units):
        return []
    param = max(found, key=lambda each: each.numel)
    return [
        f"a shard_placement_fn that returns Shard of a longer dim ({param.name} is cut along one of {param.length})"
    ]


def few_rows_text(units: Sequence[UnitCosts], strategies: Sequence[Strategy], num_ranks: int, peak: int) -> list[str]:
    """Say what parameters cost that are cut along a dim of fewer elements than ranks, and the way out.

    Some ranks then hold nothing of them, and others more than their part; nothing where that is little of the peak.
    """
    found, more = list[ParamCosts](), 0.0
    for unit, strategy in zip(units, strategies, strict=True):
        within = sharing(strategy, num_ranks)
        for param in () if unit.is_offloaded else _of_few_rows(unit, within):
            grad = param.stored_itemsize if param.grad_itemsize else 0
            each = param.stored_itemsize + grad + param.state_bytes_per_element
            more += (param.shard_numel(within) - param.numel / within) * each
            found.append(param)
    if not found or more < _MUCH * peak:
        return []
    param = max(found, key=lambda each: each.numel)
    others = f" (and {len(found) - 1} more along one of fewer elements than ranks)" if len(found) > 1 else ""
    return [
        f"  {param.name} is cut along a dim of {param.length}{others}: the largest shards are about",
        f"  {bytes_text(round(more))} larger than even ones; pass plan and fully_shard a shard_placement_fn that "
        "returns Shard of a longer one",
    ]


def _of_few_rows(unit: UnitCosts, within: int) -> list[ParamCosts]:
    return [param for param in unit.params if 1 < param.length < within]
