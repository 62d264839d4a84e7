"""Where every operation on a ShardedTensor arrives."""

from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import Placement

from dshard.tensor import shardwise, step_ops, writes
from dshard.tensor.homes import apart, once_per_home
from dshard.tensor.sharded_tensor import ShardedTensor
from dshard.tensor.stepping import is_stepping
from dshard.tensor.table import Args, Handler, Kwargs, OpClass, classify
from dshard.tensor.views import ViewStep, view_metas

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
    OpClass.CAST: shardwise.cast,
    OpClass.CLONE: shardwise.clone,
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
_STEP_HANDLERS: dict[OpClass, Handler] = {
    OpClass.POINTWISE: step_ops.step_pointwise,
    OpClass.POINTWISE_INPLACE: step_ops.step_pointwise_inplace,
    OpClass.FOREACH_INPLACE: apart(step_ops.step_foreach_inplace),
}


_Rule = tuple[Handler, Handler | None, bool, OpOverload]
_RULES: dict[int, _Rule] = {}  # by identity, for the hash of an OpOverload is Python code; each keeps its own alive


def _rule_of(func: OpOverload) -> _Rule:
    """How `func` runs, how it runs within an optimizer's step, and whether its result shares memory."""
    op_class = classify(func)
    rule = _HANDLERS[op_class], _STEP_HANDLERS.get(op_class), op_class in _SAME_MEMORY, func
    return _RULES.setdefault(id(func), rule)


def dispatch(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Run `func` by the rule of its class in the op table."""
    if _Lazy.is_made and _excludes(_KEYS[0]):
        with _KeyGuard(_KEYS[0], False), _KeyGuard(_KEYS[1], False):  # noqa: FBT003 -- else they are taken as they lie
            return dispatch(func, args, kwargs)
    handler, step_handler, shares_memory, _ = _RULES.get(id(func)) or _rule_of(func)
    if step_handler is not None and is_stepping():
        result = step_handler(func, args, kwargs)
        if result is not NotImplemented:
            return result
    if shares_memory and torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False), torch.no_grad():  # it shares the version counter of a normal tensor
            return handler(func, args, kwargs)
    return handler(func, args, kwargs)
