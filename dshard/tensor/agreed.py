"""What a norm over sharded tensors is: a plain tensor, that also answers as the DTensor that FSDP2's users get."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class AgreedTensor(Tensor):
    """A plain tensor that is equal on all ranks, made by a reduction over sharded tensors.

    Programs written for FSDP2 ask such a value for its `full_tensor()`. What is computed of nothing else is one, too;
    beside a tensor of this rank it is any tensor.
    """

    @classmethod
    def of(cls, value: Tensor) -> Tensor:
        """A value that all ranks have alike."""
        return value.as_subclass(cls) if type(value) is Tensor else value

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The value, as a plain tensor. Communicates nothing."""
        return self.as_subclass(Tensor)

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """The value, all of which every rank holds. Communicates nothing."""
        return self.as_subclass(Tensor)

    def __format__(self, format_spec: str) -> str:
        return format(self.as_subclass(Tensor), format_spec)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        is_agreed = _are_agreed(args) and _are_agreed((kwargs or {}).values())
        return AgreedTensor.of(result) if is_agreed and isinstance(result, Tensor) else _plain(result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _are_agreed(values: Any) -> bool:
    """Whether all tensors in some arguments are equal on all ranks."""
    return all(
        _are_agreed(value)
        if isinstance(value, (list, tuple))
        else isinstance(value, AgreedTensor) or not isinstance(value, Tensor)
        for value in values
    )


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, AgreedTensor) else value
