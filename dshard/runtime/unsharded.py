"""What a parameter is within its module's forward: its full tensor, which answers for it."""

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

_REQUIRES_GRAD: Any = torch.Tensor.requires_grad  # the descriptor
_make_subclass: Any = torch.Tensor._make_subclass


class UnshardedParameter(nn.Parameter):
    """The full tensor of a sharded parameter, in its place in `module._parameters` while the module's forward runs.

    Operations on it are torch's own, at their speed. What a program asks of the parameter and not of its values is
    answered by the sharded one: its gradient, hooks on it, `to_local()`, and attributes that somebody gave it.

    Attributes:
        sharded: The parameter.
    """

    __slotnames__: ClassVar[list[str]] = []
    sharded: Any

    @classmethod
    def of(cls, fulls: Sequence[Tensor], sharded: Sequence[Any]) -> "tuple[UnshardedParameter, ...]":
        """Those that share memory, and the counters of writes, with full tensors.

        Args:
            fulls: Gathered.
            sharded: Of each, the parameter.
        """
        made = tuple(map(_make_subclass, repeat(cls), fulls))
        for out, param in zip(made, sharded, strict=True):
            out.__dict__["sharded"] = param
        return made

    @property
    def data(self) -> Tensor:
        """The values outside of autograd, in the same memory; writes are counted, so that they reach the shards."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.data_ptr() != self.data_ptr() or value.shape != self.shape:  # else of `parameter.data *= mask`
            self.detach().copy_(value)

    @property
    def grad(self) -> Any:
        """That of the sharded parameter."""
        return self.sharded.grad

    @grad.setter
    def grad(self, value: Any) -> None:
        self.sharded.grad = value

    @property
    def requires_grad(self) -> bool:
        """Of the full tensor; to set it sets that of the sharded parameter, from the next forward on."""
        return bool(_REQUIRES_GRAD.__get__(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.sharded.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Of the sharded parameter, from the next forward on."""
        self.sharded.requires_grad_(requires_grad)
        return self

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """On the gradient of the sharded parameter, which is reduced."""
        return self.sharded.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """As of the sharded parameter."""
        return self.sharded.register_post_accumulate_grad_hook(hook)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The value, as a plain tensor. Communicates nothing.

        Args:
            grad_placements: Accepted for DTensor's sake; has no meaning here.
        """
        return self.view_as(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__dict__["sharded"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.sharded.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.sharded.__reduce_ex__(protocol)
