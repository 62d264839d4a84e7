"""An exact search along the chain: labels of time and bytes, of which only those stay that none beats."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dshard.planner.bounds import Relaxation
from dshard.planner.chain import Chain, Floats
from dshard.planner.memory import Ints

__all__ = ["Search", "search"]

TOLERANCE = 1e-12  # relative: a choice that is better by less is no better
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Search:
    """What a search has found.

    Args:
        chosen: The best choice under the rows that count, if it is better than the one that was known.
        dropped_bound: No choice that was left out for want of room is better than this; infinite if none was.
        num_labels: How many were made.
    """

    chosen: Ints | None
    dropped_bound: float
    num_labels: int


@dataclass(frozen=True, slots=True)
class _Labels:
    """Ways to choose the first units: options of the last two, seconds without the last, bytes per row."""

    before: Ints
    own: Ints
    cost: Floats
    used: Floats
    parent: Ints

    def take(self, which: npt.NDArray[np.intp]) -> "_Labels":
        return _Labels(self.before[which], self.own[which], self.cost[which], self.used[which], self.parent[which])


def search(chain: Chain, relaxation: Relaxation, upper: float, max_labels: int) -> Search:
    """The best choice below `upper` under the relaxation's rows, by dynamic programming over the chain.

    A label is dropped if another with the same last two options takes no more time and no more bytes in any row, if
    its bytes can no longer fit, or if its bound is not below `upper`. If a stage has more than `max_labels`, those
    with the worst bounds are dropped too, and the least of their bounds is given back.
    """
    upper = upper * (1 - TOLERANCE) if np.isfinite(upper) else upper
    least, most = _futures(chain, relaxation)
    classes = chain.classes()
    offset = float(relaxation.prices @ relaxation.caps)
    fits = (relaxation.terms[:, 0].T + least[0] <= relaxation.caps).all(axis=1)
    first = np.flatnonzero(chain.is_open[0] & fits)
    zeros = np.zeros(len(first), dtype=np.int64)
    labels = _Labels(zeros, first, np.zeros(len(first)), relaxation.terms[:, 0, first].T, zeros)
    stages, dropped, num_labels = [labels], np.inf, len(first)
    for i in range(chain.num_units - 1):
        total = labels.cost[:, None] + chain.costs[i, labels.before, labels.own]
        bounds = total + relaxation.follow[i + 1, labels.own] + (labels.used @ relaxation.prices - offset)[:, None]
        parent, own = np.nonzero(bounds < upper)
        used = labels.used[parent] + relaxation.terms[:, i + 1, own].T
        fits = (used + least[i + 1] <= relaxation.caps).all(axis=1)
        parent, own, used = parent[fits], own[fits], used[fits]
        made = _Labels(classes[i + 1, labels.own[parent]], own, total[parent, own], used, parent)
        made = made.take(_unbeaten(made, relaxation.caps - most[i + 1], chain.num_options))
        if len(made.own) > max_labels:
            order = np.argsort(bounds[made.parent, made.own], kind="stable")
            dropped = min(dropped, float(bounds[made.parent, made.own][order[max_labels]]))
            made = made.take(order[:max_labels])
        labels = made
        stages.append(labels)
        num_labels += len(labels.own)
    if not len(labels.own):
        return Search(None, dropped, num_labels)
    final = labels.cost + chain.costs[-1, labels.before, labels.own, 0]
    best = int(final.argmin())
    if not final[best] < upper:
        return Search(None, dropped, num_labels)
    return Search(_trace(stages, best), dropped, num_labels)


def _futures(chain: Chain, relaxation: Relaxation) -> tuple[Floats, Floats]:
    """The least and the most bytes that the units after each one add, per row; shape (units, rows)."""
    is_open = chain.is_open[None]
    least = np.where(is_open, relaxation.terms, np.inf).min(axis=2).T
    most = np.where(is_open, relaxation.terms, -np.inf).max(axis=2).T

    def after(values: Floats) -> Floats:
        sums: Floats = np.cumsum(values[::-1], axis=0)[::-1] - values
        return sums

    return after(least), after(most)


def _unbeaten(labels: _Labels, enough: Floats, num_options: int) -> npt.NDArray[np.intp]:
    """Numbers of the labels that no other with the same last two options beats, or all but some that are beaten.

    Args:
        labels: Of one stage.
        enough: Bytes per row below which the row holds whatever comes: there less is not better.
        num_options: Per unit.
    """
    group = labels.before * num_options + labels.own
    used = labels.used[:, _distinct(labels.used, enough)]
    order = np.lexsort([labels.cost, *used.T[::-1], group])
    kept = []
    for part in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        if not len(part):
            continue
        if used.shape[1] <= 1:
            cost = labels.cost[part]
            lowest = np.minimum.accumulate(cost)
            kept.append(part[np.concatenate([[True], cost[1:] < lowest[:-1]])])
        else:
            kept.append(_unbeaten_rows(part, np.column_stack([labels.cost, used])[part]))
    return np.concatenate(kept) if kept else np.zeros(0, dtype=np.intp)


def _distinct(used: Floats, enough: Floats) -> list[int]:
    """The rows that tell labels apart: not those that hold whatever comes, nor those that move with a stricter one."""
    if not len(used):
        return []
    kept: list[int] = []
    for k in np.argsort(used.max(axis=0) - enough)[::-1]:
        if used[:, k].max() <= enough[k]:
            continue
        if not any(np.ptp(used[:, k] - used[:, other]) == 0 for other in kept):
            kept.append(int(k))
    return kept


def _unbeaten_rows(part: npt.NDArray[np.intp], values: Floats) -> npt.NDArray[np.intp]:
    """The same in several rows, block by block: those of a block are compared with it and with the first block."""
    order = np.lexsort(values.T[::-1])  # by time first: who beats comes before who is beaten
    part, values = part[order], values[order]
    kept = np.ones(len(part), dtype=bool)
    for start in range(0, len(part), _BLOCK):
        block = values[start : start + _BLOCK]
        rivals = block if start == 0 else np.concatenate([values[:_BLOCK], block])
        beats = (rivals[:, None] <= block[None]).all(axis=2)
        offset = len(rivals) - len(block)
        beats &= np.arange(len(rivals))[:, None] < np.arange(len(block))[None] + offset
        kept[start : start + _BLOCK] = ~beats.any(axis=0)
    return part[kept]


def _trace(stages: list[_Labels], last: int) -> Ints:
    chosen = np.zeros(len(stages), dtype=np.int64)
    for i in range(len(stages) - 1, -1, -1):
        chosen[i] = stages[i].own[last]
        last = int(stages[i].parent[last])
    return chosen
