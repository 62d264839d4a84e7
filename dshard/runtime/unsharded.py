"""What a parameter is within its module's forward: its full tensor, which answers for it."""

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from dshard.tensor.meshes import TPShardLayout
from dshard.tensor.sharded_tensor import SHARDED

_REQUIRES_GRAD: Any = torch.Tensor.requires_grad  # the descriptor
_make_subclass: Any = torch.Tensor._make_subclass


class Unsharded:
    """The full tensor of a sharded parameter, in its place in `module._parameters` while the module's forward runs.

    Operations on it are torch's own. What a program asks of the parameter and not of its values is
    answered by the sharded one: its gradient, hooks on it, and attributes that somebody gave it.

    Attributes:
        sharded: The parameter.
    """

    sharded: Any
    detach: Callable[[], Tensor]  # a tensor's own, as all else that is asked of it here

    @property
    def data(self) -> Tensor:
        """The values outside of autograd, in the same memory; writes are counted, so that they reach the shards."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        own = self.detach()
        if _memory_of(value) != _memory_of(own) or value.shape != own.shape:  # else of `parameter.data *= mask`
            own.copy_(value)

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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__dict__["sharded"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.sharded.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.sharded.__reduce_ex__(protocol)


def _memory_of(tensor: Any) -> int:
    return int((tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr())


class UnshardedParameter(Unsharded, nn.Parameter):
    """That of a parameter which data parallelism alone cuts: a plain tensor."""

    __slotnames__: ClassVar[list[str]] = []

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The value, as a plain tensor. Communicates nothing.

        Args:
            grad_placements: Accepted for DTensor's sake; has no meaning here.
        """
        return self.view_as(self)


class UnshardedDTensor(Unsharded, DTensor):
    """That of a parameter which lies over the mesh of tensor parallelism, too: a DTensor over it.

    Its operations are dispatched in Python, where torch dispatches those of a DTensor in C++.
    """

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """As a DTensor. Beside ShardedTensors they are to dispatch, which torch would ask in the order of arguments."""
        if SHARDED.isdisjoint(types):
            return super().__torch_dispatch__(func, types, args, kwargs)
        args, kwargs = tree_map_only(UnshardedDTensor, _of_torchs_class, (args, kwargs or {}))
        return func(*args, **kwargs)


def _of_torchs_class(full: Any) -> DTensor:
    return DTensor(full._local_tensor, full._spec, requires_grad=False)


def unsharded(fulls: Sequence[Tensor], sharded: Sequence[Any]) -> tuple[Any, ...]:
    """Make what stands in the place of parameters. It shares the memory of full tensors.

    Args:
        fulls: Gathered.
        sharded: Of each, the parameter.
    """
    if TPShardLayout.num_made:
        made = tuple(map(_of_any_kind, fulls))
    else:
        made = tuple(map(_make_subclass, repeat(UnshardedParameter), fulls))
    for out, param in zip(made, sharded, strict=True):
        out.__dict__["sharded"] = param
    return made


def _of_any_kind(full: Any) -> Any:
    if type(full) is not DTensor:
        return _make_subclass(UnshardedParameter, full)
    with torch.inference_mode(mode=False):  # else nobody would count the writes to it
        made: Any = DTensor.__new__(UnshardedDTensor, full._local_tensor, full._spec, requires_grad=False)
    made._is_param = True  # by which torch tells parameters that are of other classes
    return made
