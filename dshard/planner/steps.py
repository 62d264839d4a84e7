"""A forward and backward of any model: its arguments, its loss, and the order of both halves."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter, tree_map_only

from dshard.arguments import call_given
from dshard.errors import ArgumentError, StateError


@dataclass(frozen=True, slots=True)
class Part:
    """Modules that are gathered together: a unit of the plan to be.

    Args:
        label: Name of it.
        modules: In whose forward it is in use; those of several parts may hold one another.
        params: Full names of its parameters.
    """

    label: str
    modules: tuple[nn.Module, ...]
    params: tuple[str, ...]


@contextmanager
def swapped(model: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[dict[int, Tensor]]:
    """Swap all parameters and buffers for others within the block; shared ones stay shared, shared modules too.

    Not `torch.func.functional_call`: of a module that has several names it puts back what it swapped in.

    Args:
        model: Any module.
        change: Gives the other one of a parameter or buffer.

    Yields:
        The others, by the identity of what they stand for.
    """
    others: dict[int, Tensor] = {}
    kept: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for module in model.modules():
            slots: list[Any] = [module._parameters, module._buffers]
            for slot in slots:
                for name, value in slot.items():
                    if value is not None:
                        kept.append((slot, name, value))
                        if id(value) not in others:
                            others[id(value)] = change(value)
                        slot[name] = others[id(value)]
        yield others
    finally:
        for slot, name, value in kept:
            slot[name] = value


def parts_by_module(model: nn.Module, parts: Sequence[Part]) -> dict[nn.Module, int]:
    """Of each module whose forward is followed, the number of its part; the model itself stands for no part but all."""
    found = {module: i for i, part in enumerate(parts) for module in part.modules}
    if len(parts) > 1:
        found.pop(model, None)
    return found


@contextmanager
def following(
    part_of: Mapping[nn.Module, int], enter: Callable[[int], None], leave: Callable[[int, Any], None]
) -> Iterator[None]:
    """Call a function before each forward of a part's modules within the block, and one after it with its output.

    Not for blocks that run again in backward: those belong to their node of autograd.
    """

    def before(module: nn.Module, _: Any) -> None:
        if torch._C._current_autograd_node() is None:
            enter(part_of[module])

    def after(module: nn.Module, _: Any, output: Any) -> None:
        if torch._C._current_autograd_node() is None:
            leave(part_of[module], output)

    handles = [module.register_forward_pre_hook(before, prepend=True) for module in part_of]
    handles += [module.register_forward_hook(after, always_call=True) for module in part_of]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_step(
    model: nn.Module, sample: Any, loss_of: Callable[[Any], Tensor] | None, begin_backward: Callable[[], None]
) -> None:
    """A forward and a backward.

    Args:
        model: The model.
        sample: A tensor, a tuple of arguments, or a dict by name.
        loss_of: Loss of an output; None for `loss_in`.
        begin_backward: Called between the two.

    Raises:
        StateError: There is nothing to go backward from.
    """
    args, kwargs = arguments(sample)
    output = model(*args, **kwargs)
    loss = call_given("plan", "loss_of", loss_of, output) if loss_of is not None else loss_in(output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ArgumentError(
            f"plan: loss_of must return a tensor of one element, but it returned {given}. Pass one that does, as in "
            "lambda output: output.float().mean()."
        )
    del output  # a training loop holds it no longer either
    if not loss.requires_grad:
        raise StateError("plan: the model's output must need gradients, but it does not. Pass loss_of=.")
    begin_backward()
    loss.backward()


def arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a sample: a tensor, a tuple of arguments, or a dict by name."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)), {}


def tensors(tree: Any) -> Iterator[Tensor]:
    """All tensors in a nest of containers."""
    return (each for each in tree_iter(tree) if isinstance(each, Tensor))


def pieces_of(value: Tensor) -> list[Tensor]:
    """What a tensor holds on this rank: of a DTensor its part, of a plain one itself."""
    if not is_traceable_wrapper_subclass(value):
        return [value]
    names, _ = value.__tensor_flatten__()
    held = (getattr(value, name) for name in names)
    return [piece for each in held if isinstance(each, Tensor) for piece in pieces_of(each)]


def is_cut(value: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which each rank has a part; told by what it has, for this is no part of it."""
    return is_traceable_wrapper_subclass(value) and hasattr(value, "placements")


def shape_of(value: Tensor) -> tuple[int, ...]:
    """The shape of what the rank that has most has of a DTensor; any other tensor's own."""
    cut: Any = value
    shape = list(value.shape)
    for dim, placement in enumerate(cut.placements if is_cut(value) else ()):
        if placement.is_shard():
            shape[placement.dim] = -(-shape[placement.dim] // cut.device_mesh.size(dim))
    return tuple(shape)


def loss_in(output: Any) -> Tensor:
    """The loss in an output, or the sum of what is floating-point in it."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tree = dict(output) if isinstance(output, Mapping) else output
    values = [each for each in tensors(tree) if each.requires_grad]
    if not values:
        raise StateError("plan: the model's output must need gradients, but it does not. Pass loss_of=.")
    if len(values) == 1 and values[0].numel() == 1:
        return values[0]
    total = values[0].sum()
    for each in values[1:]:
        total = total + each.sum()
    return total


def resized(sample: Any, old: int, new: int, *, is_real: bool) -> Any:
    """A sample with another number of rows in each tensor that has as many as the batch."""
    if old == new:
        return sample

    def resize(tensor: Tensor) -> Tensor:
        if not tensor.ndim or tensor.shape[0] != old:
            return tensor
        if not is_real:
            return torch.empty((new, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
        return tensor.repeat(-(-new // old), *[1] * (tensor.ndim - 1))[:new]

    return tree_map_only(Tensor, resize, sample)
