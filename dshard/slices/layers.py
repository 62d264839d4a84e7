"""Linear layers and embeddings that compute slice by slice, so that their weight is never gathered whole."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from dshard.errors import StateError, UnsupportedOpError
from dshard.gradients.backward import Backward
from dshard.gradients.reducer import Reducer
from dshard.policies import Offload
from dshard.runtime.module import FSDPModule
from dshard.runtime.module_hooks import attach
from dshard.runtime.runtime import Runtime
from dshard.slices.slices import Rows, SliceReduction, for_each_slice, slices_of
from dshard.tensor import ShardedTensor
from dshard.tensor.sources import rejoin_source
from dshard.tensor.subclass_shards import subclass_gathers
from dshard.tensor.tp_layout import TPShardLayout
from dshard.units.unit import Unit

_frames = torch._C._dynamo.eval_frame
_FORWARDS = (nn.Linear.forward, nn.Embedding.forward)


class SlicedForward:
    """What stands on a linear layer or embedding in the place of its `forward`.

    While the weight's unit has one slice alone, and for a weight that belongs to none, it is that forward.

    Args:
        module: The layer.
    """

    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, input: Tensor) -> Any:  # noqa: A002 - torch's name for it, by which callers pass it
        """The layer's forward."""
        return _run(self.module, input)


def _run(module: Any, value: Any) -> Any:
    """The forward of a layer, in slices or as ever; torch.compile traces none of it, but goes on behind it."""
    callback = _frames.set_eval_frame(None)
    try:
        unit = _unit_of(module.weight, value)
        if unit is None:
            return type(module).forward(module, value)
        return _embedding(module, value, unit) if isinstance(module, nn.Embedding) else _linear(module, value, unit)
    finally:
        _frames.set_eval_frame(callback)


# What torch.compiler.disable does, without the import of dynamo.
_frames.set_code_exec_strategy(
    _run.__code__, _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
)
_run._torchdynamo_disable = True  # type: ignore[attr-defined]
_run._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "a weight that is gathered in slices is used between graphs, not in one. Leave out fullgraph=True, or give the "
    "weight the strategy 'full'."
)


def _unit_of(weight: Any, value: Any) -> Unit | None:
    """The unit through which a layer computes slice by slice; None where it computes with the whole weight."""
    if not isinstance(weight, ShardedTensor) or type(value) not in (Tensor, nn.Parameter):
        return None
    if weight.swapped_source is not None:
        rejoin_source(weight)
    if weight.grad_hook_handle is None and torch.is_grad_enabled():
        weight.adopt_if_leaf()
    unit = weight.gather_source
    if not isinstance(unit, Unit) or unit.settings.num_slices == 1 or weight.own_source is None:
        return None
    if unit.num_pins:
        return None  # it is gathered whole
    if weight.shard_layout.dim != 0:
        return None  # it was moved since: every rank holds it whole
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return None  # for transforms and forward mode, a custom function would need rules of its own
    unit.model.before_use()
    return unit


def _dtype_of(unit: Unit) -> torch.dtype:
    """The dtype in which the forward that is running computes with a weight."""
    return unit.compute_dtype(0) or unit.params[0].storage_dtype


def _autocast(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The dtype in which a linear layer computes with what is of `dtype`."""
    casts = torch.is_autocast_enabled(device_type) and dtype.is_floating_point and dtype != torch.float64
    return torch.get_autocast_dtype(device_type) if casts else dtype


def _linear(module: Any, value: Tensor, unit: Unit) -> Any:
    device_type = value.device.type
    dtype = _autocast(_dtype_of(unit), device_type)
    return _Linear.apply(value.to(_autocast(value.dtype, device_type)), module.weight, module.bias, unit, dtype)


def _embedding(module: nn.Embedding, value: Tensor, unit: Unit) -> Any:
    name, num_rows = unit.params[0].name, unit.params[0].shape[0]
    if module.max_norm is not None or module.sparse:
        what = "max_norm, which writes to the weight" if module.max_norm is not None else "sparse gradients"
        raise UnsupportedOpError(
            f"{name}: an embedding that is gathered in slices must have neither max_norm nor sparse=True, but this one "
            f"has {what}. Give the weight the strategy 'full'."
        )
    first, last = (int(value.min()), int(value.max())) if value.numel() else (0, -1)
    if first < 0 or last >= num_rows:
        raise IndexError(
            f"{name}: indices of an embedding must be in [0, {num_rows}), but they are in [{first}, {last}]. Look at "
            "the vocabulary's size."
        )
    padding = -1 if module.padding_idx is None else module.padding_idx % num_rows
    return _Embedding.apply(value, module.weight, unit, _dtype_of(unit), padding, module.scale_grad_by_freq)


def _begin_backward(unit: Unit) -> Reducer:
    """A backward is at a layer; gives what keeps its reductions."""
    if torch.is_grad_enabled():
        raise UnsupportedOpError(
            f"{unit.params[0].name}: a weight that is gathered in slices has first derivatives alone, but the backward "
            "was called with create_graph=True. Give the weight the strategy 'full'."
        )
    backward = unit.model.get(Backward)
    backward.notice()
    unit.sliced_in = torch._C._current_graph_task_id()
    return backward.reducer


class _Linear(torch.autograd.Function):
    """`F.linear`, slice by slice."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: ShardedTensor, bias: Tensor | None, unit: Unit, dtype: torch.dtype
    ) -> Tensor:
        # A checkpoint keeps a frozen weight itself, whose dtype is another one when the recomputation is over.
        saved = weight if ctx.needs_input_grad[1] else weight.detach()
        ctx.save_for_backward(value if ctx.needs_input_grad[1] else None, saved)
        ctx.unit, ctx.dtype, ctx.shape = unit, dtype, value.shape
        full_bias = bias.materialize() if isinstance(bias, ShardedTensor) else bias
        if full_bias is not None:
            full_bias = full_bias.to(dtype)
        out = value.new_empty((*value.shape[:-1], unit.params[0].shape[0]))

        def use(rows: Rows, part: Tensor) -> None:
            rows.put(F.linear(value, part, None if full_bias is None else rows.take(full_bias)), into=out)

        for_each_slice(unit, dtype, use)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        unit: Unit = ctx.unit
        reducer = _begin_backward(unit)
        value, _ = ctx.saved_tensors  # the weight, for autograd to notice a write to it since the forward
        num_rows, num_columns = unit.params[0].shape
        num_values = math.prod(ctx.shape[:-1])
        flat = grad.reshape(num_values, num_rows)
        value_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            total = flat.new_zeros((num_values, num_columns))
            for_each_slice(unit, ctx.dtype, lambda rows, part: total.addmm_(rows.take(flat), part))
            value_grad = total.view(ctx.shape)
        if ctx.needs_input_grad[1]:
            flat_value = value.reshape(num_values, num_columns)
            reduction = SliceReduction(unit, reducer)
            for part in slices_of(unit, ctx.dtype):
                reduction.add(part, part.rows.take(flat).t() @ flat_value)
            weight_grad = reduction.gradient()
        return value_grad, weight_grad, flat.sum(0) if ctx.needs_input_grad[2] else None, None, None


class _Embedding(torch.autograd.Function):
    """`F.embedding`, slice by slice."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: ShardedTensor, unit: Unit, dtype: torch.dtype, padding: int, scales: bool
    ) -> Tensor:
        ctx.save_for_backward(value, weight)
        ctx.unit, ctx.dtype, ctx.padding, ctx.scales = unit, dtype, padding, scales
        flat, num_columns = value.reshape(-1), unit.params[0].shape[1]
        out = torch.empty((flat.shape[0], num_columns), dtype=dtype, device=value.device)

        def use(rows: Rows, part: Tensor) -> None:
            at, found = rows.find(flat)
            out.index_copy_(0, at, part.index_select(0, found))

        for_each_slice(unit, dtype, use)
        return out.view(*value.shape, num_columns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        unit: Unit = ctx.unit
        reducer = _begin_backward(unit)
        value, _ = ctx.saved_tensors
        flat, flat_grad = value.reshape(-1), grad.reshape(value.numel(), unit.params[0].shape[1])
        flat_grad = flat_grad[flat != ctx.padding] if ctx.padding >= 0 else flat_grad
        flat = flat[flat != ctx.padding] if ctx.padding >= 0 else flat
        reduction = SliceReduction(unit, reducer)
        for part in slices_of(unit, ctx.dtype):
            at, rows = part.rows.find(flat)
            scales, num_rows = ctx.scales, part.rows.num_rows
            reduction.add(part, torch.ops.aten.embedding_dense_backward(flat_grad[at], rows, num_rows, -1, scales))
        return None, reduction.gradient(), None, None, None, None


def check_sliced(
    modules: Iterable[nn.Module], name: str, weight: Tensor, *, dim: int | None, offload: Offload | None = None
) -> list[nn.Module]:
    """The layers whose weight a parameter is, if it can be gathered in slices.

    Args:
        modules: All below which it may be.
        name: Of the parameter.
        weight: It, sharded or not yet.
        dim: Along which it is to be cut; None for a whole copy on every rank.
        offload: Where it is to be kept, if it is not sharded yet.

    Raises:
        UnsupportedOpError: It is used by other modules than linear layers and embeddings with torch's own forward, or
            is to be more than a plain tensor that is cut along dim 0. On every rank alike.
    """
    holders: dict[nn.Module, str] = {}
    for module in dict.fromkeys(m for root in modules for m in root.modules()):
        for attribute, param in module._parameters.items():
            if param is weight:
                holders.setdefault(module, attribute)
    for module, attribute in holders.items():
        own = module.__dict__.get("forward")
        is_torchs = type(module).forward in _FORWARDS and isinstance(own, SlicedForward | None)
        if attribute != "weight" or not is_torchs:
            raise UnsupportedOpError(
                f"{name}: what is gathered in slices must be the weight of an nn.Linear or nn.Embedding with torch's "
                f"own forward, but it is '{attribute}' of a {type(module).__name__}. Give it the strategy 'full'."
            )
    if not holders:
        raise UnsupportedOpError(
            f"{name}: what is gathered in slices must be the weight of a layer, but no module that is sharded here "
            "holds it. Call fully_shard on a module above the layer."
        )
    what = _more_than_plain(weight, dim, offload)
    if what is not None:
        raise UnsupportedOpError(
            f"{name}: what is gathered in slices must be a plain tensor that is cut along dim 0 and kept where it is "
            f"used, but it is {what} (shape {tuple(weight.shape)}). Give it the strategy 'full'."
        )
    return list(holders)


def _more_than_plain(weight: Tensor, dim: int | None, offload: Offload | None) -> str | None:
    """What a parameter is besides a plain tensor that is cut along dim 0, if it is more."""
    values, is_nested = weight.data, isinstance(weight, DTensor)
    if isinstance(weight, ShardedTensor):
        values, offload = weight.shard_storage.resolve(), weight.offload
        is_nested = type(weight.shard_layout) is TPShardLayout
    if is_nested:
        return "a DTensor of its own"
    if subclass_gathers(values):
        return f"a {type(values).__name__}"
    if offload is not None:
        return "offloaded"
    return None if dim == 0 else "whole on every rank" if dim is None else f"cut along dim {dim}"


def slice_weight(modules: Sequence[nn.Module], weight: ShardedTensor, num_slices: int) -> Unit:
    """Gather and use the weight of a layer in slices from now on, between two steps.

    It leaves the unit that it was in and becomes one of its own; its value, gradient and optimizer state stay what they
    are.

    Args:
        modules: The roots below which it is looked for.
        weight: A parameter of theirs, sharded.
        num_slices: At least 1; a shard of fewer rows is cut into its rows.

    Returns:
        Its unit, whose `num_slices` may be changed later.

    Raises:
        UnsupportedOpError: As `check_sliced`.
        StateError: It belongs to no model that `fully_shard` made. On every rank alike.

    Communicates:
        Nothing, unless gradients of its unit have not been reduced yet.
    """
    holders = check_sliced(modules, weight.name, weight, dim=weight.shard_layout.dim)
    old = weight.gather_source
    if not isinstance(old, Unit):
        raise StateError(f"{weight.name}: only a parameter of a sharded model can be sliced. Call fully_shard first.")
    is_apart = old.params == [weight] and old.modules == holders
    unit = old if is_apart else _unit_of_its_own(modules, old, weight, holders)
    for module in holders:
        module.__dict__["forward"] = SlicedForward(module)
    unit.change(num_slices=num_slices)
    unit.set_reshard_after_forward(True)
    return unit


def set_slices(modules: Sequence[nn.Module], wanted: Mapping[ShardedTensor, int]) -> None:
    """Have parameters gathered in as many slices each, 1 for whole, between two steps; the rest stays as it is.

    Args:
        modules: The roots below which the layers are looked for.
        wanted: Parameters of theirs. Those of fewer than two dims, norms and biases, are gathered whole.

    Raises:
        UnsupportedOpError: As `check_sliced`, ahead of any change.

    Communicates:
        As `slice_weight`.
    """
    sliced = {param: num_slices for param, num_slices in wanted.items() if is_sliced(param, num_slices)}
    for param in sliced:
        check_sliced(modules, param.name, param, dim=param.shard_layout.dim)
    for param in wanted:
        unit = param.gather_source
        if param in sliced:
            slice_weight(modules, param, sliced[param])
        elif isinstance(unit, Unit) and unit.settings.num_slices > 1:
            gather_whole(unit)


def is_sliced(param: Tensor, num_slices: int) -> bool:
    """Whether a parameter for which as many slices are asked is gathered in slices, if that can be."""
    return num_slices > 1 and param.dim() > 1


def _unit_of_its_own(modules: Sequence[nn.Module], old: Unit, weight: ShardedTensor, holders: list[nn.Module]) -> Unit:
    """Take a weight out of a unit, and make it one; calls on a sharded module that were for the one are for both."""
    for param in old.params:
        if isinstance(param.grad, ShardedTensor):
            param.grad.shard_storage.resolve()  # what is on its way belongs to the unit as it was
    old.model.get(Reducer).forget(old)
    old.free()
    old.params = [param for param in old.params if param is not weight]
    old.restart()
    label = weight.name.rpartition(".")[0] or type(holders[0]).__name__
    settings = replace(old.settings, reshard_after_forward=True, reshard_after_backward=True)
    unit = Unit([weight], holders, label=label, model=old.model, settings=settings)
    old.model.get(Runtime).adopt(unit)
    for module in holders:
        attach(module, unit)
    for owner in dict.fromkeys(m for root in modules for m in root.modules() if isinstance(m, FSDPModule)):
        if old in owner.__dict__["_dshard_units"] or old in owner.__dict__.get("_dshard_formed", ()):
            owner.__dict__.setdefault("_dshard_formed", []).append(unit)
    return unit


def gather_whole(unit: Unit) -> None:
    """Gather the weight of a unit that was sliced at once from now on, between two steps. Communicates nothing."""
    unit.change(num_slices=1)
    for module in unit.modules:
        if isinstance(module.__dict__.get("forward"), SlicedForward):
            del module.__dict__["forward"]
