"""From a traced step, and a device or measured times, to the costs that the planner plans with."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from dshard.arguments import checked
from dshard.errors import PlanError
from dshard.planner.costs import Cluster, Link, Links, ModelCosts, ParamCosts, UnitCosts
from dshard.planner.devices import Device, find_device
from dshard.planner.rates import Rates
from dshard.planner.traces import Trace

_START_S = 6.6e-6  # of a collective: torch/distributed/tensor/_collective_utils.py


@checked
@dataclass(frozen=True, slots=True)
class Training:
    """How a model is trained, as far as it costs bytes.

    Args:
        compute_dtype: Of parameters where they are used, and of activations; None for that of each parameter.
        reduce_dtype: In which gradients are reduced; None for the compute dtype.
        state_bytes_per_element: Of the optimizer, between steps: 8 for AdamW, 0 for SGD without momentum.
        step_bytes_per_element: Of the optimizer, while it steps: of AdamW 4, or 8 if it steps one by one.
        steps_together: Whether it steps all parameters at once (`foreach`), as by default on CUDA, or one by one.
        num_backwards: Micro-batches per step of the optimizer.
        tokens_per_sample: For rates of tokens; 0 where samples have none.
    """

    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    state_bytes_per_element: int = 8
    step_bytes_per_element: int = 4
    steps_together: bool = True
    num_backwards: int = 1
    tokens_per_sample: int = 0


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Times of one unit, in seconds."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds that the host takes per parameter, beside what computes.

    Args:
        forward_s: For its use in forward.
        backward_s: For its use in backward, and for its gradient.
        optimizer_s: For its step, all that does not depend on its size.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0


def costs_of(
    trace: Trace,
    model: nn.Module,
    *,
    training: Training,
    device: Device | None = None,
    times: Sequence[UnitTimes] | None = None,
    optimizer_s_per_byte: float = 0.0,
    overhead: Overhead = Overhead(),
    batch_size: int = 1,
    rates: Rates | None = None,
) -> ModelCosts:
    """Costs of a model's step, units in the order in which forward uses them.

    Activations are told so that their sum up to a unit, with what is live only while that unit runs, is never below
    what the trace saw.

    Args:
        trace: Of the model, in the compute dtype.
        model: For shapes and dtypes of its parameters.
        training: Dtypes and optimizer.
        device: Tells times from operations, unless they are given.
        times: Measured ones, for each part of the trace.
        optimizer_s_per_byte: Of what an optimizer's step reads and writes; a device tells its own.
        overhead: Of dshard itself, for each parameter: what it adds to measured times.
        batch_size: Samples of the traced step.
        rates: Which parts of the device's figures are reached; None for those of its efficiency.

    Raises:
        PlanError: Neither a device nor times are given.
    """
    if times is None:
        times, optimizer_s_per_byte = _told(trace, device, rates)
    params = dict(model.named_parameters())
    splittable = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding))}
    units, names = [], {module: name for name, module in model.named_modules()}
    for i, memory in zip(trace.order, _memory_of(trace), strict=True):
        own = [_param_costs(name, params[name], training, splittable) for name in trace.parts[i].params]
        num_trained = sum(1 for p in own if p.grad_itemsize)
        copies = _copies_of(own, device, rates)
        units.append(
            UnitCosts(
                name=trace.parts[i].label,
                params=tuple(own),
                forward_s=times[i].forward_s + overhead.forward_s * len(own) + copies.forward_s,
                backward_s=times[i].backward_s + overhead.backward_s * num_trained + copies.backward_s,
                activation_bytes=memory.kept,
                forward_transient_bytes=memory.forward,
                backward_transient_bytes=memory.backward,
                gradients_transient_bytes=memory.gradients,
                optimizer_s=_touched_bytes(own) * optimizer_s_per_byte,
                optimizer_start_s=overhead.optimizer_s * num_trained,
                slice_overhead_s=device.efficiency.kernel_s if device is not None else 2e-5,
                is_used_in_backward=i not in trace.unused_in_backward,
                source="measured" if device is None else f"traced, {device.name}",
                modules=tuple(names[module] for module in trace.parts[i].modules),
            )
        )
    return ModelCosts(
        units=tuple(units),
        batch_size=batch_size * training.num_backwards,
        num_backwards=training.num_backwards,
        buffer_bytes=_buffer_bytes(model) + trace.input_bytes,
        steps_together=training.steps_together,
        tokens_per_sample=training.tokens_per_sample,
        source=units[0].source if units else "traced",
    )


def _told(trace: Trace, device: Device | None, rates: Rates | None) -> tuple[list[UnitTimes], float]:
    """What a device tells: times of the parts, and of a byte that an optimizer's step reads or writes.

    Raises:
        PlanError: There is none.
    """
    if device is None:
        raise PlanError("plan: must know a device, or measured times, but has neither. Pass device='a100-80g'.")
    if rates is not None:
        return _times_of(trace, device, rates), rates.seconds_per_byte(device)
    return _times_of(trace, device, rates), 1 / (device.memory_bytes_per_s * device.efficiency.memory)


def _buffer_bytes(model: nn.Module) -> int:
    return sum({id(b.untyped_storage()): b.numel() * b.element_size() for b in model.buffers()}.values())


def _touched_bytes(params: Sequence[ParamCosts]) -> int:
    """What an optimizer's step reads and writes: parameters and states both, gradients are read."""
    return sum(p.numel * (3 * p.stored_itemsize + 2 * p.state_bytes_per_element) for p in params)


def _copies_of(params: Sequence[ParamCosts], device: Device | None, rates: Rates | None) -> UnitTimes:
    """Of what is gathered for forward, and of gradients, into and out of buffers; the same under every strategy."""
    if device is None or rates is None:
        return UnitTimes(0.0, 0.0)
    gathered, reduced = (sum(p.numel * getattr(p, f"{kind}_itemsize") for p in params) for kind in ("gather", "grad"))
    return UnitTimes(rates.copies_s(device, gathered), rates.copies_s(device, reduced))


def _times_of(trace: Trace, device: Device, rates: Rates | None) -> list[UnitTimes]:
    seconds = [[0.0, 0.0] for _ in trace.parts]
    for phase in trace.phases:
        took_s = device.seconds(phase.ops) if rates is None else rates.seconds(device, phase.ops)
        seconds[phase.part][phase.is_backward] += took_s
    return [UnitTimes(*each) for each in seconds]


@dataclass(slots=True)
class _Memory:
    """Memory of the unit at one place: what it keeps for backward, and what more it needs while it runs."""

    kept: int = 0
    forward: int = 0
    backward: int = 0
    gradients: int = 0


def _memory_of(trace: Trace) -> list[_Memory]:
    """Memory of the unit at each place in the order.

    A part may run several times: a phase counts at the last place that forward has reached by then, and in backward at
    the furthest place that is yet to run.
    """
    place_of = {part: place for place, part in enumerate(trace.order)}
    forward = [phase for phase in trace.phases if not phase.is_backward]
    backward = [phase for phase in trace.phases if phase.is_backward]
    levels = [0] * len(place_of)
    in_forward, in_backward, with_gradients = ([0] * len(place_of) for _ in range(3))
    reached = list(accumulate((place_of[phase.part] for phase in forward), max))
    for phase, place in zip(forward, reached, strict=True):
        levels[place] = phase.end_bytes
        in_forward[place] = max(in_forward[place], phase.peak_bytes)
    to_come = list(accumulate((place_of[phase.part] for phase in reversed(backward)), max))[::-1]
    for phase, place in zip(backward, to_come, strict=True):
        early, late = phase.early_bytes, phase.late_bytes
        if with_gradients[place]:  # of an earlier phase
            early, late = 0, phase.peak_bytes
        in_backward[place] = max(in_backward[place], early)
        with_gradients[place] = max(with_gradients[place], late or 0)
    found, before = [], 0
    peaks = zip(accumulate(levels, max), in_forward, in_backward, with_gradients, strict=True)
    for level, forward_bytes, early_bytes, late_bytes in peaks:
        more, again = max(0, forward_bytes - level), max(0, early_bytes - level)
        found.append(_Memory(level - before, more, again, max(late_bytes, before) - level))
        before = level
    return found


def _param_costs(name: str, param: Tensor, training: Training, splittable: set[int]) -> ParamCosts:
    stored = param.element_size()
    casts = param.dtype.is_floating_point and training.compute_dtype is not None
    gathered = training.compute_dtype.itemsize if casts and training.compute_dtype is not None else stored
    reduced = training.reduce_dtype.itemsize if training.reduce_dtype is not None else gathered
    length = param.shape[0] if param.ndim else 1
    return ParamCosts(
        name=name,
        length=length,
        index_numel=param.numel() // length if length else 0,
        stored_itemsize=stored,
        gather_itemsize=gathered,
        grad_itemsize=reduced if param.requires_grad else 0,
        state_bytes_per_element=training.state_bytes_per_element if param.requires_grad else 0,
        step_bytes_per_element=training.step_bytes_per_element if param.requires_grad else 0,
        can_split=id(param) in splittable,
    )


@checked
def cluster_of(
    device: Device | str, num_ranks: int, *, ranks_per_host: int | None = None, between_hosts: float | None = None
) -> Cluster:
    """Hosts of a device, as its datasheet has them.

    Args:
        device: All ranks are alike; one of your own, or a name of `DEVICES`.
        num_ranks: All of them.
        ranks_per_host: Of a host; None for the usual host, or for fewer where there are not as many.
        between_hosts: Bytes per second of a whole host's network; None for the usual host's.

    Raises:
        ArgumentError: There is no device of this name, or a number is none that is allowed.
    """
    device = find_device(device, "cluster_of: device")
    per_host = min(num_ranks, device.per_host) if ranks_per_host is None else ranks_per_host
    near, far = device.within_host, device.between_hosts
    across = None
    if num_ranks > per_host:
        rate = min(between_hosts or far.bytes_per_s, near.bytes_per_s)
        hop_s = (far.latency_s + (per_host - 1) * near.latency_s) / per_host  # a ring leaves a host once in a turn
        across = _links(rate, hop_s, device)
    return Cluster(
        num_ranks=num_ranks,
        ranks_per_host=per_host,
        inside=_links(near.bytes_per_s, near.latency_s, device),
        across=across,
        memory_bytes=device.limit_bytes,
        keeps_received_rows=False,
        source=device.source,
    )


def _links(bytes_per_s: float, latency_s: float, device: Device) -> Links:
    seconds_per_byte = 1 / (bytes_per_s * device.efficiency.network)
    return Links.of(Link(_START_S + latency_s, seconds_per_byte, latency_s, source=device.source))
