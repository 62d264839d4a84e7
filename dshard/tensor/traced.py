"""Sharded parameters in graphs of torch.compile: gathered and reduced by operations of the graph."""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

from dshard.compiling import is_between_graphs, outside_of_graphs
from dshard.errors import UnsupportedOpError
from dshard.layout import ShardLayout
from dshard.tensor import shardwise
from dshard.tensor.dispatch import described, dispatch
from dshard.tensor.meshes import group_of, viewed
from dshard.tensor.operands import common_layout, cut_to, is_recorded, materialize, takes_own_data
from dshard.tensor.sharded_tensor import SHARDED, ShardedTensor, dtype_in_graph
from dshard.tensor.storage import ShardStorage, Use, flat, note_write_to
from dshard.tensor.table import Args, Handler, Kwargs, OpClass, classify, mutated_arguments
from dshard.tensor.views import View, ViewStep, empty_of, restrided


def lower_gathers(gather: OpOverload) -> None:
    """Have inductor, if it is what compiles, take the unit's own copy wherever a graph only reads it.

    Args:
        gather: The operation; its last argument says whether the result is memory of the graph's own.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if lowering is None or getattr(lowering, "_has_dshards", False):
        return
    lowering._has_dshards = True
    run: Callable[..., Any] = lowering.fallback_handler(gather)

    def lower(*args: Any) -> Any:
        from torch._inductor.virtualized import V

        node = V.graph.current_node
        if not all(_only_reads(user, node) for user in node.users):
            return run(*args)
        result = run(*args[: len(gather._schema.arguments) - 1], False)  # noqa: FBT003 - operators take positions
        name = result.get_name()
        V.graph.never_reuse_buffers.add(name)
        V.graph.unaligned_buffers.add(name)  # it lies anywhere in a unit's memory
        return result

    lowering.register_lowering(gather, type_promotion_kind=None)(lower)


def _only_reads(user: fx.Node, source: fx.Node) -> bool:
    """Whether an operation neither writes to `source`, nor gives memory of it that others may write to or give out."""
    func = user.target
    if user.op != "call_function" or not isinstance(func, OpOverload) or func._schema.is_mutable:
        return False
    if any(result.alias_info is not None for result in func._schema.returns):  # a view
        return all(_only_reads(other, user) for other in user.users)
    given, taken = user.meta.get("val"), source.meta.get("val")
    if isinstance(given, Tensor) and isinstance(taken, Tensor) and given.dtype != taken.dtype:
        return True  # a cast
    # What has one operand may be lowered to nothing; what has several is computed.
    nodes = [arg for arg in (*user.args, *user.kwargs.values()) if isinstance(arg, fx.Node)]
    return sum(isinstance(node.meta.get("val"), Tensor) for node in nodes) > 1


class TracedGather:
    """What the operation that stands for a gather in a graph does when the graph runs.

    It gives the full tensor, in memory of the graph's own if that `is_own`; else it must not be written to.
    """

    run: ClassVar[Callable[..., Tensor]]  # bound by dshard.runtime


_LIBRARY = torch.library.Library("dshard", "DEF")
_LIBRARY.define(
    "gather(Tensor shard, int[] shape, int[] stride, int dim, str group, ScalarType dtype, bool is_own) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),  # a replay would not look whether a copy is stale
)
_LIBRARY.define("written(Tensor shard) -> ()")
_LIBRARY.impl("gather", lambda *args: TracedGather.run(*args), "CompositeExplicitAutograd")  # noqa: PLW0108 - bound later


@torch.library.register_fake("dshard::written", lib=_LIBRARY)
def _written_fake(shard: Tensor) -> None:
    return None


_LIBRARY.impl("written", note_write_to, "CompositeExplicitAutograd")


@torch.library.register_fake("dshard::gather", lib=_LIBRARY)
def _gather_fake(
    shard: Tensor, shape: list[int], stride: list[int], dim: int, group: str, dtype: torch.dtype, is_own: bool
) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=shard.device)


class OfView(Placement):
    """How a view lies that is made within a graph: nowhere on its own."""


class TracedSource:
    """Where the full value of a sharded tensor comes from in a graph: a gather in that graph, for all its uses.

    Args:
        tensor: The sharded tensor, around the shard that the graph takes.
        is_given: Whether the graph takes it; else the graph has made it.
    """

    is_traced: ClassVar[bool] = True
    num_active = 0  # no module's forward is noted within a graph

    def __init__(self, tensor: ShardedTensor, *, is_given: bool = False) -> None:
        self.params, self.is_given = [tensor], is_given
        self._fulls: dict[int | None, tuple[Any, Tensor]] = {}  # by the graph, which is kept alive with its number

    def full(self, slot: int, view: View | None = None, use: Use | None = None) -> Tensor:
        """The full value, or a view of it."""
        mode = get_proxy_mode()
        graph: Any = mode.tracer.graph if mode is not None else None
        num_nodes = len(graph.nodes) if graph is not None else 0
        known = self._fulls.get(id(graph))
        if known is None:
            known = self._fulls[id(graph)] = graph, self._gathered()
        full = known[1] if view is None else viewed(known[1], view.steps)
        if graph is not None:
            for node, _ in zip(reversed(graph.nodes), range(len(graph.nodes) - num_nodes), strict=False):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE  # rather than save it for backward
        return full

    def forget(self) -> None:
        """The tensor was written to."""
        self._fulls.clear()

    def _gathered(self) -> Tensor:
        tensor = self.params[0]
        layout, shard, stride = tensor.shard_layout, tensor.shard_storage.resolve(), tensor.stride()
        if layout.dim is None and layout.num_ranks == 1:
            shard = shard.to(tensor.storage_dtype)
            return shard if shard.stride() == stride else restrided(shard, stride)
        dim = -1 if layout.dim is None else layout.dim
        gather = torch.ops.dshard.gather.default
        lower_gathers(gather)
        gathered: Tensor = gather(
            shard, list(layout.shape), list(stride), dim, tensor.shard_group.name, tensor.storage_dtype, is_own=True
        )
        return gathered

    def full_in(self, slot: int, dtype: torch.dtype, use: Use | None = None) -> Tensor:
        """The full value in a given dtype."""
        return self.full(slot).to(dtype)

    @property
    def is_running(self) -> bool:
        """Whether a forward runs: nobody asks in a graph."""
        return True

    def compute_dtype(self, slot: int) -> torch.dtype | None:
        """None: it is used in the dtype that it is kept in."""
        return None

    def computes(self, slot: int, use: Use | None = None) -> bool:
        """Whether a use means its value in another dtype: never."""
        return False

    def unsharded_again(self, slot: int) -> None:
        """No part of a graph runs again by itself."""

    def pinned(self, slot: int) -> Tensor | None:
        """None: no scope holds it."""
        return None


def refuse_export() -> NoReturn:
    """Raise: what `torch.export` writes down must run elsewhere, too."""
    raise UnsupportedOpError(
        "torch.export: a sharded model cannot be exported, for the program would gather over the process groups of "
        "this run. Export a copy of the model that is not sharded, with the values that dshard.iter_full gives."
    )


def is_traced(tensor: ShardedTensor) -> bool:
    """Whether a tensor belongs to a graph that is being traced."""
    return type(tensor.base.gather_source) is TracedSource


def unflatten(
    kind: type[ShardedTensor], inner_tensors: dict[str, Any], flat_spec: Any, outer_size: Any, outer_stride: Any
) -> ShardedTensor:
    """A ShardedTensor around the shard that torch.compile hands over: one to trace with, or a result of a graph."""
    if torch.compiler.is_exporting():
        refuse_export()
    shard, mesh = inner_tensors["_local_tensor"], inner_tensors.get("device_mesh")
    if mesh is None:  # older releases of torch
        old_spec, requires_grad = flat_spec
        placements, meta, mesh = old_spec.placements, old_spec.tensor_meta, old_spec.mesh
    else:
        placements, meta, *_, requires_grad = flat_spec
    mesh = getattr(mesh, "real_obj", mesh)
    if isinstance(placements[-1], OfView):
        raise UnsupportedOpError(
            f"torch.compile: a compiled graph takes in and gives out sharded tensors, not views of them, but this is a "
            f"view (shape {tuple(outer_size)}). Use it within the compiled function, or give out full_tensor()."
        )
    dtype = dtype_in_graph(meta)
    is_traced_with = isinstance(shard, (FakeTensor, FunctionalTensor)) or shard.is_meta
    if dtype != shard.dtype and not is_traced_with:
        raise UnsupportedOpError(
            f"torch.compile: a compiled graph gives out sharded tensors in the dtype that they are kept in, "
            f"{shard.dtype}, but this one (shape {tuple(outer_size)}) has its compute dtype there, {dtype}. Give out "
            "full_tensor()."
        )
    group = group_of(mesh)
    dim = placements[-1].dim if isinstance(placements[-1], Shard) else None
    layout = ShardLayout(tuple(map(int, outer_size)), dim, group.num_ranks)
    spec = DTensorSpec(
        mesh, placements, tensor_meta=TensorMeta(torch.Size(layout.shape), tuple(map(int, outer_stride)), dtype)
    )
    prototype = shard if shard.dtype == dtype else empty_of(dtype, shard.device)
    out = kind.wrap(ShardStorage(shard, layout), spec, group, prototype=prototype, requires_grad=requires_grad)
    if is_traced_with:
        out.gather_source, out.gather_slot = TracedSource(out, is_given=True), 0
        _keep_writes()
        ShardedTensor._dispatch = staticmethod(_dispatch_any)
    return out


@cache
def _keep_writes() -> None:
    """Have compilers keep the operation that tells of writes, though nobody uses what it gives: it gives nothing."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    _register_effectful_op(torch.ops.dshard.written.default, _EffectType.ORDERED)


def _has_traced(values: Any) -> bool:
    for value in values:
        if type(value) in SHARDED:
            if is_traced(value):
                return True
        elif isinstance(value, (list, tuple)) and _has_traced(value):
            return True
    return False


def _dispatch_any(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """In a process that has compiled: by the rules of a graph, if one is being traced, else as ever."""
    if _has_traced(args) or (kwargs and _has_traced(kwargs.values())):
        return _dispatch_traced(func, args, kwargs)
    return _dispatch_apart(func, args, kwargs) if is_between_graphs() else dispatch(func, args, kwargs)


_dispatch_apart = outside_of_graphs(dispatch)


def _dispatch_traced(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation by its class, as outside of a graph.

    Views are remembered, so that backward saves shards; elementwise operations that autograd does not record run on
    shards, and write to them; all else takes full values.
    """
    op_class = classify(func)
    if op_class is OpClass.ALIAS:
        return args[0].alias()
    if op_class is OpClass.VIEW and type(args[0]) in SHARDED:
        return _view(args[0], func, args[1:], kwargs)
    if (run := _ON_SHARDS.get(op_class)) is not None and not is_recorded(*flat((*args, *kwargs.values()))):
        result = run(func, args, kwargs)
        if result is not NotImplemented:
            return result
    mutated = mutated_arguments(func)
    if op_class is OpClass.REFUSED or any(_has_traced([kwargs.get(str(i))]) for i in mutated if isinstance(i, str)):
        raise _refused(func, args, kwargs)
    if any(_has_traced([args[i]]) for i in mutated if isinstance(i, int) and i < len(args)):
        if mutated != (0,) or not isinstance(args[0], ShardedTensor):
            raise _refused(func, args, kwargs)
        return _write_whole(func, args, kwargs)
    return shardwise.compute_plain(func, args, kwargs)


def _refused(func: OpOverload, args: Args, kwargs: Kwargs) -> UnsupportedOpError:
    named = next(a for a in flat((*args, *kwargs.values())) if type(a) in SHARDED)
    return UnsupportedOpError(
        f"torch.compile: a compiled graph cannot run {func} on a sharded tensor (shape {tuple(named.shape)}). Call it "
        "outside of the compiled function."
    )


def _write_whole(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Write to a full copy of a sharded tensor, or to a view of one, and copy the shard back."""
    target = args[0]
    base = target if target._view is None else target._view.base
    if not _is_given(base):  # as in eager each rank may write data of its own to what it has made
        base.become_whole()
    full = materialize(base).clone()
    written = full if target._view is None else viewed(full, target._view.steps)
    func(written, *map(materialize, args[1:]), **{name: materialize(value) for name, value in kwargs.items()})
    _written(base).copy_(cut_to(full, base))
    return target


def _is_given(tensor: ShardedTensor) -> bool:
    """Whether a graph takes it, rather than make it; what a DTensor is taken as belongs to what the graph takes."""
    source = tensor.gather_source
    return source.is_given if isinstance(source, TracedSource) else True


def _pointwise(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    ref = common_layout((*args, *kwargs.values()), has_numbers=True)
    if ref is None:
        return NotImplemented
    return _made(ref, func(*(cut_to(arg, ref) for arg in args), **{name: cut_to(v, ref) for name, v in kwargs.items()}))


def _pointwise_inplace(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    target = args[0]
    if type(target) not in SHARDED or target._view is not None:
        return NotImplemented
    if not _is_given(target) and takes_own_data(target, (*args[1:], *kwargs.values())):
        return NotImplemented
    others = [cut_to(arg, target) for arg in args[1:]]
    func(_written(target), *others, **{name: cut_to(value, target) for name, value in kwargs.items()})
    return target


def _foreach(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and any(isinstance(x, Tensor) for x in arg)]
    singles = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    refs = [common_layout((*items, *singles), has_numbers=True) for items in zip(*lists, strict=True)]
    known = [ref for ref in refs if ref is not None]
    if len(known) < len(refs):
        return NotImplemented

    def local(arg: Any) -> Any:
        return [cut_to(x, ref) for x, ref in zip(arg, known, strict=True)] if any(arg is x for x in lists) else arg

    return [_made(ref, result) for ref, result in zip(known, func(*map(local, args), **kwargs), strict=True)]


def _foreach_inplace(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    targets = args[0]
    mutated = mutated_arguments(func)
    if any(isinstance(target, ShardedTensor) and target._view is not None for target in targets):
        return NotImplemented

    def local(place: int | str, arg: Any) -> Any:
        if not isinstance(arg, (list, tuple)) or not any(isinstance(x, Tensor) for x in arg):
            return arg
        pairs = zip(arg, targets, strict=True)
        if place in mutated:
            return [_written(x) if isinstance(x, ShardedTensor) else x for x, _ in pairs]
        return [cut_to(x, target) if isinstance(target, ShardedTensor) else materialize(x) for x, target in pairs]

    func(*(local(i, arg) for i, arg in enumerate(args)), **{name: local(name, arg) for name, arg in kwargs.items()})
    return None


def _factory(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    source = args[0]
    if source._view is not None:
        return NotImplemented
    kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}
    return _made(source, func(source.shard_storage.resolve(), *args[1:], **kwargs))


def _copy(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    source = args[0]
    keeps_strides = kwargs.get("memory_format") in (None, torch.preserve_format)
    if source._view is not None or not keeps_strides:
        return NotImplemented
    return _made(source, func(source.shard_storage.resolve(), *args[1:], **kwargs))


_ON_SHARDS: dict[OpClass, Handler] = {
    OpClass.POINTWISE: _pointwise,
    OpClass.POINTWISE_INPLACE: _pointwise_inplace,
    OpClass.FOREACH: _foreach,
    OpClass.FOREACH_INPLACE: _foreach_inplace,
    OpClass.FACTORY: _factory,
    OpClass.CLONE: _copy,
    OpClass.CAST: _copy,
}


def _made(ref: ShardedTensor, shard: Tensor) -> ShardedTensor:
    """A sharded tensor that the graph has made, of the layout of another one."""
    out = ref.like(shard)
    out.gather_source, out.gather_slot = TracedSource(out), 0
    return out


def _written(target: ShardedTensor) -> Tensor:
    """The shard of a tensor that the graph writes to; when the graph runs, gathered copies become stale."""
    shard = target.shard_storage.resolve()
    if isinstance(target.gather_source, TracedSource):
        target.gather_source.forget()
        if target.gather_source.is_given:
            torch.ops.dshard.written.default(shard)
    return shard


def _view(source: ShardedTensor, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    with _disable_current_modes():
        known = described(source, source.storage_dtype, ViewStep(func, args, kwargs), OfView())
    if not isinstance(known, list):
        steps, spec = known
        return source.lazy_view(steps, spec, ())
    return [source.lazy_view(steps, spec, ()) for steps, spec in known]
