"""Hooks around modules: forwards that begin and end, arguments that are cast, regions that a backward passes."""

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils.rnn import PackedSequence

from dshard.autograd import in_backward
from dshard.collectives import begin_forward
from dshard.compiling import outside_of_graphs
from dshard.errors import UnsupportedOpError
from dshard.gradients.backward import hook_gradient
from dshard.policies import Precision, PrecisionRules
from dshard.runtime.runtime import Runtime
from dshard.runtime.unsharded import Unsharded
from dshard.runtime.unsharding import Unsharding, Unshardings
from dshard.tensor import ShardedTensor
from dshard.tensor.sharded_tensor import is_in_mixed_forward, note_forward_in_graph
from dshard.tensor.storage import rejoin_source
from dshard.tensor.traced import is_traced, refuse_export
from dshard.units.context import ModelContext
from dshard.units.unit import Unit

_ATTRIBUTE = "_dshard_casts"
_OF_BATCH_NORM = (_BatchNorm.forward, _InstanceNorm.forward)  # torch.nn.functional.batch_norm takes one dtype of both


@dataclass(frozen=True, slots=True)
class Casts:
    """How a module's arguments and results are converted; None for as they are.

    Args:
        inputs: Dtype of its floating-point arguments.
        outputs: Dtype of its floating-point results.
    """

    inputs: torch.dtype | None
    outputs: torch.dtype | None

    @classmethod
    def of(cls, module: nn.Module) -> "Casts | None":
        """The casts of a module, if it has any."""
        return module.__dict__.get(_ATTRIBUTE)

    def cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments as the module takes them."""
        return _cast(args, self.inputs), _cast(kwargs, self.inputs)

    def cast_outputs(self, output: Any) -> Any:
        """A result as the module gives it."""
        return _cast(output, self.outputs)


def forget_casts(module: nn.Module) -> None:
    """Have a module take and give what it is given, and look at nothing."""
    module.__dict__.pop(_ATTRIBUTE, None)
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is _check_statistics:
            del module._forward_pre_hooks[key]


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """`value` with all floating-point tensors in it, however nested, in another dtype."""
    return value if dtype is None else converted(value, partial(_to, dtype))


def _to(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


def converted(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with all tensors in it changed, however nested.

    A container in which nothing is changed is given as the object that it is: modules may hand on what they write to
    it. One in which something is becomes a copy of its type that shares all else.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PackedSequence):  # a tuple that is not made of its items alone
        data = change(value.data)
        return value if data is value.data else PackedSequence(data, *value[1:])
    if isinstance(value, (list, tuple)):
        return _with_items(value, _changed(enumerate(value), change))
    if isinstance(value, Mapping):
        return _with_items(value, _changed(value.items(), change))
    if isinstance(value, (set, frozenset)):
        items = [(item, converted(item, change)) for item in value]
        return type(value)(new for _, new in items) if any(old is not new for old, new in items) else value
    if is_dataclass(value) and not isinstance(value, type):
        return _with_fields(value, _changed(((each.name, getattr(value, each.name)) for each in fields(value)), change))
    return value


def _changed(items: Iterable[tuple[Any, Any]], change: Callable[[Tensor], Tensor]) -> dict[Any, Any]:
    """Those of some items that are changed, by their keys."""
    pairs = ((key, item, converted(item, change)) for key, item in items)
    return {key: new for key, old, new in pairs if new is not old}


def _with_items(value: Any, changed: Mapping[Any, Any]) -> Any:
    """A mapping, list or tuple with other items at some keys; itself where there are none."""
    if not changed:
        return value
    if isinstance(value, tuple):
        items = [changed.get(i, item) for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)({**value, **changed})  # type: ignore[call-arg]  # such as types.MappingProxyType
    new = copy.copy(value)
    for key, item in changed.items():
        new[key] = item
    return new


def _with_fields(value: Any, changed: Mapping[str, Any]) -> Any:
    """A dataclass with other values of some fields; itself where there are none."""
    if not changed:
        return value
    new = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(new, name, item)  # a frozen one, too
    return new


def cast_at(modules: Sequence[nn.Module], rules: PrecisionRules, watch: Callable[[nn.Module], None]) -> None:
    """Have modules convert what they take and give.

    The modules that `fully_shard` was called on take the compute dtype of the rest, as under FSDP2. A part all of whose
    parameters compute in another one than the rest takes that, and gives the dtype of the rest.

    Args:
        modules: Those of a call.
        rules: Its rules.
        watch: Has a module's forwards noticed.
    """
    rest = rules.of_the_rest
    if rest is not None:
        casts = Casts(rest.param_dtype if rest.cast_forward_inputs else None, rest.output_dtype)
        for module in modules if casts != Casts(None, None) else ():
            module.__dict__[_ATTRIBUTE] = casts
    for module in modules if rules.rules else ():
        _check_statistics_of(module)
    if any(pattern != "*" for pattern, _ in rules.rules):
        for module in modules:
            _cast_parts(module, rest.param_dtype if rest is not None else None, watch)


def _check_statistics_of(module: nn.Module) -> None:
    """Have batch norms below a module look at dtypes ahead of their forwards: torch's own error names no module."""
    for child in module.modules():
        if type(child).forward in _OF_BATCH_NORM and child.affine and child.track_running_stats:
            child.register_forward_pre_hook(_check_statistics)


def _check_statistics(module: nn.Module, args: Any) -> None:
    """Raise where a norm computes in another dtype than that of its running statistics."""
    weight, mean = module.weight, module.running_mean
    param = weight.sharded if isinstance(weight, Unsharded) else weight
    if not isinstance(param, ShardedTensor) or not isinstance(mean, Tensor) or weight.dtype == mean.dtype:
        return
    name = param.name.removesuffix(".weight")
    raise UnsupportedOpError(
        f"{name}: a {type(module).__name__} computes in the dtype of its running statistics, but mp_policy computes "
        f"with its weight in {weight.dtype}, and these are {mean.dtype}. Leave it out by a pattern, as in "
        f'mp_policy={{"{name}.*": None, "*": ...}}.'
    )


def _cast_parts(module: nn.Module, rest: torch.dtype | None, watch: Callable[[nn.Module], None]) -> None:
    """Find the outermost modules below one whose parameters all compute in one dtype that is not the rest's."""
    for child in module.children():
        params = [p for p in child.parameters() if isinstance(p, ShardedTensor)]
        dtypes = {_compute_dtype(p) for p in params}
        around = rest or params[0].storage_dtype if params else None
        if not params or dtypes == {around}:
            continue
        if len(dtypes) == 1 and type(child).forward is not nn.Module.forward:
            precision = params[0].wire_precision or Precision()
            child.__dict__[_ATTRIBUTE] = Casts(
                dtypes.pop() if precision.casts_inputs else None, precision.output or around
            )
            watch(child)
        else:
            _cast_parts(child, rest, watch)


def _compute_dtype(param: ShardedTensor) -> torch.dtype:
    precision = param.wire_precision
    return precision.compute if precision is not None and precision.compute is not None else param.storage_dtype


class _Awaiting:
    """Numbers of regions that nothing depends on yet, in this process."""

    tokens: ClassVar[list[Tensor]] = []
    num_open: ClassVar[int] = 0  # regions whose block runs: what is in it is a matter of some ranks
    hook: ClassVar[Any] = None  # by which the next module of any kind is noticed


def note_open(change: int) -> None:
    """The block of a region starts, or ends: `change` is 1 or -1."""
    _Awaiting.num_open += change


def await_user(token: Tensor, *, any_module: bool) -> None:
    """Have what the next module takes, or the model gives, depend on a number.

    Args:
        token: The number.
        any_module: Whether modules count that are no unit's, too. Where nothing ahead of a region is trained, what is
            computed behind it would be part of the backward on those ranks alone that ran it.
    """
    _Awaiting.tokens.append(token)
    if any_module and _Awaiting.hook is None:
        _Awaiting.hook = register_module_forward_pre_hook(_before_module)


@outside_of_graphs
def _before_module(module: nn.Module, args: Any) -> Any:
    given = with_tokens(args)
    return None if given is args else given


def with_tokens(values: Any) -> Any:
    """Arguments or results that depend on all numbers that wait for some; as they are where there are none."""
    if not _Awaiting.tokens or _Awaiting.num_open or not torch.is_grad_enabled() or in_backward():
        return values
    takes: list[Tensor] = []

    def note(value: Tensor) -> Tensor:
        if _may_depend(value):
            takes.append(value)
        return value

    converted(values, note)
    if not takes:
        return values
    tokens, _Awaiting.tokens = _Awaiting.tokens, []
    if _Awaiting.hook is not None:
        _Awaiting.hook.remove()
        _Awaiting.hook = None
    needs_all = not any(value.requires_grad for value in takes)

    def depend(value: Tensor) -> Tensor:
        if not _may_depend(value) or not (needs_all or value.requires_grad):
            return value
        return _Depend.apply(value, *tokens)

    return converted(values, depend)


def _may_depend(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


class _Depend(torch.autograd.Function):
    """A copy of a tensor that depends on some numbers, too. No view, for programs write to what they are given."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *tokens: Tensor) -> Tensor:
        ctx.tokens = [(token.device, token.dtype) for token in tokens]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros((), device=device, dtype=dtype) for device, dtype in ctx.tokens)


_frames = torch._C._dynamo.eval_frame
_AS_OBJECTS: Any = (
    torch._C.DisableTorchFunctionSubclass
)  # parameters, which the hooks ask for much, and compute nothing
_HOOK_ID = -1  # torch counts from 0
_AROUND = "_dshard_around"  # the module of a unit within which a checkpointed one lies
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
        _watch_regions(module)


def _watch_regions(module: nn.Module) -> None:
    """Have what checkpoints within a module run again find its parameters as they were in forward."""
    for wrapper in module.modules():
        if isinstance(wrapper, CheckpointWrapper):
            region: Any = wrapper._checkpoint_wrapped_module
            if not region.__dict__.keys() & {"_dshard_units", _AROUND}:
                region.__dict__[_AROUND] = module
                region._forward_pre_hooks[_HOOK_ID] = _before_again
                region._forward_hooks[_HOOK_ID] = _after_again
                region._forward_hooks_always_called[_HOOK_ID] = True


def unwatch(module: nn.Module) -> None:
    """Have the forwards of a module noticed no more."""
    for region in module.modules():
        if region.__dict__.get(_AROUND) is module:
            del region.__dict__[_AROUND]
            for hooks in (region._forward_pre_hooks, region._forward_hooks, region._forward_hooks_always_called):
                hooks.pop(_HOOK_ID, None)
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
        with _AS_OBJECTS():
            return _enter(module, args, kwargs, is_eager=callback is None)
    finally:
        _frames.set_eval_frame(callback)


def _enter(module: nn.Module, args: Any, kwargs: Any, *, is_eager: bool) -> tuple[Any, Any] | None:
    """A forward of a module starts; `is_eager` unless dynamo makes graphs of the frames that it calls."""
    units = _units_at(module)
    if units:
        model = units[0].model
        if model.split is not None:
            model.before_use()
            units = _units_at(module)
        if not model.forwards.num_running and not in_backward() and model.regions.open_label is None:
            begin_forward()
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
    if units:
        unshardings = units[0].model.get(Unshardings)
        unshardings.begin(module)
        for unit in units:
            unshardings.of(unit, module).open(is_eager=is_eager)
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
        with _AS_OBJECTS():
            return _exit(module, output)
    finally:
        _frames.set_eval_frame(callback)


def _unshardings_around(region: nn.Module) -> list[tuple[Unsharding, Unsharding]]:
    """Of a region that runs again, and of the module around it; none of what is compiled, which takes shards there."""
    if torch.compiler.is_compiling() or not in_backward():
        return []
    if region._compiled_call_impl or "_orig_mod" in region._modules:
        return []
    around = region.__dict__[_AROUND]
    found = []
    for unit in around.__dict__.get("_dshard_units", ()):
        unshardings = unit.model.get(Unshardings)
        found.append((unshardings.of(unit, region), unshardings.of(unit, around)))
    return found


def _before_again(region: nn.Module, args: Any) -> None:
    for own, around in _unshardings_around(region):
        callback = _frames.set_eval_frame(None)
        try:
            with _AS_OBJECTS():
                own.open_again(around, is_eager=callback is None)
        finally:
            _frames.set_eval_frame(callback)


def _after_again(region: nn.Module, args: Any, output: Any) -> None:
    for own, _ in _unshardings_around(region):
        with _AS_OBJECTS():
            own.close()


for _hook in (_before_forward, _after_forward, _before_again, _after_again):
    _frames.set_code_exec_strategy(
        _hook.__code__, _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
    )


def _exit(module: nn.Module, output: Any) -> Any:
    """A forward of a module ended, by a result or an exception."""
    units = _units_at(module)
    if units:
        unshardings = units[0].model.get(Unshardings)
        try:
            for unit in units:
                unshardings.of(unit, module).close()
        finally:
            unshardings.end(module)
            units[0].model.forwards.note_running(-1)
            for unit in units:
                unit.model.get(Runtime).exit_forward(unit, module)
    result = _cast_result(module, output)
    if not units or units[0].model.forwards.num_running:
        return result
    if output is not None:  # as after an exception
        units[0].model.get(Runtime).end_forward()
    given = output if result is None else result
    depending = with_tokens(given)
    return result if depending is given else depending


def _cast_result(module: nn.Module, output: Any) -> Any:
    casts = Casts.of(module)
    return None if casts is None else casts.cast_outputs(output)
