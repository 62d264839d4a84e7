"""Parameters under mixed precision: what they are for torch's functions in a forward."""

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from dshard.tensor.sharded_tensor import SHARDED, ShardedTensor
from dshard.tensor.traced_meta import GRAD

_OFF: Any = torch._C._disabled_torch_function_impl
_ABOUT_THE_OBJECT = frozenset(
    {
        "__get__",
        "__set__",
        "__delete__",
        "__hash__",
        "__deepcopy__",
        "__reduce_ex__",
        "_is_view",
        "backward",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "requires_grad_",
    }
)


@cache
def _num_kept(func: Callable[..., Any]) -> int | None:
    """How many of its first arguments a function takes as objects, to read or write them; None for all."""
    name = getattr(func, "__name__", "")
    if name in _ABOUT_THE_OBJECT:
        return None
    writes = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    return 1 if writes or (name.startswith("__i") and name.endswith("__") and name != "__invert__") else 0


def _in_compute_dtype(value: Any) -> Any:
    """An argument with what parameters are in the forward that is running in their place."""
    if isinstance(value, MixedShardedTensor):
        return torch.ops.aten.alias.default(value) if value.compute_dtype() is not None else value
    if isinstance(value, (list, tuple)) and any(isinstance(v, MixedShardedTensor) for v in value):
        return type(value)([_in_compute_dtype(v) for v in value])
    return value


class MixedShardedTensor(ShardedTensor):
    """A sharded parameter with a compute dtype of its own.

    Torch checks dtypes by what the object was made with, which is the dtype that the parameter is kept in, ahead of any
    dispatch; and autograd saves the object. So in a forward torch's functions get a view of it in the compute dtype. At
    all other times they are as fast as with any other tensor: the class asks for their calls only while a forward runs.
    """

    __slotnames__: ClassVar[list[str]] = ShardedTensor.__slotnames__  # which `swap_tensors` reads of the very class
    _num_forwards: ClassVar[int] = 0
    __torch_function__ = _OFF

    @classmethod
    def _in_forward(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            num_kept = _num_kept(func)
            if num_kept is not None:
                args = (*args[:num_kept], *map(_in_compute_dtype, args[num_kept:]))
                kwargs = {k: _in_compute_dtype(v) for k, v in (kwargs or {}).items()}
            result: Tensor = func(*args, **(kwargs or {}))
            return result


def note_forward(num_running: int) -> None:
    """Forwards of modules under mixed precision began, or ended: the change in their number, in this process."""
    before = MixedShardedTensor._num_forwards
    now = MixedShardedTensor._num_forwards = max(0, before + num_running)
    if (before > 0) != (now > 0):
        MixedShardedTensor.__torch_function__ = MixedShardedTensor._in_forward if now else _OFF
        if now:
            MixedShardedTensor.grad = GRAD
        else:
            del MixedShardedTensor.grad


def is_in_mixed_forward() -> bool:
    """Whether a forward of a module under mixed precision runs in this process."""
    return MixedShardedTensor._num_forwards > 0


SHARDED.add(MixedShardedTensor)
