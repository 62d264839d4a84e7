"""Where every operation on a ShardedTensor arrives."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from dshard.tensor import shardwise, step_ops, writes
from dshard.tensor.sharded_tensor import ShardedTensor
from dshard.tensor.stepping import is_stepping
from dshard.tensor.table import OpClass, classify
from dshard.tensor.views import ViewStep, view_metas

__all__ = ["dispatch"]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Handler = Callable[[OpOverload, Args, Kwargs], Any]


_MAX_REMEMBERED = 64  # views of one tensor, and of views of it


def _alias(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    return args[0].alias()


def _view(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Remember a view operation; the description of a repeated one is looked up."""
    source = args[0]
    if not isinstance(source, ShardedTensor):
        return shardwise.compute(func, args, kwargs)
    view = source._view
    key = (() if view is None else view.key, func, _frozen(args[1:]), _frozen(tuple(kwargs.items())))
    base = source if view is None else view.base
    cache = base._views
    if cache is None:
        cache = base._views = {}
    specs = cache.get(key)
    if specs is None:
        if len(cache) >= _MAX_REMEMBERED:
            cache.clear()
        metas = view_metas(source, func, args[1:], kwargs)
        specs = [source.view_spec(meta) for meta in metas] if isinstance(metas, list) else source.view_spec(metas)
        cache[key] = specs
    if not isinstance(specs, list):
        return source.lazy_view(ViewStep(func, args[1:], kwargs), specs, key)
    return [source.lazy_view(ViewStep(func, args[1:], kwargs, i), spec, (*key, i)) for i, spec in enumerate(specs)]


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, (list, tuple)) else value


_HANDLERS: dict[OpClass, Handler] = {
    OpClass.VIEW: _view,
    OpClass.ALIAS: _alias,
    OpClass.CAST: shardwise.cast,
    OpClass.CLONE: shardwise.clone,
    OpClass.POINTWISE: shardwise.pointwise,
    OpClass.POINTWISE_INPLACE: writes.pointwise_inplace,
    OpClass.FOREACH: shardwise.foreach,
    OpClass.FOREACH_INPLACE: writes.foreach_inplace,
    OpClass.FOREACH_REDUCTION: shardwise.foreach_norm,
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
    OpClass.FOREACH_INPLACE: step_ops.step_foreach_inplace,
}


@cache
def _handlers_of(func: OpOverload) -> tuple[Handler, Handler | None, bool]:
    """How `func` runs, how it runs within an optimizer's step, and whether its result shares memory."""
    op_class = classify(func)
    return _HANDLERS[op_class], _STEP_HANDLERS.get(op_class), op_class in _SAME_MEMORY


def dispatch(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Run `func` by the rule of its class in the op table."""
    handler, step_handler, shares_memory = _handlers_of(func)
    if step_handler is not None and is_stepping():
        result = step_handler(func, args, kwargs)
        if result is not NotImplemented:
            return result
    if shares_memory and torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False), torch.no_grad():  # it shares the version counter of a normal tensor
            return handler(func, args, kwargs)
    return handler(func, args, kwargs)
