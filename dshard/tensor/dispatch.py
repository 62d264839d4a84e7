"""What runs an operation: its handler in the table, once per device, beside DTensors, in graphs of torch.compile."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from dshard.compiling import is_between_graphs, outside_of_graphs
from dshard.errors import UnsupportedOpError
from dshard.tensor import shardwise, writes
from dshard.tensor.operands import in_graph
from dshard.tensor.sharded_tensor import SHARDED, VIEWS, OffloadedShardedTensor, ShardedTensor
from dshard.tensor.storage import ShardStorage, flat, tensors_in
from dshard.tensor.table import Args, Handler, Kwargs, OpClass, classify, mutated_arguments
from dshard.tensor.traced import OfView, is_traced
from dshard.tensor.views import ViewStep, view_metas


def _absent(name: str) -> Any:
    def get(self: ShardedTensor) -> Any:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    return property(get)


def _of_gathered(self: ShardedTensor, name: str) -> Any:
    """An attribute that it has none of: in a forward, that of what it is there."""
    view = self._view
    is_in_forward = self.compute_dtype() is not None if view is None else view.computes
    if not is_in_forward or name.startswith("__"):
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
    return getattr(self.materialize(), name)


# What a weight says of its shards: a sharded tensor itself is no such weight.
_HIDDEN = {name: _absent(name) for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather")}


def _said_to_be(other: type[Tensor]) -> Any:
    """A `__class__` that `isinstance` goes by, beside the type."""
    return property(lambda self: other, object.__dict__["__class__"].__set__)


@cache
def asked_before(kind: type[ShardedTensor], other: type[Tensor]) -> type[ShardedTensor]:
    """A class of sharded tensors that torch asks ahead of another class; to all else it is `kind`."""
    namespace = {
        **_HIDDEN,
        "__doc__": kind.__doc__,
        "__getattr__": _of_gathered,
        "__module__": __name__,
        "__slotnames__": kind.__slotnames__,
        "_kind": kind,
        "kin": ShardedTensor,
    }
    name = f"{kind.__name__}Before{other.__name__}"
    try:
        made: type[ShardedTensor] = type(name, (kind, other), namespace)
    except TypeError:  # both have __slots__: it says that it is of the other class, and torch takes its word
        made = type(name, (kind,), {**namespace, "__class__": _said_to_be(other)})
    SHARDED.add(made)
    if kind is not ShardedTensor:
        VIEWS[made] = asked_before(ShardedTensor, other)
    return made


def give_precedence(param: ShardedTensor, gathered: type[Tensor]) -> None:
    """Have a parameter, and views of it, asked ahead of the class that it is gathered as; a plain one never is."""
    kind = type(param)._kind or type(param)
    wanted = kind if gathered is Tensor else asked_before(kind, gathered)
    if type(param) is not wanted:
        param.__class__ = wanted
        param.known_views = None


def _homes(args: Args) -> list[Any]:
    """The devices on which the tensors of the first list are kept, in order; that may follow a number."""
    first = next((arg for arg in args if isinstance(arg, (list, tuple))), ())
    return [t.storage_device if isinstance(t, ShardedTensor) else t.device for t in first]


def once_per_home(handler: Handler) -> Handler:
    """A handler of an operation over lists, all of one length, that runs once for each device."""

    def run(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        if not OffloadedShardedTensor.num_made or len(set(homes := _homes(args))) < 2:
            return handler(func, args, kwargs)
        results: list[Any] = [None] * len(homes)
        for home in dict.fromkeys(homes):
            places = [i for i, other in enumerate(homes) if other == home]

            def part(value: Any, places: list[int] = places) -> Any:
                is_list = isinstance(value, (list, tuple)) and len(value) == len(homes)
                return [value[i] for i in places] if is_list else value

            found = handler(func, tuple(map(part, args)), {name: part(value) for name, value in kwargs.items()})
            for i, result in zip(places, found or (), strict=False):
                results[i] = result
        return results if func._schema.returns else None

    return run


_Run = Callable[[OpOverload, Args, Kwargs], Any]


def run_beside_dtensors(run: _Run, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation that has a plain DTensor among its operands, at any place.

    One of the mesh and placements of a sharded operand is taken as sharded. Where another one is written to, the
    sharded operands are taken as DTensors, which torch lays out as it does.

    Args:
        run: Runs operations on sharded tensors.
        func: The operation.
        args: Its arguments.
        kwargs: Its arguments by name.
    """
    if is_between_graphs() and not _has_traced((*args, *kwargs.values())):
        return _run_beside_apart(run, func, args, kwargs)
    return _run_beside(run, func, args, kwargs)


def _run_beside(run: _Run, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    taken: dict[int, ShardedTensor] = {}
    originals: dict[int, DTensor] = {}
    sharded: list[Any] = [value for value in tensors_in((args, list(kwargs.values()))) if type(value) in SHARDED]
    for group in _together((*args, *kwargs.values())):
        beside: list[Any] = [value for value in group if type(value) in SHARDED] or sharded
        for value in group:
            if type(value) is DTensor and id(value) not in taken:
                alike = _taken_as(value, beside)
                if alike is not None:
                    taken[id(value)], originals[id(alike)] = alike, value
    if not taken and not any(value.device_mesh == other.device_mesh for value in _dtensors(args) for other in sharded):
        return run(func, args, kwargs)  # of tensor parallelism
    new_args, new_kwargs = _replaced((args, kwargs), taken)
    written = [new_args[i] if isinstance(i, int) else new_kwargs.get(i) for i in mutated_arguments(func)]
    if any(True for _ in _dtensors(written)):
        as_dtensors = {id(value): _as_dtensor(value) for value in sharded}
        args, kwargs = _replaced((args, kwargs), as_dtensors)
        result = func(*args, **kwargs)
        for value in tensors_in(written):
            if isinstance(value, ShardedTensor):
                value.shard_storage.note_write()
        return result
    result = run(func, new_args, new_kwargs)
    return originals.get(id(result), result)


_run_beside_apart = outside_of_graphs(_run_beside)


def _together(values: Args) -> Iterator[tuple[Any, ...]]:
    """The operands that meet: all that are no lists, and the items of lists at each place."""
    yield tuple(value for value in values if isinstance(value, Tensor))
    lists = [
        value for value in values if isinstance(value, (list, tuple)) and any(isinstance(x, Tensor) for x in value)
    ]
    yield from zip(*lists, strict=True) if len(set(map(len, lists))) == 1 else ()


def _taken_as(value: DTensor, sharded: list[ShardedTensor]) -> ShardedTensor | None:
    """A DTensor as a sharded tensor over the same memory, if it lies as one of some does."""
    local = value._local_tensor
    for other in sharded:
        spec = other._spec
        if other._view is not None or value.device_mesh != spec.mesh or value.placements != spec.placements:
            continue
        if local.shape == other.shard_storage.resolve().shape:
            storage = ShardStorage(local, other.shard_layout, is_shared=True)
            taken = other.like(storage, dtype=value.dtype)
            return in_graph(taken, other, is_given=True)
    return None


def _as_dtensor(value: ShardedTensor) -> DTensor:
    """A sharded tensor as a plain DTensor over the same memory; of a view, one of its full value."""
    if value._view is not None:
        return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    meta = value._spec.tensor_meta
    assert meta is not None
    local = value.shard_storage.resolve()
    return DTensor.from_local(
        local, value.device_mesh, value.placements, run_check=False, shape=meta.shape, stride=meta.stride
    )


def _dtensors(value: Any) -> Iterator[DTensor]:
    return (each for each in tensors_in(value) if type(each) is DTensor)


def _replaced(value: Any, others: dict[int, Any]) -> Any:
    return tree_map_only(Tensor, lambda tensor: others.get(id(tensor), tensor), value)


aten = torch.ops.aten
_KEYS = torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative
_KeyGuard: Any = torch._C._SetExcludeDispatchKeyGuard
_excludes: Any = torch._C._dispatch_tls_is_dispatch_key_excluded
_MAX_REMEMBERED = 64  # views of one tensor, and of views of it


def _alias(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    source: ShardedTensor = args[0]
    if source.has_compute_dtype and source.compute_dtype() is not None:
        return _view(func, args, kwargs)  # in that dtype
    return source.alias()


class _Lazy:
    """Whether a view has been made whose numbers are conjugated or negated when they are used."""

    is_made = False


def _view(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Remember a view operation; the description of a repeated one is looked up."""
    source = args[0]
    if not isinstance(source, ShardedTensor):
        return shardwise.compute(func, args, kwargs)
    if func is aten._conj.default or func is aten._neg_view.default:
        _Lazy.is_made = True
    view = source._view
    if view is None and not source.is_node_known and torch.is_grad_enabled():
        _note_node(source)
    computes = source.computes() if view is None and source.has_compute_dtype else view is not None and view.computes
    key: tuple[Any, ...] = ((computes,) if view is None else view.key, id(func))
    if len(args) > 1 or kwargs:
        key = (*key, _frozen(args[1:]), _frozen(tuple(kwargs.items())))
    base = source if view is None else view.base
    cache = base.known_views
    if cache is None:
        cache = base.known_views = {}
    known = cache.get(key)
    if known is None:
        if len(cache) >= _MAX_REMEMBERED:
            cache.clear()
        precision = source.wire_precision if computes else None  # of a view, its own dtype is that of its use
        dtype = (precision.compute if precision is not None else None) or source.storage_dtype
        known = cache[key] = described(source, dtype, ViewStep(func, args[1:], kwargs))
    if not isinstance(known, list):
        steps, spec = known
        return source.lazy_view(steps, spec, key, computes=computes)
    return [source.lazy_view(steps, spec, (*key, i), computes=computes) for i, (steps, spec) in enumerate(known)]


def _note_node(source: ShardedTensor) -> None:
    """Note that a program may hold autograd's node of a parameter: it takes a view of it, outside of any forward.

    It may hook the node, as `p.expand_as(p).grad_fn.next_functions[0][0].register_hook(...)` does, and nothing tells.
    """
    unit = source.gather_source
    if unit is not None and not unit.is_running and source.requires_grad and torch._C._current_graph_task_id() == -1:
        source.is_node_known = True


def described(source: ShardedTensor, dtype: torch.dtype, step: ViewStep, lie: Placement | None = None) -> Any:
    """Steps from the base, and DTensor's description, of a view of a tensor in some dtype, or of each of several."""
    metas = view_metas(source, dtype, step)
    if not isinstance(metas, list):
        return (*source.view_steps, step), source.view_spec(metas, lie)
    steps = [replace(step, index=i) for i in range(len(metas))]
    return [((*source.view_steps, one), source.view_spec(meta, lie)) for one, meta in zip(steps, metas, strict=True)]


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, (list, tuple)) else value


_HANDLERS: dict[OpClass, Handler] = {
    OpClass.VIEW: _view,
    OpClass.ALIAS: _alias,
    OpClass.CAST: shardwise.copied,
    OpClass.CLONE: shardwise.copied,
    OpClass.POINTWISE: shardwise.pointwise,
    OpClass.POINTWISE_INPLACE: writes.pointwise_inplace,
    OpClass.FOREACH: once_per_home(shardwise.foreach),
    OpClass.FOREACH_INPLACE: once_per_home(writes.foreach_inplace),
    OpClass.FOREACH_REDUCTION: once_per_home(shardwise.foreach_norm),
    OpClass.REDUCTION: shardwise.reduction,
    OpClass.FACTORY: shardwise.factory,
    OpClass.NEW: shardwise.new_tensor,
    OpClass.LAYOUT: shardwise.layout_only,
    OpClass.RANDOM_INPLACE: writes.random_inplace,
    OpClass.RANDOM_FACTORY: writes.random_factory,
    OpClass.WRITE: writes.write,
    OpClass.RENORM: writes.renorm,
    OpClass.UNSCALE: writes.unscale,
    OpClass.EQUAL: shardwise.equal,
    OpClass.REFUSED: writes.refuse,
    OpClass.COMPUTE: shardwise.compute,
}


_SAME_MEMORY = (OpClass.VIEW, OpClass.ALIAS)
_Rule = tuple[Handler, bool, OpOverload]
_RULES: dict[int, _Rule] = {}  # by identity, for the hash of an OpOverload is Python code; each keeps its own alive


def _rule_of(func: OpOverload) -> _Rule:
    """How `func` runs, and whether its result shares memory."""
    op_class = classify(func)
    return _RULES.setdefault(id(func), (_HANDLERS[op_class], op_class in _SAME_MEMORY, func))


def dispatch(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Run `func` by the rule of its class in the op table."""
    if _Lazy.is_made and _excludes(_KEYS[0]):
        with _KeyGuard(_KEYS[0], False), _KeyGuard(_KEYS[1], False):  # noqa: FBT003 -- else they are taken as they lie
            return dispatch(func, args, kwargs)
    handler, shares_memory, _ = _RULES.get(id(func)) or _rule_of(func)
    if shares_memory and torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False), torch.no_grad():  # it shares the version counter of a normal tensor
            return handler(func, args, kwargs)
    return handler(func, args, kwargs)


_ON_SHARDS = frozenset(  # what runs by the same rules as outside of a graph; all else takes full values
    {
        OpClass.POINTWISE,
        OpClass.POINTWISE_INPLACE,
        OpClass.FOREACH,
        OpClass.FOREACH_INPLACE,
        OpClass.FACTORY,
        OpClass.CLONE,
        OpClass.CAST,
    }
)


def _has_traced(values: Any) -> bool:
    for value in values:
        if type(value) in SHARDED:
            if is_traced(value):
                return True
        elif isinstance(value, (list, tuple)) and _has_traced(value):
            return True
    return False


def dispatch_in_graphs(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
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
    op_class, mutated = classify(func), mutated_arguments(func)
    if op_class is OpClass.ALIAS:
        return args[0].alias()
    if op_class is OpClass.VIEW and type(args[0]) in SHARDED:
        return _view_in_graph(args[0], func, args[1:], kwargs)
    if op_class is OpClass.REFUSED or _has_traced([kwargs.get(i) for i in mutated if isinstance(i, str)]):
        raise _refused(func, args, kwargs)
    if op_class in _ON_SHARDS:
        return _HANDLERS[op_class](func, args, kwargs)
    if _has_traced([args[i] for i in mutated if isinstance(i, int) and i < len(args)]):
        if mutated != (0,) or not isinstance(args[0], ShardedTensor):
            raise _refused(func, args, kwargs)
        return writes.write(func, args, kwargs)
    return shardwise.compute_plain(func, args, kwargs)


def _refused(func: OpOverload, args: Args, kwargs: Kwargs) -> UnsupportedOpError:
    named = next(a for a in flat((*args, *kwargs.values())) if type(a) in SHARDED)
    return UnsupportedOpError(
        f"torch.compile: a compiled graph cannot run {func} on a sharded tensor (shape {tuple(named.shape)}). Call it "
        "outside of the compiled function."
    )


def _view_in_graph(source: ShardedTensor, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    with _disable_current_modes():
        known = described(source, source.storage_dtype, ViewStep(func, args, kwargs), OfView())
    if not isinstance(known, list):
        steps, spec = known
        return source.lazy_view(steps, spec, ())
    return [source.lazy_view(steps, spec, ()) for steps, spec in known]
