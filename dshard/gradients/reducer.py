"""All reductions of a model: which are open, when they leave, and how many may be in flight."""

import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

from dshard.collectives import ShardGroup
from dshard.errors import StateError, UnsupportedOpError
from dshard.gradients.arrivals import Arrivals, ReductionKey
from dshard.gradients.deferral import Deferral
from dshard.gradients.finite import FiniteCheck
from dshard.gradients.owed import check_same_gradients
from dshard.gradients.reduction import GradReduction, accumulates
from dshard.tensor import ShardedTensor
from dshard.units.context import ModelContext
from dshard.units.unit import Unit
from dshard.units.virtual_ranks import VirtualRanks

_OWED = "all-reduce over replicas", "Call set_requires_all_reduce(True) ahead of the last backward of a step."
_DEFERRED = (
    "reduction, which zero1 puts off until as many backwards as the step before had,",
    "Run equally many backwards in each step, or give it the strategy 'zero2'.",
)


class Reducer:
    """All reductions of a model: which are open, and how many may be in flight.

    Args:
        context: Of the model.
    """

    def __init__(self, context: ModelContext) -> None:
        self._context = context
        self.on_arrival: Callable[[Unit], object] = lambda _: None  # called with a unit at its first gradient
        self.check: FiniteCheck | None = None
        self._open: dict[ReductionKey, tuple[Unit, GradReduction]] = {}
        self._in_flight: list[GradReduction] = []
        self._before: frozenset[ReductionKey] = frozenset()  # that were open when the backward began
        self._sent_before: list[GradReduction] = []  # that were in flight then
        self._incomplete: list[GradReduction] = []  # that left in the backward that is running
        self._early: dict[Unit, set[ReductionKey]] = {}  # that left ahead of the rest of the unit, for they were read
        self._arrivals: dict[Unit, Arrivals] = {}
        self._slice: _OfSlices | None = None  # the last one to send, whose last slice may be in flight
        self._deferrals: dict[Unit, Deferral] = {}  # of those that put reductions off

    @property
    def max_in_flight(self) -> int:
        """Reduce-scatters whose send buffers may live at the same time, besides the one that fills.

        As many all-reduces between replicas may be in each of their steps.
        """
        return self._context.settings.max_input_buffers or 1

    def _deferral_of(self, unit: Unit) -> Deferral | None:
        """The deferral of a unit that puts reductions off, else None."""
        return self._deferrals.setdefault(unit, Deferral()) if unit.settings.strategy == "zero1" else None

    def reduces_now(self, unit: Unit) -> bool:
        """Whether the backward that runs reduces the gradients of a unit, rather than add them up."""
        virtual = self._context.virtual
        if virtual is not None:
            return unit.settings.requires_sync and virtual.is_last
        deferral = self._deferral_of(unit)
        return unit.settings.requires_sync and (deferral is None or deferral.is_due)

    def forget_deferrals(self) -> None:
        """Forget how many backwards make a step."""
        self._deferrals.clear()

    def receive(self, unit: Unit, slot: int, grad: Tensor, *, may_wait: bool = False) -> ShardedTensor:
        """Take the full gradient of a parameter; gives the reduced one, which may still be in flight.

        Args:
            unit: The parameter's.
            slot: Its number there.
            grad: The gradient.
            may_wait: Whether nobody else can write to `grad`, so that it may be packed later.
        """
        if self._context.virtual is not None:
            self._check_virtual(self._context.virtual, unit, unit.params[slot])
        arrivals = self._arrivals.get(unit)
        if arrivals is None:
            arrivals = self._arrivals[unit] = Arrivals.of(unit)
            deferral = self._deferral_of(unit)
            if deferral is not None and unit.settings.requires_sync:
                deferral.note_backward(is_first=all(p.grad is None for p in unit.params))
            self.on_arrival(unit)
        param = unit.params[slot]
        if self.check is not None:
            self.check.note(param.name, grad)
        reduction = arrivals.open.get(slot)
        if reduction is None or not unit.settings.requires_sync or not reduction.awaits(slot):
            reduction = self._reduction_for(unit, param, arrivals)
        out = reduction.receive(param, grad, may_wait=may_wait)
        arrivals.arrived.add(slot)
        if len(arrivals.arrived) == len(unit.params):  # a frozen one may be used still
            self._context.eviction.after_backward(unit)
        return out

    def _reduction_for(self, unit: Unit, param: ShardedTensor, arrivals: Arrivals) -> GradReduction:
        """The open reduction that a gradient belongs to, or a new one."""
        slot = param.gather_slot
        bucket = arrivals.buckets[slot]
        key = ReductionKey(id(unit), bucket.slots, is_captured=False)
        entry = self._open.get(key)
        is_old = entry is not None and (entry[1].holds(slot) or entry[1].owes)
        if (is_old or not unit.settings.requires_sync or not unit.settings.requires_all_reduce) and not accumulates(
            param
        ):
            key = ReductionKey(id(unit), bucket.slots, is_captured=True)
            entry = self._open.get(key)
        is_apart = key.is_captured or param.grad is None or len(param._backward_hooks or ()) > 1
        if entry is not None and entry[1].holds(slot) and is_apart:
            # The gradient of an earlier backward must not grow: somebody kept it, and `.grad` is no part of it; or a
            # hook wants to see that of this backward alone.
            self._launch(key, joins=False)
            entry = None
        if entry is None:
            entry = self._open[key] = (unit, GradReduction(unit, bucket, weakref.ref(self)))
        if not key.is_captured:
            arrivals.open.update(dict.fromkeys(bucket.slots, entry[1]))
        return entry[1]

    def _launch(self, key: ReductionKey, *, owes: bool = False, joins: bool = True) -> None:
        """Start a reduction; the arguments are those of `GradReduction.launch`."""
        _, reduction = self._open[key]
        if not owes:
            del self._open[key]
        if reduction.owes:
            reduction.rest()
        self._make_room()
        reduction.launch(owes=owes, joins=joins)
        self._in_flight.append(reduction)
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

    def reduce(self, unit: Unit) -> None:
        """The backward has passed `unit`: its gradients leave.

        They leave here, or else when the backward ends, and not when the last one arrives: which parameters a rank uses
        may be its own matter, but when its collectives start must not be.
        """
        virtual = self._context.virtual
        if virtual is not None and unit.settings.requires_sync and self._keys_of(unit):
            virtual.closed.add(unit)
        if self.reduces_now(unit):
            self._launch_all(unit, owes=not unit.settings.requires_all_reduce)

    def _check_virtual(self, virtual: VirtualRanks, unit: Unit, param: ShardedTensor) -> None:
        """Raise where a gradient is none that a virtual rank may have."""
        virtual.check_open(param.name, "a backward")
        if virtual.has_failed:
            raise StateError(
                f"{param.name}: a backward within the loop over virtual ranks raised, and what it left cannot be told "
                "from whole gradients. Leave the loop, call zero_grad(), and run the step again."
            )
        if unit in virtual.closed:
            raise StateError(
                f"{param.name}: each virtual rank reduces a gradient once, but its gradient arrived again after that. "
                "Run all backwards of a virtual rank but the last in dshard.no_sync(model), and checkpoint with "
                "use_reentrant=False."
            )
        if len(param._backward_hooks or ()) > 1 or not accumulates(param):
            what = "a hook is to see it" if accumulates(param) else "autograd.grad asks for it"
            raise UnsupportedOpError(
                f"{param.name}: a gradient is added up over all virtual ranks before anybody may see it, but {what}. "
                "Look at .grad after the loop."
            )
        if param.grad is None and any(other is unit and r.holds(param.gather_slot) for other, r in self._open.values()):
            raise virtual.dropped(param.name)

    def abandon(self) -> None:
        """Drop what has not left; who holds such a gradient is told when it is read."""
        for _, reduction in self._open.values():
            reduction.is_abandoned = True
        self._clear()

    def unreduced(self) -> str | None:
        """The name of a parameter whose gradient has been added up, and not reduced, if there is one."""
        self.begin_backward()
        held = (name for _, r in self._open.values() for name, is_held in r.presence() if is_held)
        return next(held, None)

    def _launch_all(self, unit: Unit, *, owes: bool) -> None:
        """Launch all buckets of a unit, also those that the peers alone may have used, if this rank has used any."""
        early = self._early.pop(unit, None) if self._early else None
        keys = self._keys_of(unit)
        if owes and not early and not self._is_filling(keys):
            return  # all that is here rests until the backward that all-reduces
        arrivals = self._arrivals.get(unit)
        buckets = arrivals.all_buckets if arrivals is not None else unit.buckets(unit.trainable, unit.reduce_dtypes)
        if len(keys) == 1 == len(buckets) and not early:  # as nearly always
            self._launch(keys[0], owes=owes and self._may_owe(keys[0]))
            return
        known = {*keys, *(early or ())}
        for is_captured in {key.is_captured for key in known}:
            for bucket in buckets:
                key = ReductionKey(id(unit), bucket.slots, is_captured=is_captured)
                if key not in known:
                    self._open[key] = (unit, GradReduction(unit, bucket, weakref.ref(self)))
                    keys.append(key)
        for key in sorted(keys, key=lambda k: k.order):
            self._launch(key, owes=owes and self._may_owe(key))

    def _keys_of(self, unit: Unit) -> list[ReductionKey]:
        return [key for key, (other, _) in self._open.items() if other is unit]

    def _is_filling(self, keys: Iterable[ReductionKey]) -> bool:
        return any(self._open[key][1].is_filling for key in keys)

    def _may_owe(self, key: ReductionKey) -> bool:
        """Whether an all-reduce over replicas can be put off: `.grad` takes the result, and no hook is given it."""
        unit, reduction = self._open[key]
        hooks = (unit.params[slot]._backward_hooks or () for slot in key.slots)
        return reduction.group.replicas is not None and not key.is_captured and not any(len(own) > 1 for own in hooks)

    def on_finished(self, reduction: GradReduction) -> None:
        """Forget a reduction that ended, or that rests until its all-reduce."""
        for key, (unit, other) in list(self._open.items()):
            if other is reduction and not reduction.owes:  # a gradient was read before its unit was complete
                del self._open[key]
                self._early.setdefault(unit, set()).add(key)
                if not reduction.is_complete:
                    self._incomplete.append(reduction)
        if reduction in self._in_flight:
            self._in_flight.remove(reduction)

    def reset(self) -> None:
        """Drop gradients that have not left yet."""
        for _, reduction in self._open.values():
            reduction.take_back()
        self._clear()

    def _clear(self) -> None:
        self._open.clear()
        self._early.clear()
        self._arrivals.clear()
        self._incomplete.clear()
        self._slice = None

    def forget_step(self) -> None:
        """Wait no more for what is in flight, ahead of what leaves later: peers may never have sent theirs."""
        self._in_flight.clear()
        self.forget_deferrals()

    def forget(self, unit: Unit) -> None:
        """Drop what a unit has begun, whose gradients all are here or were dropped: it is to have other parameters."""
        for key in self._keys_of(unit):
            del self._open[key]

    def begin_backward(self) -> None:
        """Forget what earlier micro-batches added up for gradients that are dropped by now, as by `zero_grad`."""
        for _, reduction in self._open.values():
            reduction.forget_dropped()
        self._before = frozenset(self._open)
        self._sent_before = list(self._in_flight)

    def forget_backward(self) -> None:
        """Drop what a backward that raised has left behind; what earlier micro-batches added up stays."""
        if self.check is not None:
            self.check.forget()
        self._arrivals.clear()
        self._early.clear()
        self._incomplete.clear()
        self._slice = None
        for key, (unit, reduction) in list(self._open.items()):
            if not reduction.owes and (self.reduces_now(unit) or key not in self._before):
                del self._open[key]
        for reduction in [r for r in self._in_flight if r not in self._sent_before]:
            self._in_flight.remove(reduction)
            reduction.take_back()

    @property
    def complete(self) -> set[Unit]:
        """Units of which all gradients have arrived in the backward that is running."""
        return {unit for unit, arrivals in self._arrivals.items() if len(arrivals.arrived) == len(arrivals.buckets)}

    def end_backward(self) -> None:
        """Reduce what has not left, unit by unit."""
        for unit in sorted({*self._early, *(unit for unit, _ in self._open.values())}, key=lambda u: u.number):
            self.reduce(unit)
        self._arrivals.clear()
        self._end_together()
        self.adopt_missing()
        self._await_others()
        self._slice = None  # the last one may stay in flight until somebody reads the gradient

    def _await_others(self) -> None:
        """Have all gradients of units that are not reduced yet await what other ranks may add up."""
        for unit in dict.fromkeys(unit for key, (unit, _) in self._open.items() if not key.is_captured):
            buckets = unit.buckets(unit.trainable, unit.reduce_dtypes)
            keys = [ReductionKey(id(unit), bucket.slots, is_captured=False) for bucket in buckets]
            if not self._is_filling(key for key in keys if key in self._open):
                continue
            for key, bucket in zip(keys, buckets, strict=True):
                if key not in self._open and any(unit.params[slot].grad is not None for slot in bucket.slots):
                    self._open[key] = (unit, GradReduction(unit, bucket, weakref.ref(self)))
                if key in self._open:
                    self._open[key][1].await_missing()

    def _end_together(self) -> None:
        """Wait for reductions that end by a collective of their own: now, step by step, on all ranks alike."""
        while ending := [r for r in self._in_flight if r.ends_together and not r.is_finished]:
            for reduction in ending:
                reduction.advance(reduction.num_waited + 1)

    def on_read(self, reduction: GradReduction) -> None:
        """A gradient is read outside of a backward before it has left: all of its unit leave, to be read alike.

        If all-reduces are owed, those of the whole model: a rank's first gradient may be in another unit. Within a
        backward, its end does it.
        """
        if self._context.backward_task != -1:
            return
        found = next((key for key, (_, other) in self._open.items() if other is reduction), None)
        if found is None:
            return
        unit = self._open[found][0]
        if self._context.virtual is not None and self._context.virtual.is_open:
            raise self._context.virtual.read_early(unit.label)
        if found.is_captured:  # `.grad` is no part of it, and may wait on
            for key in sorted((key for key in self._keys_of(unit) if key.is_captured), key=lambda k: k.order):
                self._launch(key)
            self._end_together()
            return
        owing = {key: entry for key, entry in self._open.items() if entry[1].owes}
        units = {unit}
        if any(other is unit for other, _ in owing.values()):
            units = {other for other, _ in owing.values()}
            ordered = sorted(owing, key=lambda key: (owing[key][0].number, key.order))
            presence = [(owing[key][1].group, owing[key][1].presence()) for key in ordered]
            check_same_gradients(presence, *_OWED)
        elif self._deferral_of(unit) is not None and unit.settings.requires_sync:
            check_same_gradients(self._presence(unit), *_DEFERRED)
        for other in sorted(units, key=lambda u: u.number):
            self._launch_unread(other)
        self._end_together()
        self.adopt_missing()

    def _presence(self, unit: Unit) -> list[tuple[ShardGroup, list[tuple[str, bool]]]]:
        """The ranks of each bucket of a unit, and of which parameters gradients wait to be reduced."""
        held = {slot for key in self._keys_of(unit) for slot in key.slots if self._open[key][1].holds(slot)}
        buckets = unit.buckets(unit.trainable, unit.reduce_dtypes)
        return [(b.group, [(unit.params[slot].name, slot in held) for slot in b.slots]) for b in buckets]

    def _launch_unread(self, unit: Unit) -> None:
        keys = sorted(self._keys_of(unit), key=lambda k: k.order)
        if self._is_filling(keys):
            self._launch_all(unit, owes=False)
        else:  # they owe an all-reduce, and nothing else
            for key in keys:
                self._launch(key, joins=False)

    def adopt_missing(self) -> None:
        """Hand out gradients of parameters that other ranks alone used."""
        incomplete, self._incomplete = self._incomplete, []
        for reduction in incomplete:
            reduction.adopt_missing()


class _OfSlices(Protocol):
    """The reduction of a weight that travels in slices."""

    def settle(self) -> None:
        """Wait for what is in flight."""
