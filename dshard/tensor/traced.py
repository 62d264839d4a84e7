"""Full values of sharded tensors in graphs of torch.compile: gathered by operations of the graph."""

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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointPolicy

from dshard.errors import UnsupportedOpError
from dshard.layout import ShardLayout
from dshard.tensor.meshes import group_of, viewed
from dshard.tensor.sharded_tensor import ShardedTensor, dtype_in_graph
from dshard.tensor.storage import ShardStorage, Use, note_write_to
from dshard.tensor.views import View, empty_of, restrided


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
    "gather(Tensor shard, int[] shape, int[] stride, int dim, str group, ScalarType dtype, Device device, bool is_own)"
    " -> Tensor",
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
    shard: Tensor,
    shape: list[int],
    stride: list[int],
    dim: int,
    group: str,
    dtype: torch.dtype,
    device: torch.device,
    is_own: bool,
) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


class TracedSource:
    """Where the full value of a sharded tensor comes from in a graph: a gather in that graph, for all its uses.

    Args:
        tensor: The sharded tensor, around the shard that the graph takes.
        is_given: Whether the graph takes it; else the graph has made it.
    """

    dispatch: ClassVar[Callable[..., Any]]  # of a process that has compiled; bound by dshard.tensor
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

    def writable(self) -> Tensor:
        """The shard, for the graph to write to; when the graph runs, gathered copies become stale."""
        shard: Tensor = self.params[0].shard_storage.resolve()
        self._fulls.clear()
        if self.is_given and not is_traceable_wrapper_subclass(shard):  # a state of 8 bits, say, which no unit gathers
            torch.ops.dshard.written.default(shard)  # ahead of the write: after it, to functionalization it is another
        return shard

    def _gathered(self) -> Tensor:
        tensor = self.params[0]
        layout, shard, stride = tensor.shard_layout, tensor.shard_storage.resolve(), tensor.stride()
        device = tensor.device  # where it is used, which need not be where the shard is kept
        if layout.dim is None and layout.num_ranks == 1:
            shard = shard.to(device, tensor.storage_dtype)
            return shard if shard.stride() == stride else restrided(shard, stride)
        dim = -1 if layout.dim is None else layout.dim
        gather = torch.ops.dshard.gather.default
        lower_gathers(gather)
        shape, dtype = list(layout.shape), tensor.storage_dtype
        return gather(shard, shape, list(stride), dim, tensor.shard_group.name, dtype, device, is_own=True)

    def full_in(self, slot: int, dtype: torch.dtype, use: Use | None = None) -> Tensor:
        """The full value in a given dtype."""
        return self.full(slot).to(dtype)

    @property
    def is_running(self) -> bool:
        """Whether a forward runs: nobody asks in a graph."""
        return True

    is_recomputed = False  # no part of a graph runs again by itself

    def compute_dtype(self, slot: int) -> torch.dtype | None:
        """None: it is used in the dtype that it is kept in."""
        return None

    def computes(self, slot: int, use: Use | None = None) -> bool:
        """Whether a use means its value in another dtype: never."""
        return False

    def unsharded_again(self, slot: int) -> None:
        """None: no part of a graph runs again by itself."""

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


class OfView(Placement):
    """How a view lies that is made within a graph: nowhere on its own."""


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
    out = kind.wrap(
        ShardStorage(shard, layout, is_shared=is_traced_with),
        spec,
        group,
        prototype=prototype,
        requires_grad=requires_grad,
    )
    if is_traced_with:
        out.gather_source, out.gather_slot = TracedSource(out, is_given=True), 0
        _keep_writes()
        ShardedTensor._dispatch = staticmethod(TracedSource.dispatch)
    return out


@cache
def _keep_writes() -> None:
    """Have compilers keep the operation that tells of writes, though nobody uses what it gives: it gives nothing."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    _register_effectful_op(torch.ops.dshard.written.default, _EffectType.ORDERED)
