"""Cheapest ways along a chain, for prices that are added to the seconds of its options.

What a unit's option means to its neighbours are its two classes; options with both in common are of one type. Of each
type a unit takes the cheapest option that fits between the types of its neighbours, so the way along the chain is one
of few types: the arrays over all units are made at once, and what is left for each unit is one small step.
"""

import numpy as np

from dshard.planner.chain import Chain, Floats
from dshard.planner.memory import Ints


class Paths:
    """The ways along a chain as it is now: make it anew once options are closed.

    Args:
        chain: Of the model.
    """

    def __init__(self, chain: Chain) -> None:
        pairs, types = np.unique(np.stack([chain.before, chain.after]), axis=1, return_inverse=True)
        self._chain, self._types = chain, types.reshape(-1)
        self._before, self._after = pairs
        num, num_before, num_after = len(self._before), chain.costs.shape[1], chain.costs.shape[3]
        self._members = [np.flatnonzero(self._types == own) for own in range(num)]
        # Of each type: (options, units, classes before, classes after), to find the least of the options.
        self._costs = [chain.costs[:, :, members].transpose(2, 0, 1, 3).copy() for members in self._members]
        own, before = np.arange(num)[None, None, :], self._before[None, :, None]
        self._places = (own * num_before + before) * num_after + self._after[:, None, None]

    def cheapest(self, penalties: Floats) -> tuple[float, Ints]:
        """The least sum of seconds and penalties, and its choice.

        Args:
            penalties: Of each option of each unit; shape (units, S).
        """
        steps, chain = self._steps(penalties[None])[:, :, 0], self._chain
        follow = np.zeros(steps.shape[1:2] * 2)
        least = np.empty(steps.shape[2:])
        for step in steps[::-1]:
            step += follow[:, None]
            least = np.minimum.reduce(step, axis=0)
            follow = least.T
        later, num = memoryview(steps.argmin(axis=1).reshape(-1)), steps.shape[1]
        before, own = 0, int(least[0].argmin())
        types = [own]
        for place in range(0, (chain.num_units - 1) * num * num, num * num):
            before, own = own, later[place + before * num + own]
            types.append(own)
        path, units, zero = np.array(types), np.arange(chain.num_units), np.zeros(1, dtype=np.int64)
        ahead = np.concatenate([zero, self._before[path[:-1]]])
        after = np.concatenate([self._after[path[1:]], zero])
        costs = np.where(self._types == path[:, None], chain.costs[units, ahead, :, after] + penalties, np.inf)
        return float(least[0].min()), costs.argmin(axis=1)

    def following(self, penalties: Floats) -> Floats:
        """The least that a unit and those after it add, for its own option and the class of the unit before it.

        Args:
            penalties: For some prices; shape (vectors, units, S).

        Returns:
            Shape (units + 1, vectors, A, S), zero after the last unit.
        """
        return self._following(self._steps(penalties), penalties)

    def through(self, penalties: Floats) -> Floats:
        """The least sum of all choices that have an option, for each option of each unit; shape (units, vectors, S)."""
        steps = self._steps(penalties)
        follow, chain = self._following(steps, penalties), self._chain
        vectors, num = steps.shape[2:4]
        ahead = np.zeros((chain.num_units, vectors, num, num))  # of the types of the unit before, and its own
        for i, step in enumerate(steps[:-1]):
            ahead[i + 1] = np.minimum.reduce(step + ahead[i], axis=2).transpose(1, 2, 0)
        found = np.full((chain.num_units, vectors, chain.num_options), np.inf)
        for a in range(chain.costs.shape[1]):
            mine = ahead[:, :, self._before == a].min(axis=2)[:, :, self._types]
            np.minimum(found, mine + follow[:-1, :, a], out=found)
        return found

    def _steps(self, penalties: Floats) -> Floats:
        """Seconds and penalty of the best option; shape (units, type after, vectors, type before, own type)."""
        units, num = self._chain.num_units, len(self._members)
        found = np.empty((units, num, len(penalties), num, num))
        classes = (self._chain.costs.shape[1], self._chain.costs.shape[3])
        least = np.empty((units, num, *classes))
        for vector, own in enumerate(penalties):
            for kind, (members, costs) in enumerate(zip(self._members, self._costs, strict=True)):
                np.minimum.reduce(costs + own[:, members].T[:, :, None, None], axis=0, out=least[:, kind])
            found[:, :, vector] = np.take(least.reshape(units, -1), self._places, axis=1)
        return found

    def _following(self, steps: Floats, penalties: Floats) -> Floats:
        chain, (vectors, num) = self._chain, steps.shape[2:4]
        classes, size = chain.costs.shape[1], chain.num_options
        rest = np.zeros((chain.num_units + 1, vectors, num, num))  # of the types of the unit before, and its own
        for i in range(chain.num_units - 1, -1, -1):
            np.minimum.reduce(steps[i] + rest[i + 1].transpose(2, 0, 1)[:, :, None], axis=0, out=rest[i])
        found = np.full((chain.num_units + 1, vectors, classes, size), np.inf)
        found[-1] = 0.0
        firsts = np.unique(self._before, return_index=True)[1]
        for c in range(chain.costs.shape[3]):
            after = rest[1:, :, firsts][..., self._after == c].min(axis=-1)[:, :, chain.before]
            np.minimum(found[:-1], chain.costs[:, None, :, :, c] + after[:, :, None], out=found[:-1])
        found[:-1] += penalties.transpose(1, 0, 2)[:, :, None]
        return found
