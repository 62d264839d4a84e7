"""Which units a backward gathers: as one on all ranks, whichever of their parameters each of them uses.

A backward gathers a unit where an operation needs one of its weights. That may be so on some ranks alone, where they
use different parameters of the unit. So a unit is gathered at its first gradient at the latest, until it is known that
no rank needs any of its weights: then all of them had used all of it, as they do behind an embedding or a first layer.
"""

from collections.abc import Container

import torch

from dshard import collectives
from dshard.collectives import ReduceOp, ShardGroup
from dshard.units.unit import Unit

__all__ = ["Needs"]

_LABEL = "units that a backward needs"


class Needs:
    """What is known of the units of a model, and what the backward that is running has done with them."""

    def __init__(self) -> None:
        self._met: set[Unit] = set()  # in this backward, by an operation or a gradient
        self._touched: set[Unit] = set()  # in it, by operations of this rank
        self._gathered: set[Unit] = set()  # at some time in it, ahead of its use maybe, or left from the forward
        self._known: dict[Unit, bool] = {}

    def begin_backward(self) -> None:
        """Forget the last one."""
        self._met.clear()
        self._touched.clear()
        self._gathered.clear()

    def forget(self) -> None:
        """Units are others now."""
        self.begin_backward()
        self._known.clear()

    def note_gathered(self, unit: Unit) -> None:
        """Copies are there, or were until now, in the backward that is running."""
        self._gathered.add(unit)

    def was_gathered(self, unit: Unit) -> bool:
        """Whether copies are there, or were in the backward that is running."""
        return unit in self._gathered or unit.is_gathered

    def meet(self, unit: Unit, *, is_touched: bool) -> bool:
        """Whether a unit is met for the first time in this backward, and some rank may need a weight of it.

        A parameter that is alone in its unit is used on all ranks, by the same operations.

        Args:
            unit: Of which a weight is needed, or a gradient has arrived.
            is_touched: Whether it is the former.
        """
        if is_touched:
            self._touched.add(unit)
        if unit in self._met or unit.is_whole or len(unit.params) < 2:
            return False
        self._met.add(unit)
        return self._known.get(unit, True)

    def learn(self, complete: Container[Unit]) -> set[Unit]:
        """The backward ends: know of those units of which every rank has used all whether they are needed.

        Gives those that are not, as was not known before.

        Args:
            complete: Units of whose parameters all gradients have arrived on this rank.

        Communicates:
            For each group of ranks an all-reduce of two bytes per unit of which nothing is known yet.
        """
        unknown = [unit for unit in self._met if unit not in self._known and unit.reduces_now]
        by_group: dict[str, tuple[ShardGroup, list[Unit]]] = {}
        for unit in sorted(unknown, key=lambda unit: unit.place):
            for group in unit.groups:
                by_group.setdefault(group.name, (group, []))[1].append(unit)
        partly, needed = set[Unit](), set[Unit]()
        for group, units in by_group.values():
            flags = _any_of([unit not in complete for unit in units] + [unit in self._touched for unit in units], group)
            partly.update(unit for unit, flag in zip(units, flags, strict=False) if flag)
            needed.update(unit for unit, flag in zip(units, flags[len(units) :], strict=True) if flag)
        self._known.update((unit, unit in needed) for unit in unknown if unit not in partly)
        return {unit for unit in unknown if unit not in partly and unit not in needed}


def _any_of(flags: list[bool], group: ShardGroup) -> list[bool]:
    """Which flags are set on any rank."""
    own = torch.tensor(flags, dtype=torch.uint8, device=group.device_type)
    handle = collectives.all_reduce([own], group, ReduceOp.MAX, label=_LABEL, is_check=True)
    return [bool(flag) for flag in handle.wait()[0].tolist()]
