"""Gradient clipping over sharded and plain parameters together."""

from collections.abc import Iterable

import torch
from torch import Tensor

from dshard.errors import DivergenceError

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of all parameters together so that their norm is at most `max_norm`.

    Args:
        parameters: Sharded parameters, plain ones, or both; those without a gradient are skipped. Gradients of plain
            parameters must be equal on all ranks.
        max_norm: Largest norm to leave.
        norm_type: Order of the norm; `inf` for the largest absolute value.
        error_if_nonfinite: Raise, on every rank alike, if the norm is infinite or NaN.

    Returns:
        The norm before clipping: a plain 0-d tensor, equal on all ranks, of the full gradients.

    Raises:
        DivergenceError: The norm is not finite and `error_if_nonfinite` is set.

    Communicates:
        One all-reduce of 4 bytes per sharded gradient, for each process group and dtype.

    Source: `torch.nn.utils.clip_grad_norm_`, whose rule and epsilon it follows.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in params if p.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    device = grads[0].device
    norms = torch._foreach_norm(grads, norm_type)
    total = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]), norm_type)
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
