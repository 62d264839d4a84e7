"""The gradients of one unit: which have arrived, and the reductions that take them."""

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from dshard.collectives import ShardGroup
from dshard.gradients.deferral import Deferral
from dshard.gradients.owed import check_same_gradients
from dshard.gradients.reduction import GradReduction, accumulates
from dshard.tensor import ShardedTensor
from dshard.units.buckets import Bucket
from dshard.units.unit import Unit

if TYPE_CHECKING:
    from dshard.gradients.reducer import Reducer

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
        self._buckets: list[Bucket] = []  # in it, of the parameters that take a gradient
        self._bucket_of: dict[int, Bucket] = {}
        self._filling: dict[int, GradReduction] = {}  # for each parameter, what took the last gradient of its bucket
        self._early: set[ReductionKey] = set()  # that left ahead of the rest, for they were read
        self._before: frozenset[ReductionKey] = frozenset()  # that were open when the backward began

    # What arrives.

    def begin(self) -> None:
        """The first gradient in a backward has arrived."""
        unit = self.unit
        self.is_begun = True
        self._buckets = unit.buckets(unit.trainable, unit.reduce_dtypes)
        self._bucket_of = {slot: bucket for bucket in self._buckets for slot in bucket.slots}
        if unit.settings.strategy == "zero1" and unit.settings.requires_sync:
            self.deferral.note_backward(is_first=all(p.grad is None for p in unit.params))

    def receive(self, slot: int, grad: Tensor, *, may_wait: bool) -> ShardedTensor:
        """Take the full gradient of a parameter; gives the reduced one, which may still be in flight."""
        unit, reduction = self.unit, self._filling.get(slot)
        if reduction is None or not unit.settings.requires_sync or not reduction.awaits(slot):
            reduction = self._reduction_for(slot)
        out = reduction.receive(unit.params[slot], grad, may_wait=may_wait)
        self._arrived.add(slot)
        if len(self._arrived) == len(unit.params) and unit not in unit.model.regions.units:  # a frozen one may be used
            unit.model.eviction.after_backward(unit)
        return out

    def _reduction_for(self, slot: int) -> GradReduction:
        """The open reduction that a gradient belongs to, or a new one."""
        param, settings, bucket = self.unit.params[slot], self.unit.settings, self._bucket_of[slot]
        key = ReductionKey(bucket.slots, is_captured=False)
        known = self.open.get(key)
        is_old = known is not None and (known.holds(slot) or known.owes)
        if (is_old or not settings.requires_sync or not settings.requires_all_reduce) and not accumulates(param):
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
            self._buckets, self._bucket_of = [], {}
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
