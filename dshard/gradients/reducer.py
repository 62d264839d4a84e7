"""The reductions of a model: which gradients have arrived, which leave when, and what all ranks must start alike."""

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dshard import collectives
from dshard.agreement import NOTHING, of_all_ranks
from dshard.autograd import GRAD, outside_autograd
from dshard.collectives import ReduceOp, ShardGroup
from dshard.errors import DivergenceError, StateError
from dshard.gradients.reduction import GradReduction, accumulates
from dshard.tensor import ShardedTensor
from dshard.units.buckets import Bucket
from dshard.units.context import Eviction, ModelContext
from dshard.units.unit import Unit


class Deferral:
    """When a unit reduces whose gradients stay whole until the optimizer's step (`zero1`).

    How many backwards make a step is what the last step showed. Until one did, every backward reduces, so that ranks
    which did not use a parameter have its gradient, too; if there were fewer of them, the gradients are reduced when
    they are read.
    """

    def __init__(self) -> None:
        self._num_backwards = 0  # since gradients were dropped
        self._num_expected: int | None = None

    def note_backward(self, *, is_first: bool) -> None:
        """A backward brings gradients; `is_first` where none were there."""
        if is_first:
            self._num_expected, self._num_backwards = self._num_backwards or None, 0
        self._num_backwards += 1

    @property
    def is_due(self) -> bool:
        """Whether the gradients leave with this backward."""
        return self._num_expected is None or self._num_backwards >= self._num_expected


def check_same_gradients(presence: Sequence[tuple[ShardGroup, list[tuple[str, bool]]]], what: str, way: str) -> None:
    """Raise, on every rank alike, unless all ranks have gradients of the same parameters.

    Where some ranks alone have used a parameter, the others do not know of its gradient before the reduction: they
    would leave it out of a norm or a step.

    Args:
        presence: For each reduction, in the order of all ranks, its ranks, and of each parameter the name and whether
            its gradient is here.
        what: Was put off, for the message.
        way: Out of it, for the message.

    Raises:
        StateError: They have not.

    Communicates:
        All-reduces of two bytes per parameter, for each mesh.
    """
    by_group: dict[str, tuple[ShardGroup, list[tuple[str, bool]]]] = {}
    for group, held in presence:
        by_group.setdefault(group.full_name, (group, []))[1].extend(held)
    differing: list[str] = []
    for group, found in by_group.values():
        has = torch.tensor([held for _, held in found], dtype=torch.uint8, device=group.device_type)
        label = f"which of {len(found)} gradients are there"
        some, none = collectives.all_reduce(
            [torch.stack([has, 1 - has])], group, ReduceOp.MAX, label=label, everywhere=True
        ).wait()[0]
        differs = (some * none).tolist()
        differing += [name for (name, _), is_apart in zip(found, differs, strict=True) if is_apart]
    if differing:
        others = f", nor of {len(differing) - 1} other parameters" if differing[1:] else ""
        raise StateError(
            f"{differing[0]}: a gradient can be used ahead of its {what} if all ranks have one, but some have none "
            f"yet{others}. {way}"
        )


class FiniteCheck:
    """Looks at the gradients of a backward before they are reduced, without waiting for a device until it ends."""

    def __init__(self) -> None:
        self._found: list[tuple[str, int, Tensor]] = []

    def note(self, name: str, grad: Tensor) -> None:
        """Take this rank's gradient of a parameter."""
        values = grad.to_local() if hasattr(grad, "to_local") else grad
        self._found.append((name, values.numel(), values.numel() - torch.isfinite(values).sum()))

    def forget(self) -> None:
        """Drop what a backward that raised has left behind."""
        self._found = []

    def settle(self, groups: Sequence[ShardGroup]) -> None:
        """Raise, on every rank alike, unless all gradients since the last time were finite on all ranks.

        Raises:
            DivergenceError: They were not; names for each rank the first that was not.

        Communicates:
            For each group an all-reduce of 8 bytes; if they were not, one of 160 bytes per rank.
        """
        found, self._found = self._found, []
        counts = torch.stack([count for _, _, count in found]).tolist() if found else []
        own = [f"{name} ({n} of {size} values)" for (name, size, _), n in zip(found, counts, strict=True) if n]
        texts: list[str] = []
        for group in groups:
            flag = torch.tensor([len(own)], dtype=torch.int64, device=group.device_type)
            label = "whether gradients are finite"
            if int(collectives.all_reduce([flag], group, ReduceOp.MAX, label=label, everywhere=True).wait()[0]):
                said = of_all_ranks(own[0] if own else "", group)
                texts += [f"on rank {rank} that of {text}" for rank, text in enumerate(said) if text != NOTHING]
        if texts:
            more = f" and {len(texts) - 4} more ranks" if len(texts) > 4 else ""
            raise DivergenceError(
                "backward: the gradients of every rank must be finite, but the first that are not are "
                f"{', '.join(dict.fromkeys(texts[:4]))}{more}, before any sum over the ranks. Look at the batch and "
                "the loss there; the optimizer has not stepped."
            )


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


_DEFERRED = (
    "reduction, which zero1 puts off until as many backwards as the step before had,",
    "Run equally many backwards in each step, or give it the strategy 'zero2'.",
)


class ReductionKey(NamedTuple):
    """Which reduction of a unit a gradient belongs to; keys are ordered, on all ranks alike.

    Args:
        slots: The bucket's parameters.
        is_captured: Whether `autograd.grad` takes the result, rather than `.grad`.
    """

    slots: tuple[int, ...]
    is_captured: bool


class UnitGradients:
    """The gradients of one unit.

    Args:
        unit: Whose they are.
        reducer: Of the model, which knows what is in flight.
    """

    def __init__(self, unit: Unit, reducer: "Reducer") -> None:
        self.unit, self._reducer = unit, reducer
        self.open: dict[ReductionKey, GradReduction] = {}  # that have not left, or owe
        self.deferral = Deferral()  # of "zero1"
        self.is_begun = False  # a gradient has arrived in the backward that is running
        self._arrived: set[int] = set()  # in it
        self._buckets: list[Bucket] = []  # in it or the last one, of the parameters that take a gradient
        self._bucket_of: dict[int, Bucket] = {}
        self._filling: dict[int, GradReduction] = {}  # for each parameter, what took the last gradient of its bucket
        self._early: set[ReductionKey] = set()  # that left ahead of the rest, for they were read
        self._before: frozenset[ReductionKey] = frozenset()  # that were open when the backward began

    # What arrives.

    def begin(self) -> None:
        """The first gradient in a backward has arrived."""
        unit = self.unit
        self.is_begun = True
        buckets = self._all_buckets()
        if buckets is not self._buckets:
            self._buckets = buckets
            self._bucket_of = {slot: bucket for bucket in buckets for slot in bucket.slots}
        if unit.settings.strategy == "zero1" and unit.settings.requires_sync:
            self.deferral.note_backward(is_first=all(p.grad is None for p in unit.params))

    def receive(
        self, slots: Sequence[int], grads: Sequence[Tensor], may_wait: Sequence[bool], *, is_given: bool
    ) -> list[ShardedTensor]:
        """Take full gradients of parameters; gives the reduced ones, which may still be in flight."""
        unit, given = self.unit, list[ShardedTensor]()
        params = [unit.params[slot] for slot in slots]
        for reduction, part in self._by_reduction(slots, is_given=is_given):
            given += reduction.receive(slots[part], params[part], grads[part], may_wait[part], is_given=is_given)
        self._arrived.update(slots)
        if len(self._arrived) == len(unit.params) and unit not in unit.model.regions.units:  # a frozen one may be used
            unit.model.eviction.after_backward(unit)
        return given

    def _by_reduction(self, slots: Sequence[int], *, is_given: bool) -> Iterator[tuple[GradReduction, slice]]:
        """The reductions that take gradients of some parameters, and which of these.

        Each is to have them before the next is asked for: finding that one may have it leave.
        """
        start, current = 0, None
        others: Container[int] = ()  # that the current one takes, whatever they are
        for index, slot in enumerate(slots):
            if slot in others:
                continue
            known = self._filling.get(slot)
            if known is not None and not self._takes(known, slot, is_given=is_given):
                known = None
            if known is not None and known is current:
                continue
            if current is not None:
                yield current, slice(start, index)
            current = known or self._reduction_for(slot, is_given=is_given)
            start, others = index, current.takes_any
        if current is not None:
            yield current, slice(start, len(slots))

    def _takes(self, reduction: GradReduction, slot: int, *, is_given: bool) -> bool:
        """Whether the reduction that took the last gradient of a bucket is the one for another one of it."""
        if reduction.awaits(slot):
            return is_given or self.unit.settings.requires_sync
        if not is_given or not reduction.is_filling:
            return False
        param = self.unit.params[slot]
        return GRAD.__get__(param) is not None and len(param._backward_hooks or ()) == 1

    def _reduction_for(self, slot: int, *, is_given: bool) -> GradReduction:
        """The open reduction that a gradient belongs to, or a new one; `is_given` if it is known to be for `.grad`."""
        param, settings, bucket = self.unit.params[slot], self.unit.settings, self._bucket_of[slot]
        key = ReductionKey(bucket.slots, is_captured=False)
        known = self.open.get(key)
        is_old = known is not None and (known.holds(slot) or known.owes)
        may_be_captured = not is_given and (is_old or not settings.requires_sync or not settings.requires_all_reduce)
        if may_be_captured and not accumulates(param):
            key = ReductionKey(bucket.slots, is_captured=True)
            known = self.open.get(key)
        is_apart = key.is_captured or param.grad is None or len(param._backward_hooks or ()) > 1
        if known is not None and known.holds(slot) and is_apart:
            # The gradient of an earlier backward must not grow: somebody kept it, and `.grad` is no part of it; or a
            # hook wants to see that of this backward alone.
            self._launch(key, joins=False)
            known = None
        if known is None:
            known = self._open(key, bucket)
        if not key.is_captured:
            self._filling.update(dict.fromkeys(bucket.slots, known))
        return known

    def _open(self, key: ReductionKey, bucket: Bucket) -> GradReduction:
        reduction = self.open[key] = GradReduction(weakref.ref(self), bucket, self.unit)
        return reduction

    # What leaves.

    @property
    def reduces_now(self) -> bool:
        """Whether the backward that runs reduces the gradients, rather than add them up."""
        settings = self.unit.settings
        if settings.strategy != "zero1" or self.unit in self.unit.model.regions.units:
            return settings.requires_sync  # of a region, ranks may run other numbers of backwards
        return settings.requires_sync and self.deferral.is_due

    def reduce(self, *, joins: bool = False) -> None:
        """The backward has passed the unit: its gradients leave, with those of its buckets that peers alone may have.

        They leave here, or else when the backward ends, and not when the last one arrives: which parameters a rank uses
        may be its own matter, but when its collectives start must not be.

        Args:
            joins: Also if none has arrived on this rank.
        """
        if self.reduces_now:
            self._launch_all(owes=not self.unit.settings.requires_all_reduce, joins=joins)

    def _launch(self, key: ReductionKey, *, owes: bool = False, joins: bool = True) -> None:
        """Start a reduction; the arguments are those of `GradReduction.launch`."""
        reduction = self.open[key]
        if not owes:
            del self.open[key]
        self._reducer.launch(reduction, owes=owes, joins=joins)

    def _launch_all(self, *, owes: bool, joins: bool = False) -> None:
        """Launch all buckets, if this rank has used any, or `joins` all the same."""
        early, self._early = self._early, set()
        keys = list(self.open)
        if owes and not early and not joins and not self._is_filling(keys):
            return  # all that is here rests until the backward that all-reduces
        buckets = self._buckets if self.is_begun else self._all_buckets()
        if len(keys) == 1 == len(buckets) and not early and not keys[0].is_captured:  # as nearly always
            self._launch(keys[0], owes=owes and self._may_owe(keys[0]))
            return
        known = {*keys, *early}
        for is_captured in {key.is_captured for key in known} | ({False} if joins else set()):
            for bucket in buckets:
                key = ReductionKey(bucket.slots, is_captured)
                if key not in known:
                    self._open(key, bucket)
                    keys.append(key)
        for key in sorted(keys):
            self._launch(key, owes=owes and self._may_owe(key))

    def _all_buckets(self) -> list[Bucket]:
        """The buckets of the parameters that take a gradient now."""
        return self.unit.buckets(self.unit.trainable, self.unit.reduce_dtypes)

    def _is_filling(self, keys: Iterable[ReductionKey]) -> bool:
        return any(self.open[key].is_filling for key in keys)

    def _may_owe(self, key: ReductionKey) -> bool:
        """Whether an all-reduce over replicas can be put off: `.grad` takes the result, and no hook is given it."""
        hooks = (self.unit.params[slot]._backward_hooks or () for slot in key.slots)
        return self.open[key].group.replicas is not None and not key.is_captured and not any(len(h) > 1 for h in hooks)

    # The ends of reductions and backwards.

    def on_finished(self, reduction: GradReduction) -> None:
        """Forget a reduction that ended, or that rests until its all-reduce."""
        for key, other in list(self.open.items()):
            if other is reduction and not reduction.owes:  # a gradient was read before its unit was complete
                del self.open[key]
                self._early.add(key)
                self._reducer.note_incomplete(reduction)
        self._reducer.on_landed(reduction)

    def on_read(self, reduction: GradReduction) -> None:
        """A gradient is read outside of a backward before it has left: all of the unit leave, to be read alike.

        Within a backward, its end does it.
        """
        self.unit.model.on_outside()
        found = next((key for key, other in self.open.items() if other is reduction), None)
        if found is None or self.unit.model.backward_task != -1:
            return
        if not found.is_captured:
            self._reducer.launch_read(self)
            return
        for key in sorted(key for key in self.open if key.is_captured):  # `.grad` is no part of it, and may wait on
            self._launch(key)
        self._reducer.end_together()

    def launch_read(self) -> None:
        """Have all that `.grad` awaits leave now."""
        keys = sorted(self.open)
        if self._is_filling(keys):
            self._launch_all(owes=False)
        else:  # they owe an all-reduce, and nothing else
            for key in keys:
                self._launch(key, joins=False)

    def launch_everywhere(self) -> None:
        """Have all leave that any rank has begun, also if this one has not."""
        for bucket in self._all_buckets():
            key = ReductionKey(bucket.slots, is_captured=False)
            if key not in self.open:
                self._open(key, bucket)
        for key in sorted(self.open):
            self._launch(key)

    def check_deferred(self) -> None:
        """Raise, on every rank alike, where "zero1" has put the reduction off and some ranks alone have gradients."""
        if self.unit.settings.strategy == "zero1" and self.unit.settings.requires_sync:
            held = {slot for key, reduction in self.open.items() for slot in key.slots if reduction.holds(slot)}
            names = [param.name for param in self.unit.params]
            presence: list[tuple[ShardGroup, list[tuple[str, bool]]]] = [
                (bucket.group, [(names[slot], slot in held) for slot in bucket.slots]) for bucket in self._all_buckets()
            ]
            check_same_gradients(presence, *_DEFERRED)

    def begin_backward(self) -> None:
        """Forget what earlier micro-batches added up for gradients that are dropped by now, as by `zero_grad`."""
        for reduction in self.open.values():
            reduction.forget_dropped()
        self._before = frozenset(self.open)

    @property
    def has_left(self) -> bool:
        """Whether nothing waits for the end of the backward."""
        return not self.open and not self._early

    @property
    def is_complete(self) -> bool:
        """Whether all gradients have arrived in the backward that is running."""
        return self.is_begun and len(self._arrived) == len(self._bucket_of)

    def end_backward(self) -> None:
        """The backward has ended: nothing more arrives in it."""
        if self.is_begun:
            self.is_begun = False
            self._arrived.clear()
            self._filling.clear()

    def await_others(self) -> None:
        """Have all gradients that are not reduced yet await what other ranks may add up."""
        if all(key.is_captured for key in self.open):
            return
        keys = {ReductionKey(bucket.slots, is_captured=False): bucket for bucket in self._all_buckets()}
        if not self._is_filling(key for key in keys if key in self.open):
            return
        for key, bucket in keys.items():
            if key not in self.open and any(self.unit.params[slot].grad is not None for slot in bucket.slots):
                self._open(key, bucket)
            if key in self.open:
                self.open[key].await_missing()

    def forget_backward(self) -> None:
        """Drop what a backward that raised has left behind; what earlier micro-batches added up stays."""
        self.end_backward()
        self._early.clear()
        for key, reduction in list(self.open.items()):
            if not reduction.owes and (self.reduces_now or key not in self._before):
                del self.open[key]

    def clear(self) -> None:
        """Let go of all that has not left."""
        self.end_backward()
        self._early.clear()
        self.open.clear()


_OWED = "all-reduce over replicas", "Call set_requires_all_reduce(True) ahead of the last backward of a step."
_NUMBER = attrgetter("unit.number")


class Reducer:
    """All reductions of a model: the gradients of each of its units, and what of them is in flight.

    Args:
        context: Of the model.
    """

    def __init__(self, context: ModelContext) -> None:
        self._context = context
        self.check: FiniteCheck | None = None
        self.units: dict[Unit, UnitGradients] = {}  # that have had a gradient
        self._in_flight: list[GradReduction] = []
        self._sent_before: list[GradReduction] = []  # that were in flight when the backward began
        self._incomplete: list[GradReduction] = []  # that left in the backward that is running
        self._slice: _OfSlices | None = None  # the last one to send, whose last slice may be in flight

    @property
    def max_in_flight(self) -> int:
        """Reduce-scatters whose send buffers may live at the same time, besides the one that fills.

        As many all-reduces between replicas may be in each of their steps.
        """
        return self._context.settings.max_input_buffers or 1

    def reduces_now(self, unit: Unit) -> bool:
        """Whether the backward that runs reduces the gradients of a unit, rather than add them up."""
        return self.of(unit).reduces_now

    def of(self, unit: Unit) -> UnitGradients:
        """The gradients of a unit."""
        known = self.units.get(unit)
        if known is None:
            known = self.units[unit] = UnitGradients(unit, self)
        return known

    @property
    def open(self) -> list[GradReduction]:
        """Reductions that have not left, or that owe their all-reduce."""
        return [reduction for own in self.units.values() for reduction in own.open.values()]

    def reduce(self, unit: Unit) -> None:
        """The backward has passed `unit`: its gradients leave."""
        self.of(unit).reduce()

    def join(self, unit: Unit) -> None:
        """The backward has passed the regions of `unit`: its gradients leave on all ranks, which some may not have."""
        own = self.of(unit)
        if own.reduces_now:
            self._context.regions.unreduced.discard(unit)
        own.reduce(joins=True)

    # What leaves.

    def launch(self, reduction: GradReduction, *, owes: bool, joins: bool) -> None:
        """Start a reduction; the arguments are those of `GradReduction.launch`."""
        if reduction.owes:
            reduction.rest()
        self._make_room()
        reduction.launch(owes=owes, joins=joins)
        self._in_flight.append(reduction)
        self.note_incomplete(reduction)

    def note_incomplete(self, reduction: GradReduction) -> None:
        """Note a reduction that has left if this rank has not used all of its parameters."""
        if not reduction.is_complete:
            self._incomplete.append(reduction)

    def _make_room(self) -> None:
        """Have the oldest in flight take their next step: at the launches of later ones, on all ranks alike.

        The first step is the reduce-scatter, which holds its send buffer; those of an all-reduce over replicas follow.
        """
        self.make_room_for_slice(None)
        age = len(self._in_flight)
        for reduction in self._in_flight[: max(0, age + 1 - self.max_in_flight)]:
            reduction.advance(age // self.max_in_flight)
            age -= 1

    def make_room_for_slice(self, reduction: "_OfSlices | None") -> None:
        """Have the slice that another weight has in flight arrive, before `reduction` sends one."""
        before, self._slice = self._slice, reduction
        if before is not None and before is not reduction:
            before.settle()

    def on_landed(self, reduction: GradReduction) -> None:
        """A reduction is in flight no more."""
        if reduction in self._in_flight:
            self._in_flight.remove(reduction)

    def launch_read(self, gradients: UnitGradients) -> None:
        """A gradient is read ahead of its reduction: those of its unit leave.

        If all-reduces are owed, those of the whole model: a rank's first gradient may be in another unit.
        """
        leaving = [gradients]
        if any(reduction.owes for reduction in gradients.open.values()):
            owing = sorted(self.units.values(), key=_NUMBER)
            leaving = [own for own in owing if any(reduction.owes for reduction in own.open.values())]
            owed = [own.open[key] for own in leaving for key in sorted(own.open) if own.open[key].owes]
            check_same_gradients([(reduction.group, reduction.presence()) for reduction in owed], *_OWED)
        else:
            gradients.check_deferred()
        for own in leaving:
            own.launch_read()
        self.end_together()
        self.adopt_missing()

    def reduce_all(self) -> None:
        """Reduce all gradients that were added up, on all ranks alike, and leave nothing in flight.

        Communicates:
            An all-reduce of a byte per unit for each group of ranks; and the reductions that any rank has begun.
        """
        self.begin_backward()  # forgets what was dropped
        units = sorted(self._context.units, key=attrgetter("number"))
        for unit in flagged_anywhere(units, lambda unit: bool(self.of(unit).open)):
            self.of(unit).launch_everywhere()
        for reduction in list(self._in_flight):
            reduction.finish()
        self.adopt_missing()
        self._clear()

    def end_together(self) -> None:
        """Wait for reductions that end by a collective of their own: now, step by step, on all ranks alike."""
        while ending := [r for r in self._in_flight if r.ends_together and not r.is_finished]:
            for reduction in ending:
                reduction.advance(reduction.num_waited + 1)

    def adopt_missing(self) -> None:
        """Hand out gradients of parameters that other ranks alone used."""
        incomplete, self._incomplete = self._incomplete, []
        for reduction in incomplete:
            reduction.adopt_missing()

    # Backwards.

    def begin_backward(self) -> None:
        """Forget what earlier micro-batches added up for gradients that are dropped by now, as by `zero_grad`."""
        for own in self.units.values():
            own.begin_backward()
        self._sent_before = list(self._in_flight)

    @property
    def complete(self) -> set[Unit]:
        """Units of which all gradients have arrived in the backward that is running."""
        return {unit for unit, own in self.units.items() if own.is_complete}

    def end_backward(self) -> None:
        """Reduce what has not left, unit by unit."""
        for own in sorted((own for own in self.units.values() if not own.has_left), key=_NUMBER):
            own.reduce()
        for own in self.units.values():
            own.end_backward()
        self.end_together()
        self.adopt_missing()
        for own in self.units.values():
            own.await_others()
        self._slice = None  # the last one may stay in flight until somebody reads the gradient

    def forget_backward(self) -> None:
        """Drop what a backward that raised has left behind; what earlier micro-batches added up stays."""
        if self.check is not None:
            self.check.forget()
        self._incomplete.clear()
        self._slice = None
        for own in self.units.values():
            own.forget_backward()
        for reduction in [r for r in self._in_flight if r not in self._sent_before]:
            self._in_flight.remove(reduction)
            reduction.take_back()

    # What is dropped.

    def reset(self) -> None:
        """Drop gradients that have not left yet."""
        for reduction in self.open:
            reduction.take_back()
        self._clear()

    def _clear(self) -> None:
        for own in self.units.values():
            own.clear()
        self._incomplete.clear()
        self._slice = None

    def forget_step(self) -> None:
        """Wait no more for what is in flight, ahead of what leaves later: peers may never have sent theirs."""
        self._in_flight.clear()
        self.forget_deferrals()

    def forget_deferrals(self) -> None:
        """Forget how many backwards make a step, and units that have nothing here."""
        flying = {reduction.owner() for reduction in self._in_flight}
        self.units = {unit: own for unit, own in self.units.items() if own.open or own.is_begun or own in flying}
        for own in self.units.values():
            own.deferral = Deferral()

    def forget(self, unit: Unit) -> None:
        """Drop what a unit has begun, whose gradients all are here or were dropped: it is to have other parameters."""
        if unit in self.units:
            self.units[unit].open.clear()


class _OfSlices(Protocol):
    """The reduction of a weight that travels in slices."""

    def settle(self) -> None:
        """Wait for what is in flight."""
