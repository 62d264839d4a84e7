"""An exact search along the chain: labels of time and bytes, of which only those stay that none beats."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dshard.planner.bounds import Relaxation, following
from dshard.planner.chain import Chain, Floats
from dshard.planner.memory import Ints
from dshard.planner.progress import SILENT, Progress

TOLERANCE = 1e-12  # relative: a choice that is better by less is no better
_BLOCK = 1024
_NUM_EARLY, _EARLY_LABELS = 8, 4000  # stages whose decisions tell rows apart
_SPARE = 3  # times as many labels are compared with one another as may stay
_NUM_PROMISING = 2
_NUM_NEAR = 3


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


def search(chain: Chain, relaxation: Relaxation, upper: float, max_labels: int, progress: Progress = SILENT) -> Search:
    """The best choice below `upper` under the relaxation's rows, by dynamic programming over the chain.

    A label is dropped if another with the same last two options takes no more time and no more bytes in any row, if
    its bytes can no longer fit, or if its bound is not below `upper`. If a stage has more than `max_labels`, those
    with the worst bounds are dropped too, and the least of their bounds is given back.
    """
    front = _Front(_Course.of(chain, relaxation), relaxation.caps, upper)
    for stage in range(1, chain.num_units):
        progress.at(f"searching among {len(front.labels.own)} choices", (stage + 1) / chain.num_units)
        front.advance(max_labels if stage > _NUM_EARLY else max(max_labels, _EARLY_LABELS))
    return Search(front.best(), front.dropped_bound, front.num_labels)


def promising(chain: Chain, relaxation: Relaxation, upper: float) -> list[Ints]:
    """Options of the last units that leave the best bounds, one choice of them for each effect on the rows.

    Returns:
        Choices, -1 for what is still open; those with the best bounds first.
    """
    course = _Course.of(chain, relaxation)
    front = _Front(course, relaxation.caps, upper)
    for _ in range(min(_NUM_EARLY, chain.num_units) - 1):
        front.advance(_EARLY_LABELS)
    found: dict[tuple[float, ...], Ints] = {}
    for label in np.argsort(front.bounds().min(axis=1), kind="stable") if chain.num_units > _NUM_EARLY else ():
        used, chosen = front.labels.used[label], front.traced(int(label))
        key = tuple(used - used[0]) if len(used) > 1 else tuple(chosen[:_NUM_NEAR])
        found.setdefault(key, course.in_order(chosen))
        if len(found) == _NUM_PROMISING:
            break
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Course:
    """What a search goes along: the chain and its rows from the last unit on, where the peak of most models is.

    What the units near a peak do decides which row is the highest, and with that each bound is nearly tight.

    Args:
        chain: The mirror image of the chain.
        terms: Bytes per row, unit and option.
        prices: Shape (vectors, rows): each gives a bound.
        follow: For all of these, as `following` gives it.
    """

    chain: Chain
    terms: Floats
    prices: Floats
    follow: Floats

    @classmethod
    def of(cls, chain: Chain, relaxation: Relaxation) -> "_Course":
        mirrored, terms, prices = chain.mirrored(), relaxation.terms[:, ::-1], relaxation.known_prices
        return cls(mirrored, terms, prices, following(mirrored, np.tensordot(prices, terms, axes=1)))

    def in_order(self, chosen: Ints) -> Ints:
        """The first options of a course as a choice, -1 for the rest."""
        found = np.full(self.chain.num_units, -1, dtype=np.int64)
        found[self.chain.num_units - len(chosen) :] = chosen[::-1]
        return found


class _Front:
    """The labels of a search, stage by stage.

    Args:
        course: Of the search.
        caps: What each row may hold.
        upper: Only choices that take less are looked for.
    """

    def __init__(self, course: _Course, caps: Floats, upper: float) -> None:
        self._course, self._caps = course, caps
        self._upper = upper * (1 - TOLERANCE) if np.isfinite(upper) else upper
        self._least, self._most = _futures(course.chain, course.terms)
        self._alike = course.chain.alike()
        fits = (course.terms[:, 0].T + self._least[0] <= caps).all(axis=1)
        first = np.flatnonzero(course.chain.is_open[0] & fits)
        zeros = np.zeros(len(first), dtype=np.int64)
        self.labels = _Labels(zeros, first, np.zeros(len(first)), course.terms[:, 0, first].T, zeros)
        self._stages = [self.labels]
        self.dropped_bound, self.num_labels = float("inf"), len(first)

    def _totals(self) -> Floats:
        """Seconds of each label with each option of the next unit."""
        labels, chain = self.labels, self._course.chain
        costs = chain.costs[len(self._stages) - 1]
        totals: Floats = labels.cost[:, None] + costs[labels.before, labels.own][:, chain.after]
        return totals

    def bounds(self) -> Floats:
        """What each label takes at least with each option of the next unit."""
        return self._bounds(self._totals())

    def _bounds(self, totals: Floats) -> Floats:
        course, labels = self._course, self.labels
        over = (labels.used - self._caps) @ course.prices.T
        follow = course.follow[len(self._stages)][:, course.chain.before[labels.own]]
        found: Floats = totals + (follow + over.T[:, :, None]).max(axis=0)
        return found

    def advance(self, max_labels: int) -> None:
        """Go on to the next unit, with no more than so many labels."""
        chain, labels, stage = self._course.chain, self.labels, len(self._stages)
        totals = self._totals()
        bounds = self._bounds(totals)
        parent, own = np.nonzero(bounds < self._upper)
        used = labels.used[parent] + self._course.terms[:, stage, own].T
        fits = (used + self._least[stage] <= self._caps).all(axis=1)
        parent, own, used = parent[fits], own[fits], used[fits]
        if len(own) > _SPARE * max_labels:
            kept = self._most_promising(bounds[parent, own], _SPARE * max_labels)
            parent, own, used = parent[kept], own[kept], used[kept]
        made = _Labels(self._alike[stage, chain.before[labels.own[parent]]], own, totals[parent, own], used, parent)
        made = made.take(_unbeaten(made, self._caps - self._most[stage], chain.num_options))
        if len(made.own) > max_labels:
            made = made.take(self._most_promising(bounds[made.parent, made.own], max_labels))
        self.labels = made
        self._stages.append(made)
        self.num_labels += len(made.own)

    def _most_promising(self, bounds: Floats, num: int) -> npt.NDArray[np.intp]:
        """Numbers of the labels with the least bounds; the least of the others is what is dropped."""
        order = np.argsort(bounds, kind="stable")
        self.dropped_bound = min(self.dropped_bound, float(bounds[order[num]]))
        return order[:num]

    def best(self) -> Ints | None:
        """The best choice, once there are no more units, if it is better than what is looked for."""
        labels = self.labels
        if not len(labels.own):
            return None
        final = labels.cost + self._course.chain.costs[-1, labels.before, labels.own, 0]
        best = int(final.argmin())
        return self._course.in_order(self.traced(best)) if final[best] < self._upper else None

    def traced(self, label: int) -> Ints:
        """The options that a label stands for, along the course."""
        chosen = np.zeros(len(self._stages), dtype=np.int64)
        for stage in range(len(self._stages) - 1, -1, -1):
            chosen[stage] = self._stages[stage].own[label]
            label = int(self._stages[stage].parent[label])
        return chosen


@dataclass(frozen=True, slots=True)
class _Labels:
    """Ways to choose the first units: the class of the last but one, the last's option, seconds without it, bytes."""

    before: Ints
    own: Ints
    cost: Floats
    used: Floats
    parent: Ints

    def take(self, which: npt.NDArray[np.intp]) -> "_Labels":
        return _Labels(self.before[which], self.own[which], self.cost[which], self.used[which], self.parent[which])


def _futures(chain: Chain, terms: Floats) -> tuple[Floats, Floats]:
    """The least and the most bytes that the units after each one add, per row; shape (units, rows)."""
    is_open = chain.is_open[None]
    least = np.where(is_open, terms, np.inf).min(axis=2).T
    most = np.where(is_open, terms, -np.inf).max(axis=2).T

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
