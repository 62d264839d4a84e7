"""What a choice becomes if one unit, or two, take another option: seconds at once for all, and peaks for some."""

import numpy as np

from dshard.planner.chain import Chain, Floats
from dshard.planner.memory import Ints

_FAR = 4  # rows that are as many units away, or more, count a unit alike


class Swaps:
    """The changes of one choice.

    Args:
        chain: Of the model.
        chosen: The choice.
    """

    def __init__(self, chain: Chain, chosen: Ints) -> None:
        self._chain, self.chosen = chain, chosen
        self.values = chain.rows.values(chosen)
        self.gains = self._gains()

    def _gains(self) -> Floats:
        """Seconds that each other option of each unit saves, alone; shape (units, S)."""
        chain, chosen, units = self._chain, self.chosen, np.arange(self._chain.num_units)
        before, after = chain.neighbours(chosen)
        changed = chain.costs[units, before, :, after].copy()
        changed[1:] += chain.costs[units[:-1], before[:-1], chosen[:-1], :][:, chain.after]
        changed[:-1] += chain.costs[units[1:], :, chosen[1:], after[1:]][:, chain.before]
        now: Floats = changed[units, chosen]
        gains: Floats = now[:, None] - changed
        return gains

    def peaks(self, units: Ints, options: Ints) -> Ints:
        """The peak with each of some changes, alone."""
        num = self._chain.num_units
        phases = self._chain.rows.phases
        more = phases[:, :, units, options] - phases[:, :, units, self.chosen[units]]
        values = np.pad(self.values.reshape(len(phases), num), ((0, 0), (_FAR, _FAR)))  # 0 is below any
        most_before = np.maximum.accumulate(values, axis=1)
        most_after = np.maximum.accumulate(values[:, ::-1], axis=1)[:, ::-1]
        found = most_before[:, units] + more[:, -1]  # the unit comes after these rows
        np.maximum(found, most_after[:, units + 2 * _FAR] + more[:, 0], out=found)
        for away in range(1 - _FAR, _FAR):  # of the unit from the row
            row = values[:, units + _FAR - away]
            np.maximum(found, np.where(row > 0, row + more[:, away + _FAR], 0), out=found)
        peaks: Ints = found.max(axis=0)
        return peaks
