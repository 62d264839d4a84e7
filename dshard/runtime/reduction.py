"""Gradients on their way: packed as they arrive, reduced once per unit and backward, awaited at their first use."""

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dshard import collectives
from dshard.collectives import Handle, ReduceBucket, Reduced, ReduceOp
from dshard.errors import DivergenceError, UnsupportedOpError
from dshard.runtime.unit import Bucket, Unit
from dshard.tensor import ShardedTensor
from dshard.tensor.cell import ShardCell

__all__ = ["GradReduction", "Reducer", "hook_gradient"]


class GradReduction:
    """The gradients of one bucket of a unit, from the first arrival to the reduced shards.

    Args:
        unit: Whose gradients they are.
        bucket: Which of its parameters.
        mean: Whether to average over the ranks, rather than add.
        divisor: What to divide the sum by, in the place of the number of ranks.
    """

    def __init__(self, unit: Unit, bucket: Bucket, *, mean: bool, divisor: float | None) -> None:
        # Weak, for a gradient that nobody reads must not keep the model alive.
        self._unit, self._slots = weakref.ref(unit), bucket.slots
        self._mean, self._divisor = mean and divisor is None, divisor
        first = unit.params[bucket.slots[0]]
        self._bucket = ReduceBucket(
            bucket.layout,
            bucket.group,
            dtype=first.dtype,
            device=first.device,
            label=unit.label,
            pool=unit.observer.pool,
        )
        self._cells: dict[int, weakref.ref[ShardCell]] = {}
        self._handle: Handle[Reduced] | None = None
        self._is_finished = False

    @property
    def is_complete(self) -> bool:
        """Whether every gradient has arrived."""
        return self._bucket.is_complete

    def receive(self, param: ShardedTensor, grad: Tensor) -> ShardedTensor:
        """Pack a full gradient of this rank and give the reduced one, which is not there yet."""
        slot = param._slot
        index = self._slots.index(slot)
        cell = self._cells[slot]() if slot in self._cells else None
        is_added = cell is not None
        if cell is None:
            self._bucket.discard(index)
            cell = ShardCell(None, param._layout, self._resolve, is_shared=True)
            self._cells[slot] = weakref.ref(cell)
        self._bucket.add(index, grad if grad.dtype == param.dtype else grad.to(param.dtype))
        out = param.like(cell)
        out._is_added = is_added
        return out

    def holds(self, slot: int) -> bool:
        """Whether it holds a gradient of parameter `slot` that somebody still refers to."""
        return slot in self._cells and self._cells[slot]() is not None

    def launch(self) -> None:
        """Start the reduce-scatter, once."""
        if self._handle is None:
            with torch.inference_mode(mode=False), torch.no_grad():
                self._handle = self._bucket.launch(mean=self._mean)

    def _resolve(self, cell: ShardCell) -> None:
        self.finish()

    def finish(self) -> Reduced:
        """Wait for the reduced shards and hand them to those who refer to them."""
        self.launch()
        assert self._handle is not None
        with torch.inference_mode(mode=False), torch.no_grad():
            reduced = self._handle.wait()
        if not self._is_finished:
            self._is_finished = True
            unit = self._unit()
            if unit is not None:
                unit.observer.on_reduced(self)
            if self._divisor is not None:
                torch._foreach_div_(reduced.shards, self._divisor)
            for slot, ref in self._cells.items():
                cell = ref()
                if cell is not None:
                    cell.deliver(reduced.shards[self._slots.index(slot)])
        return reduced

    def adopt_missing(self) -> None:
        """Give a gradient to parameters that this rank did not use but another did; waits for the reduce-scatter."""
        missing = [(i, slot) for i, slot in enumerate(self._slots) if not self._bucket.has(i)]
        unit = self._unit()
        if not missing or unit is None:
            return
        reduced = self.finish()
        for index, slot in missing:
            if not reduced.anywhere(index):
                continue
            param = unit.params[slot]
            cell = ShardCell(reduced.shards[index], param._layout, is_shared=True)
            grad: Any = param.grad
            if grad is None:
                with torch.no_grad():
                    param.grad = param.like(cell)
            else:
                grad._cell.add_later(cell)  # as autograd adds on the ranks that used it: no write to be compared


class Reducer:
    """All reductions of a model: which are open, and how many may be in flight.

    Args:
        max_in_flight: Reduce-scatters whose send buffers may live at the same time, besides the one that fills.
    """

    def __init__(self, max_in_flight: int = 1) -> None:
        self.divisor: float | None = None  # in the place of the number of ranks
        self.max_in_flight = max_in_flight
        self._open: dict[_Key, tuple[Unit, GradReduction]] = {}
        self._in_flight: list[GradReduction] = []
        self._incomplete: list[GradReduction] = []  # that left in the backward that is running
        self._arrivals: dict[Unit, _Arrivals] = {}

    def receive(self, unit: Unit, slot: int, grad: Tensor) -> ShardedTensor:
        """Take the full gradient of a parameter; gives the reduced one, which may still be in flight."""
        arrivals = self._arrivals.get(unit)
        if arrivals is None:
            arrivals = self._arrivals[unit] = _Arrivals.of(unit)
        bucket = arrivals.buckets[slot]
        param = unit.params[slot]
        key = _Key(id(unit), bucket.slots, is_captured=False)
        entry = self._open.get(key)
        if (not unit.requires_sync or (entry is not None and entry[1].holds(slot))) and not _accumulates(param):
            key = _Key(id(unit), bucket.slots, is_captured=True)
            entry = self._open.get(key)
        is_apart = key.is_captured or param.grad is None or len(param._backward_hooks or ()) > 1
        if entry is not None and entry[1].holds(slot) and is_apart:
            # The gradient of an earlier backward must not grow: somebody kept it, and `.grad` is no part of it; or a
            # hook wants to see that of this backward alone.
            self._launch(key)
            entry = None
        if entry is None:
            entry = self._open[key] = (unit, GradReduction(unit, bucket, mean=unit.averages, divisor=self.divisor))
        reduction = entry[1]
        out = reduction.receive(param, grad)
        arrivals.arrived.add(slot)
        if len(arrivals.arrived) == len(unit.params):  # a frozen one may be used still
            unit.observer.on_backward_done(unit)
        return out

    def _launch(self, key: "_Key") -> GradReduction:
        _, reduction = self._open.pop(key)
        while len(self._in_flight) >= self.max_in_flight:
            self._in_flight[0].finish()
        reduction.launch()
        self._in_flight.append(reduction)
        if not reduction.is_complete:
            self._incomplete.append(reduction)
        return reduction

    def reduce(self, unit: Unit) -> None:
        """The backward has passed `unit`: its gradients leave.

        They leave here, or else when the backward ends, and not when the last one arrives: which parameters a rank uses
        may be its own matter, but when its collectives start must not be.
        """
        if unit.requires_sync:
            for key in sorted((k for k, (u, _) in self._open.items() if u is unit), key=lambda k: k.place):
                self._launch(key)

    def on_finished(self, reduction: GradReduction) -> None:
        """Forget a reduction that ended."""
        for key, (_, other) in list(self._open.items()):
            if other is reduction:  # a gradient was read before its unit was complete
                del self._open[key]
                if not reduction.is_complete:
                    self._incomplete.append(reduction)
        if reduction in self._in_flight:
            self._in_flight.remove(reduction)

    @property
    def options(self) -> tuple[float | None, int]:
        """What copies take along."""
        return self.divisor, self.max_in_flight

    @options.setter
    def options(self, value: tuple[float | None, int]) -> None:
        self.divisor, self.max_in_flight = value

    def reset(self) -> None:
        """Drop gradients that have not left yet."""
        self._open.clear()
        self._arrivals.clear()
        self._incomplete.clear()

    def forget_backward(self) -> None:
        """Drop what a backward that raised has left behind; gradients of earlier micro-batches without sync stay."""
        self._arrivals.clear()
        self._incomplete.clear()
        for key, (unit, _) in list(self._open.items()):
            if unit.requires_sync:
                del self._open[key]

    def end_backward(self) -> None:
        """Reduce what has not left, unit by unit."""
        self._arrivals.clear()
        units = {id(unit): unit for unit, _ in self._open.values()}
        for unit in sorted(units.values(), key=lambda u: u.place):
            self.reduce(unit)
        self.adopt_missing()

    def adopt_missing(self) -> None:
        """Hand out gradients of parameters that other ranks alone used."""
        incomplete, self._incomplete = self._incomplete, []
        for reduction in incomplete:
            reduction.adopt_missing()


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """Which gradients of a unit have arrived in the backward that is running.

    Args:
        buckets: For each parameter that takes a gradient, its bucket.
        arrived: Those whose gradients are here.
    """

    buckets: dict[int, Bucket]
    arrived: set[int]

    @classmethod
    def of(cls, unit: Unit) -> "_Arrivals":
        """None so far."""
        return cls({slot: bucket for bucket in unit.buckets(unit.trainable) for slot in bucket.slots}, set())


@dataclass(frozen=True, slots=True)
class _Key:
    """Which reduction a gradient belongs to.

    Args:
        unit_id: Identity of the unit.
        slots: The bucket's parameters.
        is_captured: Whether `autograd.grad` takes the result, rather than `.grad`.
    """

    unit_id: int
    slots: tuple[int, ...]
    is_captured: bool

    @property
    def place(self) -> tuple[tuple[int, ...], bool]:
        """Orders the reductions of one unit, on all ranks alike."""
        return self.slots, self.is_captured


def _accumulates(param: ShardedTensor) -> bool:
    """Whether the backward that is running ends in `param.grad`, rather than in a result of `autograd.grad`."""
    try:
        node = torch.autograd.graph.get_gradient_edge(param).node
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch's answer for a leaf under autograd.grad
        return False


class _ReduceGrad(torch.autograd.Function):
    """A reduction that autograd records, for `create_graph`."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, unit: Unit, slot: int, reducer: Reducer) -> ShardedTensor:
        ctx.unit = unit
        ctx.group = unit.params[slot]._group
        ctx.divisor = reducer.divisor or (ctx.group.num_ranks if unit.averages else 1)
        return reducer.receive(unit, slot, _plain(grad))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Every rank's loss may depend on the reduced gradient; each contribution was averaged in with weight 1/N."""
        total = collectives.all_reduce(
            [_plain(grad)], ctx.group, ReduceOp.SUM, label=f"double backward of '{ctx.unit.label}'"
        ).wait()[0]
        return total / ctx.divisor, None, None, None


def _plain(grad: Tensor) -> Tensor:
    """A gradient as a plain tensor."""
    return grad.materialize() if isinstance(grad, ShardedTensor) else grad


def route_gradient(param: ShardedTensor, grad: Tensor | None) -> Tensor | None:
    """The hook of every sharded parameter: full gradient of this rank in, reduced gradient out."""
    if grad is None or (isinstance(grad, ShardedTensor) and grad._cell.is_shared):
        return grad  # none, or one that a nested autograd.grad has reduced already
    assert isinstance(param._source, Unit), "a gradient hook outlived its unit"
    unit = param._source
    if not param.requires_grad:
        return grad  # frozen since the forward: autograd drops it
    if grad.layout != torch.strided:
        raise UnsupportedOpError(
            f"{param.name}: gradients of sharded parameters must be dense, but this one has layout {grad.layout}. "
            "Build the embedding with sparse=False."
        )
    reducer = unit.observer.start_backward()
    if grad.shape != param.shape:
        raise DivergenceError(
            f"{param.name}: a gradient must have the parameter's shape {tuple(param.shape)}, but it is "
            f"{tuple(grad.shape)}. Look at the backward of custom autograd functions."
        )
    if torch.is_grad_enabled() and grad.requires_grad:
        out: Tensor = _ReduceGrad.apply(grad, unit, param._slot, reducer)
        return out
    if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():  # the two scopes cost microseconds
        return reducer.receive(unit, param._slot, _plain(grad))
    with torch.inference_mode(mode=False), torch.no_grad():
        return reducer.receive(unit, param._slot, _plain(grad))


def hook_gradient(param: ShardedTensor) -> None:
    """Have the gradients of a parameter reduced, from the first time that it takes any."""
    if param.requires_grad and param.is_leaf and param._grad_hook is None:
        # `swap_tensors` leaves a dict of hooks behind that autograd no longer knows; start from a new one.
        known = param._backward_hooks or {}
        others = [hook for hook in known.values() if getattr(hook, "func", None) is not route_gradient]
        param._backward_hooks = None
        param._grad_hook = param.register_hook(partial(route_gradient, param))
        for hook in others:
            param.register_hook(hook)
