"""From a traced step, and a device or measured times, to the costs that the planner plans with."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dshard import arguments
from dshard.errors import PlanError
from dshard.layout import product_cost
from dshard.planner.costs import Cluster, ModelCosts, ParamCosts, UnitCosts, Work
from dshard.planner.devices import Device, bounds_s
from dshard.planner.flops import Op
from dshard.planner.options import sharing
from dshard.planner.rates import Rates, cluster_of, family_of, kind_of
from dshard.planner.steps import is_cut, pieces_of, shape_of
from dshard.planner.tracing import Trace
from dshard.policies import Strategy


@dataclass(frozen=True, slots=True)
class WholeSteps:
    """An optimizer that works on whole parameters, each stepped by its owner; by default Muon.

    Args:
        params: Names of the parameters that it has; None for all matrices.
        state_bytes_per_element: Of it, between steps.
        step_bytes_per_element: Of it, while it steps one; of Muon that of a square matrix.
        flops_per_product: Of its step, for each product of numbers in a matrix times its transpose. Muon has five
            iterations of three such products, of two operations each: 30 of a square matrix, 20 of a long one.
    """

    params: Sequence[str] | None = None
    state_bytes_per_element: float = 4
    step_bytes_per_element: int = 12
    flops_per_product: float = 30

    def __post_init__(self) -> None:
        arguments.fields(self, arguments.from_0, "state_bytes_per_element", "step_bytes_per_element")
        arguments.fields(self, arguments.above_0, "flops_per_product")
        arguments.fields(self, _names, "params")


def _names(who: str, name: str, value: Any) -> Any:
    """Names of parameters, as a tuple."""
    if value is None:
        return None
    way = "Pass ['blocks.0.weight'], or leave it out."
    return arguments.several(who, name, value, lambda each: isinstance(each, str), "names of parameters or None", way)


@dataclass(frozen=True, slots=True)
class Training:
    """How a model is trained, as far as it costs bytes.

    Args:
        compute_dtype: Of parameters where they are used, and of activations; None for that of each parameter.
        reduce_dtype: In which gradients are reduced; None for the compute dtype.
        state_bytes_per_element: Of the optimizer, between steps: 8 for AdamW, 0 for SGD without momentum, 2.05 for
            `dshard.optim.AdamW8bit`, whose few states in fp32 that leaves out.
        step_bytes_per_element: Of the optimizer, while it steps: of AdamW 4, or 12 if it steps one by one (some of the
            one before is there still), of AdamW8bit 0: its temporaries are as large for any model.
        steps_together: Whether it steps all parameters at once (`foreach`), as by default on CUDA, or one by one.
        num_backwards: Micro-batches per step of the optimizer.
        tokens_per_sample: For rates of tokens; 0 where samples have none.
        is_compiled: Whether `torch.compile` fuses what is neither product nor attention. Needs a device and a profile,
            whose constant "fused" says what is left of its memory traffic.
        whole: What an optimizer such as Muon steps; the rest is stepped by the one that is told of above.
    """

    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    state_bytes_per_element: float = 8
    step_bytes_per_element: int = 4
    steps_together: bool = True
    num_backwards: int = 1
    tokens_per_sample: int = 0
    is_compiled: bool = False
    whole: WholeSteps | None = None

    def __post_init__(self) -> None:
        arguments.fields(self, arguments.dtype, "compute_dtype", "reduce_dtype", or_none=True)
        arguments.fields(self, arguments.from_0, "state_bytes_per_element", "step_bytes_per_element")
        arguments.fields(self, arguments.boolean, "steps_together", "is_compiled")
        arguments.fields(self, arguments.count, "num_backwards")
        arguments.fields(self, arguments.count, "tokens_per_sample", least=0)
        way = "Pass dshard.planner.WholeSteps()."
        arguments.instance("Training", "whole", self.whole, WholeSteps, way, or_none=True)


class UnitTimes(NamedTuple):
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
    product_s_per_flop: float = 0.0,
    overhead: Overhead = Overhead(),
    batch_size: int = 1,
    rates: Rates | None = None,
    tensor_parallel: int = 1,
    dims: Mapping[str, int] = MappingProxyType({}),
    kinds: Sequence[str] = (),
    source: str = "measured",
) -> ModelCosts:
    """Costs of a model's step, units in the order in which forward uses them.

    Units get activation bytes such that the sum up to a unit, with what is live only while that unit runs, is never
    below what the trace saw.

    Args:
        trace: Of the model, in the compute dtype.
        model: For shapes and dtypes of its parameters.
        training: Dtypes and optimizer.
        device: Tells times from operations, unless they are given.
        times: Measured ones, for each part of the trace.
        optimizer_s_per_byte: Of what an optimizer's step reads and writes; a device tells its own.
        product_s_per_flop: Of products of matrices in bf16, as an owner's step runs them; a device tells its own.
        overhead: Of dshard itself, for each parameter: what it adds to measured times.
        batch_size: Samples of the traced step.
        rates: Which parts of the device's figures are reached; None for those of its efficiency.
        tensor_parallel: Ranks over which layers of the model, and so of the trace, are cut.
        dims: Along which parameters are sharded, by name: dim 0 where it says nothing.
        kinds: Activation checkpointing of each part; without it, none.
        source: Of times that are given.

    Raises:
        PlanError: Neither a device nor times are given.
    """
    works = list[tuple[Work, Work]]()
    if times is None:
        device = _telling(device, rates, training, tensor_parallel)
        works = _works_of(trace, device, rates, training, tensor_parallel)
        times = [UnitTimes(forward.total_s, backward.total_s) for forward, backward in works]
        optimizer_s_per_byte = _step_s_per_byte(device, rates)
        product_s_per_flop = 0.0 if training.whole is None else _product_s_per_flop(device, rates)
    units, params = [], _params_of(model, training, dims)
    names = {module: name for name, module in model.named_modules()}
    for i, memory in zip(trace.order, _memory_of(trace), strict=True):
        own = _params_of_part(trace, i, params, memory)
        num_trained = sum(1 for p in own if p.grad_itemsize)
        copies = _copies_of(own, device, rates)
        unit = UnitCosts(
            name=trace.parts[i].label,
            params=tuple(own),
            forward_s=times[i].forward_s + overhead.forward_s * len(own) + copies.forward_s,
            backward_s=times[i].backward_s + overhead.backward_s * num_trained + copies.backward_s,
            activation_bytes=memory.kept,
            forward_transient_bytes=memory.forward,
            backward_transient_bytes=memory.backward,
            gradients_transient_bytes=memory.gradients,
            optimizer_start_s=overhead.optimizer_s * num_trained,
            slice_overhead_s=device.efficiency.kernel_s if device is not None else 2e-5,
            is_used_in_backward=i not in trace.unused_in_backward,
            is_used_throughout=i in trace.used_throughout,
            source=source if device is None else f"traced, {device.name}",
            modules=tuple(names[module] for module in trace.parts[i].modules),
            checkpointing=kinds[i] if kinds else "none",
            work=_with_copies(works[i], copies) if works else (),
        )
        units.append(_with_steps(unit, optimizer_s_per_byte, product_s_per_flop))
    return ModelCosts(
        units=tuple(units),
        batch_size=batch_size * training.num_backwards,
        num_backwards=training.num_backwards,
        buffer_bytes=_buffer_bytes(model) + trace.input_bytes,
        steps_together=training.steps_together,
        tokens_per_sample=training.tokens_per_sample,
        source=units[0].source if units else "traced",
        tensor_parallel=tensor_parallel,
    )


def _telling(device: Device | None, rates: Rates | None, training: Training, num_cut: int) -> Device:
    """The device that tells times.

    Raises:
        PlanError: There is none, or no profile that knows of compiled models; or such a model cannot be compiled.
    """
    if device is None:
        raise PlanError("plan: must know a device, or measured times, but has neither. Pass device='a100-80g'.")
    if training.is_compiled and num_cut > 1:
        raise PlanError(
            "plan: is_compiled and a model whose layers are cut do not go together, for torch.compile takes no "
            "such parameters of a sharded model. Leave one of them out."
        )
    if training.is_compiled and rates is None:
        raise PlanError(
            "plan: is_compiled needs a profile, which says how many bytes fused kernels save, but there is none. "
            "Pass profile='published', or --profile published."
        )
    return device


def _works_of(
    trace: Trace, device: Device, rates: Rates | None, training: Training, num_cut: int
) -> list[tuple[Work, Work]]:
    """The forward and the backward of each part, as a device tells."""
    ops: list[tuple[list[Op], list[Op]]] = [([], []) for _ in trace.parts]
    for phase in trace.phases:
        ops[phase.part][phase.is_backward].extend(phase.ops)
    cut = None if num_cut == 1 else cluster_of(device, num_cut, profile=rates)
    told = partial(work_of, device=device, rates=rates, is_compiled=training.is_compiled, cut=cut)
    return [(told(forward), told(backward)) for forward, backward in ops]


def _step_s_per_byte(device: Device, rates: Rates | None) -> float:
    """Seconds per byte that an elementwise step reads and writes."""
    reached = device.memory_bytes_per_s * device.efficiency.memory
    return 1 / reached if rates is None else rates.seconds_per_byte(device)


def _product_s_per_flop(device: Device, rates: Rates | None) -> float:
    """Seconds per operation of a large product of matrices in bf16."""
    many = 10**15  # of which nothing else counts
    return work_of([Op("aten.mm", many, 0, torch.bfloat16)], device, rates).products_s / many


def _with_steps(unit: UnitCosts, s_per_byte: float, s_per_flop: float) -> UnitCosts:
    """The same with the times of its optimizer's steps."""
    products_s = sum(param.owner_work for param in unit.params) * s_per_flop
    owners_s = products_s + unit.touched_by_owners_bytes * s_per_byte
    return replace(unit, optimizer_s=unit.touched_bytes * s_per_byte, owners_s=owners_s)


def _with_copies(works: tuple[Work, Work], copies: UnitTimes) -> tuple[Work, ...]:
    return tuple(replace(half, copies_s=took_s) for half, took_s in zip(works, copies, strict=True))


def _buffer_bytes(model: nn.Module) -> int:
    pieces = (piece for buffer in model.buffers() for piece in pieces_of(buffer))
    return sum({id(b.untyped_storage()): b.numel() * b.element_size() for b in pieces}.values())


def _copies_of(params: Sequence[ParamCosts], device: Device | None, rates: Rates | None) -> UnitTimes:
    """Times of copies of gathered parameters and of gradients into and out of buffers; the same in all strategies."""
    if device is None or rates is None:
        return UnitTimes(0.0, 0.0)
    gathered, reduced = (sum(p.numel * getattr(p, f"{kind}_itemsize") for p in params) for kind in ("gather", "grad"))
    return UnitTimes(rates.copies_s(device, gathered), rates.copies_s(device, reduced))


@dataclass(slots=True)
class _Memory:
    """Bytes of the unit at one place: those that it keeps for backward, and more that are live only while it runs."""

    kept: int = 0
    forward: int = 0
    backward: int = 0
    gradients: int = 0

    def leave_out_gradients(self, params: Sequence[ParamCosts]) -> None:
        """Not to count gradients twice that a trace has counted: strategies add the largest and a send buffer."""
        sizes = [param.numel * param.gather_itemsize for param in params if param.grad_itemsize]
        self.gradients = max(self.gradients - sum(sizes) - max(sizes, default=0), -self.kept)


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


def _params_of(model: nn.Module, training: Training, dims: Mapping[str, int]) -> dict[str, ParamCosts]:
    owned = _owned(model, training.whole) if training.whole is not None else frozenset[str]()
    splittable = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding))}
    return {
        name: _param_costs(name, param, dims.get(name, 0), training, splittable, is_owned=name in owned)
        for name, param in model.named_parameters()
    }


def _params_of_part(trace: Trace, number: int, params: Mapping[str, ParamCosts], memory: _Memory) -> list[ParamCosts]:
    """The parameters of a part, as it uses them; what its trace has counted of their gradients is left out."""
    own = [params[name] for name in trace.parts[number].params]
    if number in trace.used_throughout and any(phase.part == number for phase in trace.phases):
        memory.leave_out_gradients(own)
    if number in trace.used_outside:  # where they are gathered whole
        own = [replace(param, can_split=False) for param in own]
    return own


def _owned(model: nn.Module, whole: WholeSteps) -> frozenset[str]:
    """Names of the parameters that owners step.

    Raises:
        PlanError: The model has no parameter of some name, or it is cut over ranks.
    """
    known = dict(model.named_parameters())
    names = [name for name, param in known.items() if param.ndim == 2] if whole.params is None else whole.params
    unknown = sorted({*names} - known.keys())
    if unknown:
        raise PlanError(
            f"plan: WholeSteps.params must name parameters of the model, but it has no {unknown[0]!r}. Pass some of "
            "the names in model.named_parameters()."
        )
    found = [name for name in names if known[name].requires_grad]
    for name in found:
        if is_cut(known[name]):
            raise PlanError(
                f"plan: WholeSteps.params must be parameters that no tensor parallelism cuts, but {name} is: plans do "
                "not know what owners of such do. Pass the names of others as params."
            )
    return frozenset(found)


def _param_costs(
    name: str, param: Tensor, dim: int, training: Training, splittable: set[int], *, is_owned: bool
) -> ParamCosts:
    stored, whole = param.element_size(), training.whole
    optimizer = whole if is_owned and whole is not None else training
    casts = param.dtype.is_floating_point and training.compute_dtype is not None
    gathered = training.compute_dtype.itemsize if casts and training.compute_dtype is not None else stored
    reduced = training.reduce_dtype.itemsize if training.reduce_dtype is not None else gathered
    shape = shape_of(param) or (1,)
    length, rest = shape[dim], (*shape[:dim], *shape[dim + 1 :])
    return ParamCosts(
        name=name,
        length=length,
        index_numel=prod(rest) if length else 0,
        stored_itemsize=stored,
        gather_itemsize=gathered,
        grad_itemsize=reduced if param.requires_grad else 0,
        state_bytes_per_element=optimizer.state_bytes_per_element if param.requires_grad else 0,
        step_bytes_per_element=optimizer.step_bytes_per_element if param.requires_grad else 0,
        can_split=id(param) in splittable and not is_cut(param) and dim == 0,
        dim=dim,
        owner_work=product_cost(shape) * optimizer.flops_per_product if isinstance(optimizer, WholeSteps) else 0.0,
    )


def work_of(
    ops: Iterable[Op], device: Device, rates: Rates | None, *, is_compiled: bool = False, cut: Cluster | None = None
) -> Work:
    """What some operations take on a device.

    Args:
        ops: Of a trace, not compiled.
        device: That runs them.
        rates: Which parts of its figures are reached: an operation takes its arithmetic and, after that, its traffic.
            None for those of its efficiency, by which one is bound by its arithmetic or by its traffic.
        is_compiled: Whether traffic of what is neither product nor attention is that of fused kernels; needs rates.
        cut: The ranks over which layers are cut; None for no such.
    """
    found = dict.fromkeys(("product", "attention", "other", "starts", "cut"), 0.0)
    for op in ops:
        kind = kind_of(op)
        if op.collective is not None:
            found["cut"] += 0.0 if cut is None else _sent_s(op, cut)
        elif rates is None:
            found["starts"] += device.efficiency.kernel_s
            arithmetic_s, traffic_s = bounds_s(device, op)
            found[kind if arithmetic_s > traffic_s else "other"] += max(arithmetic_s, traffic_s)
        else:
            if kind != "other":
                found[kind] += op.flops / (device.peak(op.dtype) * rates.of_family(kind, device))
            times = {"product": rates.values["operands"], "other": rates.values["fused"] if is_compiled else 1.0}
            found["other"] += op.num_bytes * times.get(kind, 1.0) * rates.seconds_per_byte(device)
    return Work(found["product"], found["attention"], found["other"], starts_s=found["starts"], cut_s=found["cut"])


def _sent_s(op: Op, cut: Cluster) -> float:
    """A collective among all ranks of a cluster; all to all sends as much of a tensor as a gather."""
    if op.collective == "all_reduce":
        return cut.all_reduce_s(op.num_bytes)
    if op.collective == "reduce_scatter":
        return cut.reduce_scatter_s(op.num_bytes, cut.num_ranks)
    return cut.all_gather_s(op.num_bytes, cut.num_ranks)


@dataclass(frozen=True, slots=True)
class Home:
    """The CPU's memory that one device of a host keeps parameters in, and the way there.

    Args:
        seconds_per_byte: Of copies from pinned memory to the device, or back; both run at a time.
        step_seconds_per_byte: Of what an optimizer's step on the CPU reads and writes.
        source: Where the figures come from.
    """

    seconds_per_byte: float
    step_seconds_per_byte: float
    source: str


_REACHED_BY_COPIES, _REACHED_BY_STEPS = 0.8, 0.5  # of the datasheets' rates: from memory, held against no run
# Of a device: bytes per second one way of its link to the host; its share of the host's memory rate, in bytes per
# second; and what that is.
_HOSTS = {
    "a100": (31.5e9, 51e9, "PCIe 4.0 x16; 2 x 8 channels of DDR4-3200 among 8 devices"),
    "h100": (63e9, 77e9, "PCIe 5.0 x16; 2 x 8 channels of DDR5-4800 among 8 devices"),
    "b200": (63e9, 90e9, "PCIe 5.0 x16; 2 x 8 channels of DDR5-5600 among 8 devices"),
    "mi250x": (36e9, 26e9, "Infinity Fabric, 36 GB/s per die; 8 channels of DDR4-3200 among 8 dies"),
    "mi300x": (63e9, 115e9, "PCIe 5.0 x16; 2 x 12 channels of DDR5-4800 among 8 devices"),
    "titan": (15.75e9, 26e9, "PCIe 3.0 x16; 2 x 6 channels of DDR4-2666 among 8 devices, rounded"),
}
_USUAL = (31.5e9, 51e9, "PCIe 4.0 x16, and the memory of an A100's host, for want of better")


def home_of(device: Device) -> Home:
    """The CPU's memory of a device in the table; of a device of your own, that of the usual host."""
    link, memory, source = _HOSTS.get(family_of(device), _USUAL)
    return Home(1 / (link * _REACHED_BY_COPIES), 1 / (memory * _REACHED_BY_STEPS), source)


def check_offload(device: Device | None, offload: str) -> None:
    """Raise where offload cannot be planned for.

    Raises:
        PlanError: There is no device.
    """
    if offload != "none" and device is None:
        raise PlanError(
            f"plan: offload={offload!r} needs a device, which says how long copies from the CPU's memory take, but "
            "times are measured here. Pass device='h100-80g'."
        )


def with_offload(model: ModelCosts, device: Device | None, offload: str) -> ModelCosts:
    """The model, with units that the CPU's memory holds and the optimizer steps there.

    Args:
        model: All units are on the device.
        device: That says how long copies take; None with "none" alone: see `check_offload`.
        offload: "none", "all", or "auto" for an alternative of each.
    """
    if offload == "none":
        return model
    assert device is not None
    home, found = home_of(device), []
    for unit in model.units:
        alone = replace(unit, alternatives=())
        away = tuple(_offloaded(each, home) for each in (alone, *unit.alternatives))
        if offload == "all":
            found.append(replace(away[0], alternatives=away[1:]))
        else:
            found.append(replace(unit, alternatives=(*unit.alternatives, *away)) if unit.params else unit)
    source = f"{model.source}; offload: {home.source} (which part is reached is not measured)"
    return replace(model, units=tuple(found), source=source)


def _offloaded(unit: UnitCosts, home: Home) -> UnitCosts:
    return replace(
        unit,
        params=tuple(replace(param, can_split=False) for param in unit.params),
        optimizer_s=unit.touched_bytes * home.step_seconds_per_byte,
        home_s_per_byte=home.seconds_per_byte,
    )


def home_bytes(model: ModelCosts, strategies: Sequence[Strategy], cluster: Cluster) -> int:
    """Bytes that a rank has in the CPU's memory: shards of the parameters there, their gradients and states."""
    total = 0
    for unit, strategy in zip(model.units, strategies, strict=True):
        within = sharing(strategy, cluster.num_ranks)
        for param in unit.params if unit.is_offloaded else ():
            numel = param.shard_numel(within)
            total += numel * param.stored_itemsize * (2 if param.grad_itemsize else 1) + param.state_bytes_of(numel)
    return total
