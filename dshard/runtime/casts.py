"""What modules take and give under mixed precision: floating-point tensors in the dtype that their weights have."""

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.rnn import PackedSequence

from dshard.errors import UnsupportedOpError
from dshard.policies import Precision, PrecisionRules
from dshard.tensor import ShardedTensor

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
        found: Casts | None = module.__dict__.get(_ATTRIBUTE)
        return found

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
    if isinstance(value, Mapping):
        return _with_items(value, _changed(value.items(), change))
    if isinstance(value, PackedSequence):  # a tuple that is not made of its items alone
        data = change(value.data)
        return value if data is value.data else PackedSequence(data, *value[1:])
    if isinstance(value, (list, tuple)):
        return _with_items(value, _changed(enumerate(value), change))
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
        casts = Casts(rest.param_dtype if rest.casts_inputs else None, rest.output_dtype)
        for module in modules if casts != Casts(None, None) else ():
            module.__dict__[_ATTRIBUTE] = casts
    for module in modules if rules.rules else ():
        _check_statistics_of(module)
    if any(rule is not rest for rule in rules.rules):
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
    if not isinstance(weight, ShardedTensor) or not isinstance(mean, Tensor) or weight.dtype == mean.dtype:
        return
    name = weight.name.removesuffix(".weight")
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
