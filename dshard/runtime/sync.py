"""Do the ranks start from the same weights?"""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from dshard import collectives
from dshard.collectives import ReduceOp, ShardGroup
from dshard.errors import DivergenceError

__all__ = ["broadcast_weights", "check_same_structure", "check_same_weights"]

_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_same_structure(tensors: Sequence[tuple[str, Tensor]], group: ShardGroup) -> None:
    """Raise on every rank unless all hold tensors of the same names, shapes and dtypes.

    Communicates:
        An all-reduce of 16 bytes.
    """
    text = ";".join(f"{name}:{tuple(t.shape)}:{t.dtype}:{t.requires_grad}" for name, t in tensors)
    crc = torch.tensor([zlib.crc32(text.encode())], dtype=torch.int64, device=group.device_type)
    if not _agree(crc, group, "structure check")[0]:
        raise DivergenceError(
            "fully_shard: all ranks must pass the same parameters, but names, shapes, dtypes or requires_grad differ "
            f"between ranks (this rank has {len(tensors)} parameters). Build the same model on every rank."
        )


def check_same_weights(tensors: Sequence[tuple[str, Tensor]], group: ShardGroup) -> None:
    """Raise on every rank, naming the parameters, unless all hold the same values; meta tensors have none.

    Communicates:
        An all-reduce of 32 bytes per tensor.
    """
    real = [(name, t) for name, t in tensors if not t.is_meta]
    if not real or group.num_ranks == 1:
        return
    sums = torch.stack([_checksum(t) for _, t in real]).to(group.device_type)
    same = _agree(sums.view(-1), group, "weight check").view(sums.shape).all(1).tolist()
    differing = [name for (name, _), ok in zip(real, same, strict=True) if not ok]
    if differing:
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise DivergenceError(
            "fully_shard: all ranks must start from the same weights, but these differ between ranks: "
            f"{', '.join(differing[:5])}{more}. Seed every rank alike before building the model, or pass "
            'sync="broadcast" to take those of rank 0.'
        )


def _agree(values: Tensor, group: ShardGroup, label: str) -> Tensor:
    """Which of some int64 values are equal on all ranks, equal on all ranks."""
    both = torch.stack([values, ~values])  # max(~x) == ~min(x)
    high = collectives.all_reduce([both], group, ReduceOp.MAX, label=label).wait()[0]
    return high[0] == ~high[1]


def _checksum(tensor: Tensor) -> Tensor:
    """Two int64 sums over the bits, one of them by position; no temporary of the tensor's own size."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    bits = tensor.contiguous().view(_INT_OF_SIZE[tensor.element_size()]).reshape(-1)
    width = max(1, int(bits.numel() ** 0.5))
    body = bits[: bits.numel() // width * width].view(-1, width)
    rows, columns = body.sum(1, dtype=torch.int64), body.sum(0, dtype=torch.int64)
    tail = bits[body.numel() :].sum(dtype=torch.int64)
    by_row = (rows * torch.arange(1, rows.numel() + 1, device=rows.device)).sum()
    by_column = (columns * torch.arange(1, columns.numel() + 1, device=columns.device)).sum()
    return torch.stack([by_row + tail, by_column - tail])


def broadcast_weights(tensors: Sequence[Tensor], group: ShardGroup) -> None:
    """Overwrite the weights of all ranks by those of the group's rank 0; meta tensors have none.

    Communicates:
        A broadcast of each tensor's bytes, one tensor at a time.
    """
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_meta or not tensor.numel():
                continue
            wire = tensor.to(group.device_type)
            agreed = collectives.broadcast([wire], group, label="weights").wait()[0]
            tensor.copy_(agreed)
