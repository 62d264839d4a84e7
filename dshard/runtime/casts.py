"""What modules take and give under mixed precision: floating-point tensors in the dtype that their weights have."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.utils import _apply_to_tensors

from dshard.policies import Precision, PrecisionRules
from dshard.tensor import ShardedTensor

_ATTRIBUTE = "_dshard_casts"


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
        return _converted(args, self.inputs), _converted(kwargs, self.inputs)

    def cast_outputs(self, output: Any) -> Any:
        """A result as the module gives it."""
        return _converted(output, self.outputs)


def _converted(value: Any, dtype: torch.dtype | None) -> Any:
    """`value` with all floating-point tensors in it, however nested, in another dtype."""
    if dtype is None:
        return value
    if isinstance(value, Tensor):
        return _to(dtype, value)
    return _apply_to_tensors(partial(_to, dtype), value)


def _to(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


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
    if any(rule is not rest for rule in rules.rules):
        for module in modules:
            _cast_parts(module, rest.param_dtype if rest is not None else None, watch)


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
