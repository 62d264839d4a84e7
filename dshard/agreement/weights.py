"""Do the ranks start from the same weights?"""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from dshard import collectives
from dshard.collectives import ReduceOp, ShardGroup
from dshard.errors import DivergenceError
from dshard.tensor.subclass_shards import exact_values

_CHUNK = 1 << 14  # most elements whose products with their weights are in memory at a time
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd multiplier that spreads small numbers over all bits
_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_same_structure(tensors: Sequence[tuple[str, Tensor]], group: ShardGroup) -> None:
    """Raise on every rank unless all hold tensors of the same names, shapes and dtypes.

    Communicates:
        An all-reduce of 16 bytes.
    """
    text = ";".join(f"{name}:{tuple(t.shape)}:{t.dtype}:{t.requires_grad}" for name, t in tensors)
    crc = torch.tensor([zlib.crc32(text.encode())], dtype=torch.int64, device=group.device_type)
    if not agree(crc, group, "structure check")[0]:
        raise DivergenceError(
            "fully_shard: all ranks must pass the same parameters, but names, shapes, dtypes or requires_grad differ "
            f"between ranks (this rank has {len(tensors)} parameters). Build the same model on every rank."
        )


def check_same_weights(tensors: Sequence[tuple[str, Tensor]], group: ShardGroup) -> None:
    """Raise on every rank, naming the parameters, unless all hold the same values; meta tensors have none.

    Communicates:
        An all-reduce of 16 bytes per tensor.
    """
    real = [(name, t) for name, t in tensors if not t.is_meta]
    if not real or group.world_size == 1:
        return
    sums = torch.stack([checksum(exact_values(t, name)) for name, t in real]).to(group.device_type)
    same = agree(sums, group, "weight check").tolist()
    differing = [name for (name, _), ok in zip(real, same, strict=True) if not ok]
    if differing:
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise DivergenceError(
            "fully_shard: all ranks must start from the same weights, but these differ between ranks: "
            f"{', '.join(differing[:5])}{more}. Seed every rank alike before building the model, or pass "
            'sync="broadcast" to take those of rank 0.'
        )


def agree(values: Tensor, group: ShardGroup, label: str) -> Tensor:
    """Which of some int64 values are equal on all ranks, equal on all ranks."""
    both = torch.stack([values, ~values])  # max(~x) == ~min(x)
    high = collectives.all_reduce([both], group, ReduceOp.MAX, label=label, everywhere=True).wait()[0]
    return high[0] == ~high[1]


def checksum(tensor: Tensor) -> Tensor:
    """An int64 sum over the bits of a tensor, each element weighted by its place; a 0-d tensor on its device."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    bits = tensor.contiguous().view(_INT_OF_SIZE[tensor.element_size()]).reshape(-1)
    size = min(_CHUNK, max(256, bits.numel() // 8))  # with less work space than the tensor itself takes
    places = torch.arange(1, min(bits.numel(), size) + 1, device=bits.device)
    weights = places * _ODD ^ (places * _ODD >> 15)  # wraps around; what matters is that no two places weigh alike
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for k, chunk in enumerate(bits.split(size)):
        total += (chunk * weights[: chunk.numel()]).sum() * (2 * k + 1)
    return total


def broadcast_weights(tensors: Sequence[tuple[str, Tensor]], group: ShardGroup) -> None:
    """Overwrite the weights of all ranks by those of the group's rank 0; meta tensors have none.

    Communicates:
        A broadcast of each tensor's bytes, one tensor at a time.
    """
    with torch.no_grad():
        for name, tensor in tensors:
            if tensor.is_meta or not tensor.numel():
                continue
            wire = exact_values(tensor, name).to(group.device_type)
            agreed = collectives.broadcast([wire], group, label="weights", everywhere=True).wait()[0]
            tensor.copy_(agreed)
