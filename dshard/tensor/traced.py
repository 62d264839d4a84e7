"""Sharded tensors within a graph that torch.compile traces: views stay lazy, everything else gathers there."""

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

from dshard.errors import UnsupportedOpError
from dshard.layout import ShardLayout
from dshard.tensor import shardwise
from dshard.tensor.dispatch import described, dispatch
from dshard.tensor.inductor import lower_gathers
from dshard.tensor.meshes import group_of
from dshard.tensor.shard_storage import ShardStorage
from dshard.tensor.sharded_tensor import SHARDED, ShardedTensor
from dshard.tensor.sources import Use
from dshard.tensor.strides import restrided
from dshard.tensor.table import Args, Kwargs, OpClass, classify, mutated_arguments
from dshard.tensor.tp_layout import viewed
from dshard.tensor.traced_meta import GRAD, dtype_in_graph
from dshard.tensor.views import View, ViewStep, empty_of


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
_LIBRARY.impl("gather", lambda *args: TracedGather.run(*args), "CompositeExplicitAutograd")  # noqa: PLW0108 - bound later


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
    """

    is_traced: ClassVar[bool] = True
    num_active = 0  # no module's forward is noted within a graph

    def __init__(self, tensor: ShardedTensor) -> None:
        self.params = [tensor]
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
        out.gather_source, out.gather_slot = TracedSource(out), 0
        ShardedTensor._dispatch, ShardedTensor.grad = staticmethod(_dispatch_any), GRAD
    return out


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
    return dispatch(func, args, kwargs)


def _dispatch_traced(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Views are remembered, as outside of a graph, so that backward saves shards; all else takes full values."""
    op_class = classify(func)
    if op_class is OpClass.ALIAS:
        return args[0].alias()
    if op_class is OpClass.VIEW and type(args[0]) in SHARDED:
        return _view(args[0], func, args[1:], kwargs)
    if op_class is OpClass.REFUSED or any(
        _has_traced([args[i] if isinstance(i, int) and i < len(args) else kwargs.get(str(i))])
        for i in mutated_arguments(func)
    ):
        named = next(a for a in (*args, *kwargs.values()) if type(a) in SHARDED)
        raise UnsupportedOpError(
            f"torch.compile: {func} writes to a sharded tensor (shape {tuple(named.shape)}), which a compiled graph "
            "cannot do. Write to it outside of the compiled function."
        )
    return shardwise.compute(func, args, kwargs)


def _view(source: ShardedTensor, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    with _disable_current_modes():
        known = described(source, source.storage_dtype, ViewStep(func, args, kwargs), OfView())
    if not isinstance(known, list):
        steps, spec = known
        return source.lazy_view(steps, spec, ())
    return [source.lazy_view(steps, spec, ()) for steps, spec in known]
