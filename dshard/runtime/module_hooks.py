"""How modules and parameters tell the runtime what happens to them.

Within a graph that torch.compile traces, hooks do nothing but cast. The hooks of the module that is compiled itself run
around the graph, as in eager: dynamo would trace a graph for each of them, but is told to leave them alone.
"""

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

from dshard.gradients.hook import hook_gradient
from dshard.runtime.casts import Casts
from dshard.runtime.region_tokens import with_tokens
from dshard.runtime.runtime import Runtime
from dshard.tensor import ShardedTensor
from dshard.tensor.sharded_tensor import is_in_mixed_forward, note_forward_in_graph
from dshard.tensor.storage import rejoin_source
from dshard.tensor.traced import is_traced, refuse_export
from dshard.units.context import ModelContext
from dshard.units.unit import Unit

_frames = torch._C._dynamo.eval_frame
_HOOK_ID = -1  # torch counts from 0
FORWARD_METHODS = "_dshard_forward_methods"  # names of those that `as_forward` was called for


def adopt_leaf(param: ShardedTensor) -> None:
    """Take care of the gradients of a leaf that autograd is about to use for the first time.

    That is a parameter whose `requires_grad` was switched on later, or a leaf that no `fully_shard` made: a deep
    copy, or `nn.Parameter(sharded_tensor)`. The latter becomes a unit of its own.
    """
    if is_traced(param):
        return  # the graph hands gradients to the real one
    param.shard_storage.is_shared = True
    if param.swapped_source is not None:
        rejoin_source(param)
    source = param.gather_source
    if not isinstance(source, Unit) or source.params[param.gather_slot] is not param:
        context = ModelContext()
        context.get(Runtime).adopt(Unit([param], [], label=param.name, model=context))
    hook_gradient(param)


def watch(module: nn.Module) -> None:
    """Have the forwards of a module noticed, once."""
    if "_dshard_units" not in module.__dict__:
        module.__dict__["_dshard_units"] = []
        # Not by register_forward_hook, whose numbers differ: graphs are guarded by them, and blocks share graphs.
        module._forward_pre_hooks[_HOOK_ID] = _before_forward
        module._forward_pre_hooks.move_to_end(_HOOK_ID, last=False)  # type: ignore[attr-defined]
        module._forward_pre_hooks_with_kwargs[_HOOK_ID] = True
        module._forward_hooks[_HOOK_ID] = _after_forward
        module._forward_hooks_always_called[_HOOK_ID] = True


def unwatch(module: nn.Module) -> None:
    """Have the forwards of a module noticed no more."""
    if module.__dict__.pop("_dshard_units", None) is not None:
        module.__dict__.pop("_dshard_formed", None)
        for hooks in (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs):
            hooks.pop(_HOOK_ID, None)
        for hooks in (module._forward_hooks, module._forward_hooks_always_called):
            hooks.pop(_HOOK_ID, None)


def attach(module: nn.Module, unit: Unit) -> None:
    """Tie a unit to a module's forward."""
    watch(module)
    module.__dict__["_dshard_units"].append(unit)


def _units_at(module: nn.Module) -> list[Unit]:
    """Units of which `module` is one of the modules; a copy, for the first use may form new ones."""
    return list(module.__dict__["_dshard_units"])


def as_forward(module: nn.Module, name: str) -> None:
    """Have a method of a module be a forward of it, as far as dtypes and units go; also in copies of the module."""
    if name in module.__dict__.get(FORWARD_METHODS, ()):
        return
    module.__dict__[FORWARD_METHODS] = (*module.__dict__.get(FORWARD_METHODS, ()), name)
    method = getattr(module, name)
    function = getattr(method, "__func__", None)

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run_forward(self, method if function is None else MethodType(function, self), args, kwargs)

    setattr(module, name, MethodType(wraps(method)(run), module))


def _run_forward(module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function as a forward of a module."""
    output = None
    try:
        args, kwargs = _before_forward(module, args, kwargs) or (args, kwargs)
        output = function(*args, **kwargs)
    finally:
        converted = _after_forward(module, args, output)
    return output if converted is None else converted


def _before_forward(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    if torch.compiler.is_compiling():
        return _in_graph(module, args, kwargs)
    callback = _frames.set_eval_frame(None)
    try:
        return _enter(module, args, kwargs)
    finally:
        _frames.set_eval_frame(callback)


def _enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """A forward of a module starts."""
    units = _units_at(module)
    if units:
        model = units[0].model
        if model.split is not None:
            model.before_use()
            units = _units_at(module)
        model.forwards.note_running(1)
    casts = Casts.of(module)
    if casts is not None:
        args, kwargs = casts.cast_inputs(args, kwargs)
    is_changed = casts is not None
    if units:
        depending = with_tokens((args, kwargs))
        is_changed |= depending[0] is not args or depending[1] is not kwargs
        args, kwargs = depending
    for unit in units:
        runtime = unit.model.get(Runtime)
        runtime.enter_forward(unit)
        if runtime.backward.watches.watch(unit, module, (args, kwargs)):
            unit.model.regions.note_gradient()
    return (args, kwargs) if is_changed else None


def _in_graph(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Cast the inputs: within a graph hooks do nothing else."""
    _note_in_graph()
    casts = Casts.of(module)
    return None if casts is None else casts.cast_inputs(args, kwargs)


def _note_in_graph() -> bool:
    """Run while a graph is traced, never in it: of a forward that the graph holds."""
    if torch.compiler.is_exporting():
        refuse_export()
    if not is_in_mixed_forward():
        note_forward_in_graph()
    return True


_note_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler's decorator, unimported


def _after_forward(module: nn.Module, args: Any, output: Any) -> Any:
    if torch.compiler.is_compiling():
        return _cast_result(module, output)
    callback = _frames.set_eval_frame(None)
    try:
        return _exit(module, output)
    finally:
        _frames.set_eval_frame(callback)


for _hook in (_before_forward, _after_forward):
    _frames.set_code_exec_strategy(
        _hook.__code__, _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
    )


def _exit(module: nn.Module, output: Any) -> Any:
    """A forward of a module ended, by a result or an exception."""
    units = _units_at(module)
    if units:
        units[0].model.forwards.note_running(-1)
    for unit in units:
        unit.model.get(Runtime).exit_forward(unit, module)
    result = _cast_result(module, output)
    if not units or units[0].model.forwards.num_running:
        return result
    given = output if result is None else result
    depending = with_tokens(given)
    return result if depending is given else depending


def _cast_result(module: nn.Module, output: Any) -> Any:
    casts = Casts.of(module)
    return None if casts is None else casts.cast_outputs(output)
