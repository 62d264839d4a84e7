"""What makes a backward come to a region (`dshard.run_by_some`) also on ranks where nothing depends on it.

Each region gives a number that is zero, by a node of autograd's. What the next module takes is made to depend on it, or
what the model gives: so a backward that comes from there comes to the region, on all ranks alike.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dshard.autograd import in_backward
from dshard.compiling import outside_of_graphs
from dshard.runtime.casts import converted


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
        depending: Tensor = _Depend.apply(value, *tokens)
        return depending

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
