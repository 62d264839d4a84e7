"""`split(q)`: layers whose weight is gathered, used and reduced in slices."""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from dshard import collectives
from dshard.autograd import outside_autograd, profiled
from dshard.collectives import Gathered, GatherPlan, Handle, ReducePlan, tag_of, with_comms
from dshard.errors import UnsupportedOpError
from dshard.gradients.backward import Backward
from dshard.gradients.reducer import Reducer
from dshard.gradients.reduction import GradReduction
from dshard.layout import BucketLayout, ShardLayout
from dshard.policies import Offload
from dshard.runtime.module import FSDPModule
from dshard.runtime.module_hooks import attach
from dshard.runtime.runtime import Runtime
from dshard.tensor import ShardedTensor
from dshard.tensor.meshes import TPShardLayout
from dshard.tensor.storage import ShardStorage, rejoin_source
from dshard.tensor.subclass_shards import subclass_gathers
from dshard.units.buckets import Bucket
from dshard.units.copies import refuse_meta
from dshard.units.unit import Unit


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a weight in one slice: of each shard those from `start` to `stop`, as far as it has them.

    Args:
        layout: How the weight is cut, along dim 0.
        start: First row in a shard.
        stop: Behind the last one.
    """

    layout: ShardLayout
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Rows of a whole shard in it."""
        return self.stop - self.start

    @property
    def num_whole(self) -> int:
        """Shards that are not shorter than the others."""
        return self.layout.shape[0] // self.layout.chunk_size

    @property
    def num_rest(self) -> int:
        """Rows in it of the one shard that may be shorter."""
        rest = self.layout.shape[0] - self.num_whole * self.layout.chunk_size
        return max(0, min(self.stop, rest) - self.start)

    @property
    def num_rows(self) -> int:
        """How many there are."""
        return self.num_whole * self.size + self.num_rest

    @property
    def sliced_layout(self) -> ShardLayout:
        """How the slice, as a tensor of its own, is cut: each rank holds the rows of its shard."""
        return ShardLayout((self.num_rows, *self.layout.shape[1:]), 0, self.layout.num_ranks)

    def of_shard(self, shard: Tensor, rank: int) -> Tensor:
        """The part of a rank's shard that is in it."""
        size = self.layout.extent(rank).size
        start = min(self.start, size)
        return shard[start : min(self.stop, size)] if start else shard[: min(self.stop, size)]

    def _places(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Its elements of `values`, whose last dim is that of the rows: those of whole shards, and the rest."""
        chunk = self.layout.chunk_size
        end = self.num_whole * chunk
        whole = values[..., :end].unflatten(-1, (self.num_whole, chunk))[..., self.start : self.stop]
        return whole, values[..., end + self.start : end + self.start + self.num_rest]

    def take(self, values: Tensor) -> Tensor:
        """Its elements of `values`, shape (..., rows of the weight), as (..., rows of the slice)."""
        whole, rest = self._places(values)
        return torch.cat([whole.flatten(-2), rest], -1) if self.num_rest else whole.flatten(-2)

    def put(self, values: Tensor, into: Tensor) -> None:
        """Copy `values`, shape (..., rows of the slice), to their places in (..., rows of the weight)."""
        whole, rest = self._places(into)
        end = self.num_whole * self.size
        whole.copy_(values[..., :end].unflatten(-1, (self.num_whole, self.size)))
        if self.num_rest:
            rest.copy_(values[..., end:])

    def find(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Which of some rows of the weight, shape (n,), are in it, and their numbers there; shapes (found,)."""
        shard = rows.div(self.layout.chunk_size, rounding_mode="floor")
        own = rows - shard * self.layout.chunk_size
        at = ((own >= self.start) & (own < self.stop)).nonzero().squeeze(1)
        return at, (shard * self.size + own - self.start)[at]


def cut_rows(layout: ShardLayout, num_slices: int) -> list[Rows]:
    """The slices of a weight: as many as asked for, or one per row of a shard; none of a weight without rows."""
    chunk = layout.chunk_size
    size = max(1, -(-chunk // num_slices))
    return [Rows(layout, start, min(start + size, chunk)) for start in range(0, chunk, size)]


@dataclass(frozen=True, slots=True)
class Slice(Bucket):
    """One slice of a weight, which travels as any bucket of its unit would.

    Args:
        rows: Which rows it has.
        label: For messages, and for the check that all ranks are at the same one.
    """

    rows: Rows
    label: str

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return self.rows.sliced_layout.numel * self.dtype.itemsize


def slices_of(unit: Unit, dtype: torch.dtype) -> Sequence[Slice]:
    """The slices of the weight that a unit consists of, as they travel in a dtype."""
    key = "slices", unit.settings.num_slices, unit.label, dtype
    return unit.known_buckets(key, partial(_make, unit, dtype))


def _make(unit: Unit, dtype: torch.dtype) -> list[Slice]:
    param, num_slices = unit.params[0], unit.settings.num_slices
    group, parts = with_comms(param.shard_group, unit.settings.comms), cut_rows(param.shard_layout, num_slices)
    slices = []
    for number, rows in enumerate(parts, 1):
        layout = BucketLayout.of([rows.sliced_layout])
        plan = GatherPlan.of(layout, [(max(1, param.shape[1]), 1)], dtype, group)
        label, is_cast = f"{unit.label}, slice {number} of {len(parts)}", dtype != param.storage_dtype
        reduce_plan = ReducePlan(layout, group)
        slices.append(Slice((0,), {0: 0}, dtype, is_cast, plan, reduce_plan, group, param.is_meta, None, rows, label))
    return slices


def for_each_slice(unit: Unit, dtype: torch.dtype, use: Callable[[Rows, Tensor], object]) -> None:
    """Gather the weight that a unit consists of slice by slice; the next one is on its way while this one is used.

    The first one may have been gathered ahead, and with the last one what the last step used next is.

    Args:
        unit: Of that weight alone.
        dtype: In which it is gathered.
        use: Called with the rows and the values of each slice, which it must not keep. Called once, with all of them,
            where somebody has gathered the whole weight.

    Communicates:
        An all-gather per slice: together the bytes of that of the weight, and a header each.
    """
    if names := unit.copies.on_meta():
        refuse_meta(names)
    ahead = unit.first_slice = unit.first_slice or FirstSlice(unit)
    whole = unit.copies.at_hand(0)
    if whole is not None and whole.dtype == dtype:
        ahead.drop()
        for rows in cut_rows(unit.params[0].shard_layout, 1):
            use(rows, whole)
        return
    unit.model.eviction.before_touch(unit)
    slices = slices_of(unit, dtype)
    handle = ahead.take(dtype)
    unit.reshard()  # what is there is stale
    if handle is None and slices:
        handle = _start(unit, slices[0])
    try:
        for number, part in enumerate(slices, 1):
            assert handle is not None
            with outside_autograd(), profiled("gather_wait", part.label, unit.model.token):
                gathered = handle.wait()
            handle = _start(unit, slices[number]) if number < len(slices) else None
            if handle is None:
                unit.model.eviction.after_touch(unit)
            values, memory = gathered.tensors[0], gathered.memory
            del gathered
            try:
                use(part.rows, values)
            finally:
                del values  # the pool takes back what nobody refers to
                unit.slice_bytes -= part.num_bytes
                if memory is not None:
                    unit.model.pool.give(memory)
                memory = None
    finally:
        if not ahead.is_there:
            unit.slice_bytes = 0
            if not unit.is_gathered:
                unit.model.eviction.note_free(unit)


class FirstSlice:
    """The first slice of a weight, if it is gathered ahead of its use.

    Args:
        unit: Of that weight alone.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._dtype: torch.dtype | None = None  # in which it was gathered last
        self._started: tuple[Slice, int, Handle[Gathered]] | None = None

    @property
    def is_there(self) -> bool:
        """Whether it is here or under way."""
        return self._started is not None

    def prefetch(self) -> bool:
        """Start to gather it in the dtype of the last use, if there was one; gives whether it did."""
        if self._started is not None or self._dtype is None:
            return False
        slices = slices_of(self._unit, self._dtype)
        if not slices or slices[0].is_meta:
            return False
        version = self._unit.params[0].shard_storage.resolve()._version
        self._started = slices[0], version, _start(self._unit, slices[0])
        return True

    def take(self, dtype: torch.dtype) -> Handle[Gathered] | None:
        """The gather that is under way, if it is of what is wanted now; else it is dropped."""
        if self._started is not None:
            part, version, handle = self._started
            shard = self._unit.params[0].shard_storage.resolve()
            is_wanted = part is slices_of(self._unit, dtype)[0] and version == shard._version
            if is_wanted:
                self._started = None
                return handle
            self.drop()
        self._dtype = dtype
        return None

    def drop(self) -> None:
        """Wait for it, and let it go."""
        if self._started is None:
            return
        (part, _, handle), self._started = self._started, None
        self._unit.slice_bytes -= part.num_bytes
        with outside_autograd():
            gathered = handle.discard()
        memory = gathered.memory if gathered is not None else None
        del gathered, handle
        if memory is not None:
            self._unit.model.pool.give(memory)


def _start(unit: Unit, part: Slice) -> Handle[Gathered]:
    """Start to gather a slice."""
    param = unit.params[0]
    unit.slice_bytes += part.num_bytes
    unit.model.eviction.note_gather(unit)
    with outside_autograd(), profiled("gather", part.label, unit.model.token):
        shard = part.rows.of_shard(param.shard_storage.resolve(), part.group.rank)
        is_row = part.group.sends_rows and not part.is_cast and shard.numel() == part.plan.row_numel
        return collectives.all_gather(
            [shard],
            part.plan,
            part.group,
            label=part.label,
            tag=tag_of(param.shard_storage.signature),
            pool=unit.model.pool,
            row=shard.reshape(-1) if is_row else None,
        )


class SliceReduction:
    """The gradient of a weight on its way: one slice is reduced while that of the next one is computed.

    Slices are reduced in every backward, also where gradients of other units are added up unreduced, for what would be
    added up is as large as the weight. The last one may still be in flight when the gradient is given out: until the
    next reduction of the model leaves.

    Args:
        unit: Of that weight alone.
        reducer: Of the model.
    """

    def __init__(self, unit: Unit, reducer: Reducer) -> None:
        # Weak, for the gradient that this is in belongs to the weight: the model would be kept alive.
        self._reducer, self._unit = weakref.ref(reducer), weakref.ref(unit)
        param = unit.params[0]
        self._dtype = unit.reduce_dtypes[0] or param.storage_dtype
        self._shard = torch.zeros_like(param.shard_storage.resolve(), memory_format=torch.contiguous_format)
        self._in_flight: tuple[Slice, GradReduction] | None = None

    @property
    def unit(self) -> Unit:
        """Of the weight, as the owner of reductions."""
        unit = self._unit()
        assert unit is not None  # its backward runs
        return unit

    def on_read(self, reduction: GradReduction) -> None:
        """Nothing: it reads them itself."""

    def on_finished(self, reduction: GradReduction) -> None:
        """Nothing: it waits for them itself."""

    def add(self, part: Slice, grad: Tensor) -> None:
        """Start to reduce the gradient of a slice, once the one before it is here.

        Communicates:
            A reduce-scatter of its elements, as `ReduceBucket.launch`; where the shards exist more than once, an
            all-reduce of this rank's part of the slice before it.
        """
        reducer = self._reducer()
        if reducer is not None:
            reducer.make_room_for_slice(self)
        self.settle()
        reduction = GradReduction(weakref.ref(self), replace(part, dtype=self._dtype), self.unit, part.label)
        reduction.pack(grad)
        reduction.launch()
        self._in_flight = part, reduction

    def settle(self) -> None:
        """Wait for the slice that is in flight, if one is, and put it in its place."""
        if self._in_flight is None:
            return
        part, reduction = self._in_flight
        reduced = reduction.finish()  # raises again, if it is called again
        self._in_flight = None
        with outside_autograd():
            part.rows.of_shard(self._shard, part.group.rank).copy_(reduced.shards[0])

    def gradient(self) -> ShardedTensor:
        """The reduced gradient, when all slices were added."""
        param, hook = self.unit.params[0], self.unit.settings.reduce_hook
        if hook is not None or param.shard_group.replicas is not None:
            self.settle()  # what follows is started by all ranks at one point of the program
        pending = self if self._in_flight is not None else None
        shard = None if pending is not None else self._shard
        storage = ShardStorage(shard, param.shard_storage.layout, pending, is_shared=True)
        storage.is_reduced = True
        return param.like(storage)

    def __call__(self, storage: ShardStorage) -> None:
        """The gradient in `storage` is used."""
        self.settle()
        storage.deliver(self._shard)


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


def set_slices(modules: Sequence[nn.Module], wanted: Mapping[ShardedTensor, int]) -> None:
    """Have parameters gathered in as many slices each, 1 for whole, between two steps; the rest stays as it is.

    A weight that is sliced leaves the unit that it was in and becomes one of its own, whose `num_slices` may be changed
    later; its value, gradient and optimizer state stay what they are.

    Args:
        modules: The roots below which the layers are looked for.
        wanted: Parameters of theirs, sharded. Those of fewer than two dims, norms and biases, are gathered whole; a
            shard of fewer rows than slices is cut into its rows.

    Raises:
        UnsupportedOpError: As `check_sliced`, ahead of any change.

    Communicates:
        Nothing, unless gradients of their units have not been reduced yet.
    """
    holders = {
        param: check_sliced(modules, param.name, param, dim=param.shard_layout.dim)
        for param, num_slices in wanted.items()
        if is_sliced(param, num_slices)
    }
    for param, num_slices in wanted.items():
        unit = param.gather_source
        if param in holders:
            assert isinstance(unit, Unit)
            if unit.params != [param] or unit.modules != holders[param]:
                unit = _unit_of_its_own(modules, unit, param, holders[param])
            for module in holders[param]:
                module.__dict__["forward"] = SlicedForward(module)
            unit.change(num_slices=num_slices)
            unit.set_reshard_after_forward(True)
        elif isinstance(unit, Unit) and unit.settings.num_slices > 1:
            unit.change(num_slices=1)
            for module in unit.modules:
                if isinstance(module.__dict__.get("forward"), SlicedForward):
                    del module.__dict__["forward"]


def is_sliced(param: Tensor, num_slices: int) -> bool:
    """Whether a parameter for which as many slices are asked is gathered in slices, if that can be."""
    return num_slices > 1 and param.dim() > 1


def _unit_of_its_own(modules: Sequence[nn.Module], old: Unit, weight: ShardedTensor, holders: list[nn.Module]) -> Unit:
    """Take a weight out of a unit, and make it one; calls on a sharded module that were for the one are for both."""
    for param in old.params:
        if isinstance(param.grad, ShardedTensor):
            param.grad.shard_storage.resolve()  # what is on its way belongs to the unit as it was
    old.model.get(Reducer).forget(old)
    old.reshard()
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
