"""Gradients whose reduction was put off: may they be used ahead of it?"""

from collections.abc import Sequence

import torch

from dshard import collectives
from dshard.collectives import ReduceOp, ShardGroup
from dshard.errors import StateError


def check_same_gradients(presence: Sequence[tuple[ShardGroup, list[tuple[str, bool]]]], what: str, way: str) -> None:
    """Raise, on every rank alike, unless all ranks have gradients of the same parameters.

    Where some ranks alone have used a parameter, the others do not know of its gradient before the reduction: they
    would leave it out of a norm or a step.

    Args:
        presence: For each reduction, in the order of all ranks, its ranks, and of each parameter the name and whether
            its gradient is here.
        what: Was put off, for the message.
        way: Out of it, for the message.

    Raises:
        StateError: They have not.

    Communicates:
        All-reduces of two bytes per parameter, for each mesh.
    """
    by_group: dict[str, tuple[ShardGroup, list[tuple[str, bool]]]] = {}
    for group, held in presence:
        by_group.setdefault(group.full_name, (group, []))[1].extend(held)
    differing: list[str] = []
    for group, found in by_group.values():
        has = torch.tensor([held for _, held in found], dtype=torch.uint8, device=group.device_type)
        label = f"which of {len(found)} gradients are there"
        some, none = collectives.all_reduce(
            [torch.stack([has, 1 - has])], group, ReduceOp.MAX, label=label, everywhere=True
        ).wait()[0]
        differs = (some * none).tolist()
        differing += [name for (name, _), is_apart in zip(found, differs, strict=True) if is_apart]
    if differing:
        others = f", nor of {len(differing) - 1} other parameters" if differing[1:] else ""
        raise StateError(
            f"{differing[0]}: a gradient can be used ahead of its {what} if all ranks have one, but some have none "
            f"yet{others}. {way}"
        )
