"""The planner's problem as a chain: costs of neighbours, rows of memory, and which options a unit has."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dshard.planner.costs import Cluster, ModelCosts, UnitCosts
from dshard.planner.memory import Ints, MemoryRows
from dshard.planner.options import Option, options_of_unit
from dshard.policies import Strategy

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Chain:
    """Units in order, each with `S` options.

    Args:
        costs: Seconds of unit `i` under option `b`, where its neighbours have `a` and `c`; shape (units, S, S, S). The
            first unit knows only `a = 0`, the last only `c = 0`; infinite where an option is not worth having.
        rows: Bytes at each moment.
        is_open: Which options are worth having; shape (units, S).
        numbers: Of the options among the strategies that were given; the others are worth having for no unit.
    """

    costs: Floats
    rows: MemoryRows
    is_open: npt.NDArray[np.bool_]
    numbers: Ints

    @classmethod
    def of(cls, model: ModelCosts, strategies: Sequence[Strategy], cluster: Cluster) -> "Chain":
        """The chain of a model in which each unit may have any of some strategies."""
        known: dict[object, list[Option]] = {}  # layers that repeat
        options = []
        for unit in model.units:
            key = _content(unit)
            if key not in known:
                known[key] = options_of_unit(unit, strategies, cluster, model.num_backwards)
            options.append(known[key])
        rows = MemoryRows.of(model, options)
        is_open = _worth_having(options, rows, again=model.num_backwards > 1)
        numbers = np.flatnonzero(is_open.any(axis=0))
        options, is_open = [[own[number] for number in numbers] for own in options], is_open[:, numbers]
        costs = _costs(options, model.num_backwards, overlaps=cluster.overlaps)
        costs += np.where(is_open, 0.0, np.inf)[:, None, :, None]
        costs[0, 1:] = np.inf
        costs[-1, :, :, 1:] = np.inf
        return cls(_laid_out(costs), rows.only(numbers), is_open, numbers)

    @property
    def num_units(self) -> int:
        """Number of units of the model."""
        return self.costs.shape[0]

    @property
    def num_options(self) -> int:
        """Per unit."""
        return self.costs.shape[1]

    def copy(self) -> "Chain":
        """The same, of which options can be closed."""
        return Chain(self.costs.copy(order="K"), self.rows, self.is_open.copy(), self.numbers)

    def mirrored(self) -> "Chain":
        """The same from its other end; its rows are not."""
        return Chain(
            _laid_out(self.costs[::-1].transpose(0, 3, 2, 1)), self.rows, self.is_open[::-1].copy(), self.numbers
        )

    def close(self, closes: npt.NDArray[np.bool_]) -> None:
        """Have options no more; in place."""
        self.is_open[closes] = False
        self.costs[np.broadcast_to(closes[:, None, :, None], self.costs.shape)] = np.inf

    def classes(self) -> Ints:
        """The first option that costs a unit just the same, for each option of the unit before it."""
        num, size = self.num_units, self.num_options
        found = np.tile(np.arange(size), (num, 1))
        for a in range(size - 1, 0, -1):
            for other in range(a - 1, -1, -1):
                is_same = (self.costs[:, a] == self.costs[:, other]).all(axis=(1, 2))
                found[is_same, a] = other
        return found

    def stage_costs(self, chosen: Ints) -> Floats:
        """Seconds of each unit, for the options that are chosen."""
        before = np.concatenate([[0], chosen[:-1]])
        after = np.concatenate([chosen[1:], [0]])
        return self.costs[np.arange(self.num_units), before, chosen, after]

    def cost(self, chosen: Ints) -> float:
        """Seconds of a step."""
        return float(self.stage_costs(chosen).sum())

    def peak_bytes(self, chosen: Ints) -> int:
        """Peak memory of a step."""
        return int(self.rows.values(chosen).max())


def _laid_out(costs: Floats) -> Floats:
    """The same with the option of the unit after in front of the others in memory, as `bounds.following` reads it."""
    return costs.transpose(0, 3, 1, 2).copy().transpose(0, 2, 3, 1)


def _content(unit: UnitCosts) -> tuple[object, ...]:
    """What of a unit decides its costs: all but names."""
    params = tuple(replace(param, name="") for param in unit.params)
    return astuple(replace(unit, name="", params=(), source="")), params


def _worth_having(options: Sequence[Sequence[Option]], rows: MemoryRows, *, again: bool) -> npt.NDArray[np.bool_]:
    """Whether, for each option of each unit, no other costs less or the same in every row and in every time."""
    names = [field.name for field in fields(Option) if field.name.endswith("_s")]
    names = [name for name in names if again or name not in ("gather_again_s", "reduce_early_s")]
    times = np.array([[[getattr(o, name) for name in names] for o in own] for own in options])
    terms = np.concatenate(
        [np.stack([part for phase in rows.phases for part in phase], axis=2).astype(np.float64), times], 2
    )
    num = terms.shape[1]
    is_open = np.ones(terms.shape[:2], dtype=bool)
    for i in range(num):
        for j in range(num):
            no_worse = (terms[:, j] <= terms[:, i]).all(axis=1)
            is_same = (terms[:, j] == terms[:, i]).all(axis=1)
            if i != j:
                is_open[:, i] &= ~(no_worse & (~is_same | (j < i)))
    return is_open


def _costs(options: Sequence[Sequence[Option]], num_backwards: int, *, overlaps: bool) -> Floats:
    """Seconds of each unit for each triple of options; see `timeline.step_time`."""

    def field(name: str) -> Floats:
        return np.array([[getattr(option, name) for option in own] for own in options], dtype=np.float64)

    num, again = len(options), num_backwards - 1
    together: Any = np.maximum if overlaps else np.add
    none = np.zeros((1, len(options[0])))
    forward, forward_comm = field("forward_s")[:, None, :, None], field("forward_comm_s")[:, None, :, None]
    backward, backward_comm = field("backward_s")[:, None, :, None], field("backward_comm_s")[:, None, :, None]
    gather_backward = field("gather_backward_s")
    before = np.concatenate([none, gather_backward[:-1]])[:, :, None, None]

    def after(values: Floats) -> Floats:
        return np.concatenate([values[1:], none])[:, None, None, :]

    costs = np.zeros((num, *[len(options[0])] * 3))
    for gather, reduce, weight in (
        (field("gather_s"), field("reduce_s"), 1),
        (field("gather_again_s"), field("reduce_early_s"), again),
    ):
        costs += weight * together(forward, forward_comm + after(gather))
        costs += weight * together(backward, after(reduce) + backward_comm + before)
        costs[0] += weight * (gather[0] + reduce[0])[None, :, None]
    costs[-1] += num_backwards * gather_backward[-1][None, :, None]
    return costs + field("optimizer_s")[:, None, :, None]
