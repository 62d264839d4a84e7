"""Full values of many tensors, one after the other."""

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from dshard.autograd.modes import outside_autograd
from dshard.errors import StateError
from dshard.tensor import ShardedTensor
from dshard.tensor.tp_layout import whole

_SLACK_BYTES = 1 << 12  # of memory beyond a full value that is not worth a copy


def full_values(tensors: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The full value of each tensor, plain and the caller's own.

    Tensors are gathered by themselves, not their units: no unit changes its state, and nothing is alive but the value
    that is given and, while that is made, what the caller still holds of the one before.

    Args:
        tensors: By name, the same on every rank.

    Raises:
        DivergenceError: The ranks are at different tensors. On every rank alike.

    Communicates:
        An all-gather for each tensor that is cut.
    """
    for name, tensor in tensors:
        with outside_autograd():
            full = _own_full_value(tensor)
        yield name, full
        del full


def _own_full_value(tensor: Tensor) -> Tensor:
    """The full value in memory of its own, no larger than it needs."""
    if not isinstance(tensor, ShardedTensor):
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
    if tensor.is_view or tensor.pinned_copy() is not None:
        return tensor.materialize().clone()
    full = whole(tensor.gathered_alone()).detach()
    is_own = tensor.shard_layout.dim is not None and tensor.shard_group.num_ranks > 1 and tensor.origin is None
    is_tight = full.untyped_storage().nbytes() <= full.nbytes + _SLACK_BYTES
    return full if is_own and is_tight else full.clone()


def refuse_meta(who: str, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Raise if some tensors have no values."""
    on_meta = [name for name, tensor in tensors if tensor.is_meta]
    if on_meta:
        raise StateError(
            f"{who}: needs values, but {on_meta[0]} and {len(on_meta) - 1} more are on the meta device. Initialize or "
            "load them first."
        )
