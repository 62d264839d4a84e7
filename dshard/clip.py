"""Gradient clipping over sharded and plain parameters together."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dshard import collectives
from dshard.collectives import ReduceOp, ShardGroup
from dshard.errors import DivergenceError
from dshard.tensor import ShardedTensor
from dshard.tensor.agreed import AgreedTensor
from dshard.tensor.inner import distinct_groups

__all__ = ["clip_grad_norm_", "on_clip"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of all parameters together so that their norm is at most `max_norm`.

    The parts of the norm are added in fp64, so that it hardly depends on how the gradients are cut.

    Args:
        parameters: Sharded parameters, plain ones, or both; those without a gradient are skipped. Gradients of plain
            parameters must be equal on all ranks.
        max_norm: Largest norm to leave.
        norm_type: Order of the norm, above 0; `inf` for the largest absolute value.
        error_if_nonfinite: Raise, on every rank alike, if the norm is infinite or NaN.

    Returns:
        The norm of the full gradients before clipping: a 0-d tensor, fp64 if a gradient is and else fp32, equal on all
            ranks; its `full_tensor()` is itself.

    Raises:
        DivergenceError: The norm is not finite and `error_if_nonfinite` is set; or ranks that share a gradient came to
            different norms, because their other parameters differ.
        ValueError: `norm_type` is not above 0.

    Communicates:
        One all-reduce of 8 bytes for each process group that holds some of the parameters (for DTensor parameters one
        more along each dim that cuts them); where there are several groups, another one of 16 bytes for each, to
        compare the norms.

    Source: `torch.nn.utils.clip_grad_norm_`, whose rule and epsilon it follows.
    """
    order = float(norm_type)
    if order <= 0:
        raise ValueError(f"clip_grad_norm_: norm_type must be above 0, but it is {norm_type}. Pass 2.0 or inf.")
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in params if p.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    for hear in _LISTENERS:
        hear(params, float(max_norm), order)
    total = _total_norm(grads, order)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise DivergenceError(
            f"clip_grad_norm_: the norm of the gradients must be finite, but it is {total.item()}. Skip the step, "
            "lower the learning rate, or look for a bad batch."
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad)
    for where, part in by_device.items():
        torch._foreach_mul_(part, factor.to(where))
    return total


_LISTENERS: list[Callable[[Sequence[Tensor], float, float], None]] = []


@contextmanager
def on_clip(hear: Callable[[Sequence[Tensor], float, float], None]) -> Iterator[None]:
    """Have a function called with parameters, largest norm and order ahead of each clipping."""
    _LISTENERS.append(hear)
    try:
        yield
    finally:
        _LISTENERS.remove(hear)


def _total_norm(grads: Sequence[Tensor], order: float) -> Tensor:
    """The norm of all gradients together, from parts that add up (or, for `inf`, compare) over the ranks."""
    device = grads[0].device
    whole: list[Tensor] = []
    cut: dict[tuple[int, ...], tuple[list[ShardGroup], list[Tensor]]] = {}
    for grad in grads:
        if not isinstance(grad, ShardedTensor):
            whole.append(grad.full_tensor() if isinstance(grad, DTensor) else grad)
        elif grad.is_view or not (groups := distinct_groups(grad)):
            whole.append(grad.materialize())
        else:
            key = tuple(id(group.process_group) for group in groups)
            cut.setdefault(key, (groups, []))[1].append(grad._cell.resolve())
    parts = [_part(whole, order, device)]
    for groups, shards in cut.values():
        op = ReduceOp.MAX if order == float("inf") else ReduceOp.SUM
        part = _part(shards, order, torch.device(groups[0].device_type))
        for group in groups:
            part = collectives.all_reduce([part], group, op, label="clip_grad_norm_").wait()[0]
        parts.append(part.to(device))
    together = torch.stack(parts)
    norm = together.amax() if order == float("inf") else together.sum().pow(1.0 / order)
    if len(cut) > 1:
        every = {id(group.process_group): group for groups, _ in cut.values() for group in groups}
        _check_agreement(norm, list(every.values()))
    return AgreedTensor.of(norm.to(torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32))


def _check_agreement(norm: Tensor, groups: Sequence[ShardGroup]) -> None:
    """Raise, on every rank of a group, if its ranks found different norms and would scale one gradient differently."""
    found = []
    for group in groups:  # all of them ahead of an error: the ranks of a later group wait for this one
        mine = torch.stack([norm, -norm]).to(group.device_type)
        found.append(collectives.all_reduce([mine], group, ReduceOp.MAX, label="clip_grad_norm_").wait()[0].tolist())
    for most, least in found:
        if most + least > 1e-9 * abs(most):
            raise DivergenceError(
                f"clip_grad_norm_: all ranks that share a gradient must scale it alike, but their norms are between "
                f"{-least:.6g} and {most:.6g}, because they differ in the other parameters that were passed. Clip the "
                "parameters of each mesh by themselves."
            )


def _part(tensors: Sequence[Tensor], order: float, device: torch.device) -> Tensor:
    """What some tensors of this rank add to the norm: a sum of powers in fp64, or the largest absolute value."""
    tensors = [t for t in tensors if t.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack([torch.linalg.vector_norm(t, order, dtype=_wide(t)).abs().to(device) for t in tensors])
    return norms.amax() if order == float("inf") else norms.pow(order).sum()


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
