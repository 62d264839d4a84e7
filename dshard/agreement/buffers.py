"""Buffers: plain tensors that the ranks may have to agree on."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dshard import collectives
from dshard.agreement.weights import check_same_structure, check_same_weights
from dshard.collectives import ShardGroup


def _named_buffers(modules: Sequence[nn.Module]) -> list[tuple[str, Tensor]]:
    found = {id(b): (name, b) for module in modules for name, b in module.named_buffers()}
    return [(name, b) for name, b in found.values() if not b.is_meta and b.numel()]


def check_buffers(modules: Sequence[nn.Module], group: ShardGroup) -> None:
    """Raise on every rank, naming the buffers, unless all hold the same values.

    Communicates:
        An all-reduce of 16 bytes, and one of 16 bytes per buffer.
    """
    found = _named_buffers(modules)
    check_same_structure(found, group)
    check_same_weights(found, group)


def broadcast_buffers(modules: Sequence[nn.Module], group: ShardGroup) -> None:
    """Overwrite all buffers by those of the group's rank 0.

    Communicates:
        One broadcast for each dtype among the buffers, of their bytes.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for _, buffer in _named_buffers(modules):
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    with torch.no_grad():
        for part in by_dtype.values():
            wire = [b.to(group.device_type) for b in part]
            agreed = collectives.broadcast(wire, group, label="buffers", everywhere=True).wait()
            for buffer, value in zip(part, agreed, strict=True):
                buffer.copy_(value)
