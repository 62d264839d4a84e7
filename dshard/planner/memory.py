"""Peak memory of a step: what is held, and the most that lives at one moment beside it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dshard.arguments import checked
from dshard.planner.costs import Cluster, ModelCosts
from dshard.planner.options import Option, options_of, table_of
from dshard.policies import Strategy

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a step, and the bytes that live then on the rank that has most.

    Args:
        phase: "forward", "backward", "gradients" (a backward once it has computed one of a parameter), "slices" (once
            one of a gradient is in flight), "reduce" (a reduction ends, at the end of the next backward), or "step" (of
            the optimizer).
        unit: Number of the unit.
        num_bytes: In all.
    """

    phase: str
    unit: int
    num_bytes: int


@checked
def peak_bytes(model: ModelCosts, strategies: Sequence[Strategy | str], cluster: Cluster) -> int:
    """The most bytes that live at one moment of a step, rounded up."""
    return max(moment.num_bytes for moment in moments(model, strategies, cluster))


@checked
def moments(model: ModelCosts, strategies: Sequence[Strategy | str], cluster: Cluster) -> list[Moment]:
    """All moments of a step, in order of time."""
    rows = MemoryRows.of(model, [[option] for option in options_of(model, strategies, cluster)])
    values = rows.values(np.zeros(len(model.units), dtype=np.int64))
    return [Moment(*rows.name(row), int(values[row])) for row in rows.in_time()]


_PHASES = ("forward", "backward", "gradients", "slices", "reduce", "step")
_FAR = 3  # units further away than this are alike


@dataclass(frozen=True, slots=True)
class MemoryRows:
    """Bytes at each moment, as sums over units of what each adds under its strategy.

    Of `U` units: row `e` is the forward of unit `e`, row `U + e` its backward until there is a gradient, `2U + e` from
    then on, `3U + e` once a slice of a gradient is in flight, `4U + e` the end of its reduction, `5U + e` the
    optimizer's step on it. For unit `j` and each of its options, what it adds depends on `j - e` alone, and not on how
    far away it is beyond three.

    Args:
        constant: What is there whatever the options, per row.
        phases: What an option of a unit adds, shape (phases, 9, units, options): the unit comes before a row, three
            before, two before, one before, is its own, one after, two after, three after, after.
    """

    constant: Ints
    phases: Ints

    @classmethod
    def of(cls, model: ModelCosts, options: Sequence[Sequence[Option]]) -> "MemoryRows":
        """Rows for units of which each has some options, all of them as many."""
        return cls.of_table(model, table_of(options))

    @classmethod
    def of_table(cls, model: ModelCosts, table: npt.NDArray[np.float64]) -> "MemoryRows":
        """The same of their fields: see `table_of`."""

        def field(name: str) -> Ints:
            return table[:, :, Option._fields.index(name)].astype(np.int64)

        held, late = field("held_bytes"), field("grad_bytes") + field("waiting_bytes")
        if model.num_backwards > 1:  # those of earlier micro-batches are there from the start
            held, late = held + late, np.zeros_like(late)
        alive, done = held + field("activation_bytes"), held + late
        kept = alive + field("kept_bytes")
        ahead = kept + field("backward_ahead_bytes")
        using = alive + field("forward_transient_bytes") + field("forward_use_bytes")
        forward = *(kept,) * 4, using, held + field("forward_ahead_bytes"), *(held,) * 3
        using = alive + field("backward_transient_bytes") + field("backward_use_bytes")
        swapped = done + field("late_replicas_bytes")
        flying = held + field("in_flight_bytes"), done + field("replicas_bytes"), swapped
        backward = *(kept,) * 3, ahead, using, *flying, done
        computed = alive + field("gradients_transient_bytes")
        gradients = *backward[:4], computed + field("filling_bytes"), *backward[5:]
        slicing = computed + field("slicing_bytes"), held + field("whole_in_flight_bytes")
        slices = *backward[:4], *slicing, *backward[6:]
        ending = alive + field("sent_bytes"), held + field("ending_bytes")
        reduce = *(kept,) * 2, ahead, *ending, swapped, *(done,) * 3
        if model.steps_together:
            step = (done + field("step_bytes"),) * 9
        else:
            step = (*(done,) * 4, done + field("largest_step_bytes"), *(done,) * 4)
        constant = np.full(len(_PHASES) * len(table), model.buffer_bytes, dtype=np.int64)
        return cls(constant, np.array((forward, backward, gradients, slices, reduce, step)))

    def of_units(self, which: Sequence[int], options: Ints) -> "MemoryRows":
        """Rows for other units, which are alike to some of these, with some of the options."""
        phases = self.phases[:, :, np.asarray(which)[:, None], options]
        return MemoryRows(np.full(len(_PHASES) * len(which), self.constant[0]), phases)

    @property
    def num_units(self) -> int:
        """Number of units of the model."""
        return self.phases.shape[2]

    def name(self, row: int) -> tuple[str, int]:
        """Phase and unit of a row."""
        return _PHASES[row // self.num_units], row % self.num_units

    def in_time(self) -> list[int]:
        """All rows in order of time."""
        num = self.num_units
        found = list(range(num))
        for unit in range(num - 1, -1, -1):
            found += [num + unit, 2 * num + unit, 3 * num + unit]
            found += [4 * num + unit + 1] if unit + 1 < num else []
        return [*found, 4 * num, *range(5 * num, 6 * num)]

    def terms(self, row: int) -> Ints:
        """What each option of each unit adds to a row; shape (units, options)."""
        phase, unit = self.phases[row // self.num_units], row % self.num_units
        terms = np.concatenate([phase[0][:unit], phase[-1][unit:]])
        for away in range(-_FAR, _FAR + 1):
            if 0 <= unit + away < self.num_units:
                terms[unit + away] = phase[away + _FAR + 1][unit + away]
        return terms

    def values(self, chosen: Ints) -> Ints:
        """Bytes of every row, for the number of the option of each unit."""
        return self._sums(self.phases[:, :, np.arange(self.num_units), chosen])

    def least(self, is_open: npt.NDArray[np.bool_]) -> Ints:
        """The least bytes of every row, taken alone, with any options that are open."""
        return self._sums(np.where(is_open, self.phases, np.iinfo(np.int64).max).min(axis=3))

    def _sums(self, parts: Ints) -> Ints:
        """Bytes of every row from what each unit adds, as `phases`."""
        num = self.num_units
        ahead, after = np.cumsum(parts[:, 0], axis=1), np.cumsum(parts[:, -1, ::-1], axis=1)[:, ::-1]
        sums = np.zeros((len(parts), num), dtype=np.int64)
        sums[:, _FAR + 1 :] += ahead[:, : -_FAR - 1]
        sums[:, : -_FAR - 1] += after[:, _FAR + 1 :]
        for away in range(-_FAR, _FAR + 1):
            if abs(away) < num:
                rows = slice(max(0, -away), num - max(0, away))
                sums[:, rows] += parts[:, away + _FAR + 1, max(0, away) : num - max(0, -away)]
        return sums.reshape(-1) + self.constant
