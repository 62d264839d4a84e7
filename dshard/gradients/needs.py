"""Which units a backward gathers: as one on all ranks, whichever of their parameters each of them uses.

A backward gathers a unit where an operation needs one of its weights. That may be so on some ranks alone, where they
use different parameters of the unit. So a unit is gathered at its first gradient at the latest, until it is known that
no rank needs any of its weights: then all of them had used all of it, as they do behind an embedding or a first layer.
"""

from collections.abc import Callable, Container, Sequence

import torch

from dshard import collectives
from dshard.autograd import outside_autograd
from dshard.collectives import ReduceOp, ShardGroup
from dshard.units.eviction import Eviction
from dshard.units.unit import Unit

_LABEL = "units that a backward needs"


class Needs:
    """What is known of the units of a model, and what the backward that is running has met.

    Args:
        eviction: Of the model, which has noted what operations touch, and what is gathered.
    """

    def __init__(self, eviction: Eviction) -> None:
        self._eviction = eviction
        self._met: set[Unit] = set()  # in this backward, by a gradient
        self._known: dict[Unit, bool] = {}

    def begin_backward(self) -> None:
        """Forget the last one."""
        self._met.clear()

    def forget(self) -> None:
        """Units are others now."""
        self._met.clear()
        self._known.clear()

    def was_gathered(self, unit: Unit) -> bool:
        """Whether copies are there, or were in the backward that is running."""
        return unit in self._eviction.seen or unit.is_gathered

    def meet(self, unit: Unit) -> bool:
        """Whether a unit, of which a gradient has arrived, is met first so, and some rank may need a weight of it."""
        if unit in self._met or unit in self._eviction.touched or not _may_differ(unit):
            return False
        self._met.add(unit)
        return self._known.get(unit, True)

    def learn(self, complete: Container[Unit], reduces_now: Callable[[Unit], bool]) -> set[Unit]:
        """The backward ends: know of those units of which every rank has used all whether they are needed.

        Gives those that are not, as was not known before.

        Args:
            complete: Units of whose parameters all gradients have arrived on this rank.
            reduces_now: Whether the backward has reduced the gradients of a unit.

        Communicates:
            For each group of ranks an all-reduce of two bytes per unit of which nothing is known yet.
        """
        touched = self._eviction.touched
        met = self._met | set(filter(_may_differ, touched))
        unknown = [unit for unit in met if unit not in self._known and reduces_now(unit)]
        by_group: dict[str, tuple[ShardGroup, list[Unit]]] = {}
        for unit in sorted(unknown, key=lambda unit: unit.number):
            for group in unit.groups:
                by_group.setdefault(group.name, (group, []))[1].append(unit)
        partly, needed = set[Unit](), set[Unit]()
        for group, units in by_group.values():
            flags = _any_of(
                [unit not in complete for unit in units] + [unit in touched for unit in units], group, _LABEL
            )
            partly.update(unit for unit, flag in zip(units, flags, strict=False) if flag)
            needed.update(unit for unit, flag in zip(units, flags[len(units) :], strict=True) if flag)
        self._known.update((unit, unit in needed) for unit in unknown if unit not in partly)
        return {unit for unit in unknown if unit not in partly and unit not in needed}


def _may_differ(unit: Unit) -> bool:
    """Whether ranks may use it apart: a parameter that is alone in its unit is used on all, by the same operations."""
    return not unit.is_whole and len(unit.params) > 1


def flagged_anywhere(units: Sequence[Unit], is_so: Callable[[Unit], bool]) -> list[Unit]:
    """Those of some units, in their order, of which something is so on any of the ranks that share them.

    Communicates:
        For each group of ranks an all-reduce of a byte per unit.
    """
    by_group: dict[str, tuple[ShardGroup, list[Unit]]] = {}
    for unit in units:
        for group in unit.groups:
            by_group.setdefault(group.full_name, (group, []))[1].append(unit)
    found = set[Unit]()
    for group, own in by_group.values():
        flags = _any_of([is_so(unit) for unit in own], group, "units with gradients to reduce", everywhere=True)
        found.update(unit for unit, flag in zip(own, flags, strict=True) if flag)
    return [unit for unit in units if unit in found]


def _any_of(flags: list[bool], group: ShardGroup, label: str, *, everywhere: bool = False) -> list[bool]:
    """Which flags are set on any rank; `everywhere` also of other replicas."""
    with outside_autograd():
        own = torch.tensor(flags, dtype=torch.uint8, device=group.device_type)
        handle = collectives.all_reduce([own], group, ReduceOp.MAX, label=label, everywhere=everywhere, is_check=True)
        return [bool(flag) for flag in handle.wait()[0].tolist()]
