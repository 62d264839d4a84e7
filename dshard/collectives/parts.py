"""Parts of bytes from every rank to every other."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dshard.collectives import _c10d
from dshard.collectives.group import Handle, ShardGroup
from dshard.collectives.trace import record


def all_to_all(parts: Sequence[Tensor], sizes: Sequence[int], group: ShardGroup, *, label: str) -> Handle[list[Tensor]]:
    """Send a part to each rank of a group, and receive one of each, by the backend's own all-to-all.

    Args:
        parts: For each rank, shape (bytes,), uint8; may be empty. On any device.
        sizes: Bytes that each rank sends to this one.
        group: The ranks.
        label: What it is for.

    Returns:
        A handle whose result is what each rank has sent, shape (bytes,), on the host.

    Communicates:
        An all-to-all of the parts' bytes.
    """
    if group.num_ranks == 1:
        return Handle(label, [], lambda: [part.cpu() for part in parts])
    sent = torch.cat([part.to(group.device_type) for part in parts])
    out = torch.empty(sum(sizes), dtype=torch.uint8, device=group.device_type)
    sent_sizes = [part.numel() for part in parts]
    work = _c10d.all_to_all_flat(out, sent, list(sizes), sent_sizes, group.process_group)
    record("all_to_all", label, group, sent.numel() - sent_sizes[group.rank], 0, 0)
    return Handle(label, [work], lambda: list(out.cpu().split(list(sizes))), group=group)
