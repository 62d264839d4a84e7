"""An exact search along the chain: labels of time and bytes, of which only those stay that none beats."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dshard.planner.bounds import Relaxation
from dshard.planner.chain import Chain, Floats
from dshard.planner.memory import Ints
from dshard.planner.paths import Paths
from dshard.planner.progress import SILENT, Progress

TOLERANCE = 1e-12  # relative: a choice that is better by less is no better
_BLOCK = 1024
_NUM_EARLY, _EARLY_LABELS = 8, 4000  # stages whose decisions tell rows apart
_SPARE = 3  # times as many labels are compared with one another as may stay
_NUM_PROMISING = 1
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
        follow: For all of these, as `Paths.following` gives it.
    """

    chain: Chain
    terms: Floats
    prices: Floats
    follow: Floats

    @classmethod
    def of(cls, chain: Chain, relaxation: Relaxation) -> "_Course":
        mirrored, terms, prices = chain.mirrored(), relaxation.terms[:, ::-1], relaxation.known_prices
        return cls(mirrored, terms, prices, Paths(mirrored).following(np.tensordot(prices, terms, axes=1)))

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
        self._alike, self._parted = course.chain.alike(), _parted(course.chain, course.terms)
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
        made = made.take(self._unbeaten(made, stage))
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

    def _unbeaten(self, labels: "_Labels", stage: int) -> npt.NDArray[np.intp]:
        """Numbers of the labels that no other beats, or all but some that are beaten.

        Those compare that mean the same to the units that follow: the last option's class is the same, and what the
        next unit's class adds to the seconds of the last one.
        """
        costs = self._course.chain.costs[stage].reshape(-1, self._course.chain.costs.shape[3])
        place = labels.before * self._course.chain.num_options + labels.own
        kinds, kind = np.unique(place, return_inverse=True)
        more = costs[kinds] - costs[kinds, :1]
        more = np.unique(more, axis=0, return_inverse=True)[1].reshape(-1) if len(kinds) else kinds
        group = more[kind] * self._course.chain.costs.shape[1] + self._course.chain.before[labels.own]
        return _unbeaten(group, labels.cost + costs[place, 0], self._excess(labels.used, stage))

    def _excess(self, used: Floats, stage: int) -> Floats:
        """Bytes beyond the limits with the least that may come, as far as they tell labels apart: (labels, rows).

        Rows to which all that may come adds as much are one, of which the fullest counts; and less is not better where
        a row holds whatever comes.
        """
        excess, enough = used + self._least[stage] - self._caps, self._least[stage] - self._most[stage]
        is_one, found = self._parted <= stage, list[tuple[float, Floats, float]]()
        for k in range(excess.shape[1]):
            if len(used) and not is_one[k, :k].any():
                fullest = excess[:, is_one[k]].max(axis=1)
                found.append((float(fullest.max()) - enough[k], fullest, enough[k]))
        kept = list[tuple[Floats, float]]()
        for beyond, fullest, least in sorted(found, key=lambda each: -each[0]):
            if beyond > 0 and not any(np.ptp(fullest - other) == 0 for other, _ in kept):
                kept.append((fullest, least))
        return np.array([np.maximum(*each) for each in kept]).reshape(len(kept), len(used)).T

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


def _parted(chain: Chain, terms: Floats) -> Ints:
    """For each two rows the last unit to which it matters, for an option, which of them it is; -1 for none."""
    num, found = len(terms), np.full((len(terms), len(terms)), -1)
    for k in range(num):
        more = terms - terms[k]
        most, least = (np.where(chain.is_open, sign * more, -np.inf).max(axis=2) for sign in (1, -1))
        found[k] = np.where(most + least > 0, np.arange(chain.num_units), -1).max(axis=1)
    return found


def _unbeaten(group: Ints, cost: Floats, used: Floats) -> npt.NDArray[np.intp]:
    """Numbers of the labels that no other of their group beats, or all but some that are beaten.

    Args:
        group: Of each label.
        cost: Seconds.
        used: Bytes, of which less is better; shape (labels, rows).
    """
    order = np.lexsort([cost, *used.T[::-1], group])
    if used.shape[1] <= 1:
        ranks = np.empty(len(order), dtype=np.int64)
        ranks[np.lexsort([used[:, 0] if used.shape[1] else group, cost])] = np.arange(len(order))
        ranks = ranks[order] - len(order) * np.cumsum(np.diff(group[order], prepend=group[order][:1]) != 0)
        is_least = np.minimum.accumulate(ranks) == ranks  # those of a later group are below all of an earlier one
        return order[is_least]
    parts = np.split(order, np.flatnonzero(np.diff(group[order])) + 1)
    kept = [_unbeaten_rows(part, np.column_stack([cost, used])[part]) for part in parts if len(part)]
    return np.concatenate(kept) if kept else order


def _unbeaten_rows(part: npt.NDArray[np.intp], values: Floats) -> npt.NDArray[np.intp]:
    """The same in several rows, block by block: those of a block are compared with it and with the first block."""
    order = np.lexsort(values.T[::-1])  # by time first: who beats comes before who is beaten
    part, values = part[order], values[order]
    kept = np.ones(len(part), dtype=bool)
    for start in range(0, len(part), _BLOCK):
        block = values[start : start + _BLOCK]
        rivals = block if start == 0 else np.concatenate([values[:_BLOCK], block])
        beats = np.arange(len(rivals))[:, None] < np.arange(len(block)) + len(rivals) - len(block)
        for rival, own in zip(rivals.T[1:], block.T[1:], strict=True):  # it takes no more time, for it comes before
            beats &= rival[:, None] <= own
        kept[start : start + _BLOCK] = ~beats.any(axis=0)
    return part[kept]
