"""Where everything lies in the memory of a gathered bucket."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dshard.collectives.plan import GatherPlan


@dataclass(frozen=True, slots=True)
class Places:
    """Where a plan puts everything in the memory of a bucket."""

    fulls: list[Tensor]  # the full tensors
    slots: list[Any]  # the place of each packed tensor, shape (num_ranks, slot), where that is its memory; else None
    values: Tensor | None  # all of it, flat; on a direct backend, else None
    rows: Tensor | None  # the packed rows of all ranks, shape (num_ranks, row); on a direct backend, else None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that share the memory."""
        return tuple(t for t in (*self.fulls, *self.slots, self.values, self.rows) if t is not None)

    @classmethod
    def of(cls, plan: GatherPlan, memory: Tensor) -> "Places":
        """Cut the memory of a bucket; each full tensor has a version counter of its own."""
        values, num_ranks = memory.view(plan.dtype), plan.bucket.num_ranks
        regions = torch.unsafe_split_with_sizes(values, plan.regions)
        fulls = [
            torch.as_strided(region, layout.shape, stride)
            for region, layout, stride in zip(regions, plan.bucket.layouts, plan.strides, strict=False)
        ]
        slots = [
            torch.as_strided(regions[i], (num_ranks, size), (size, 1)) if is_front else None
            for i, size, is_front in zip(plan.packed, plan.row.slot_sizes, plan.in_front, strict=True)
        ]
        if len(regions) == len(fulls):
            return cls(fulls, slots, None, None)
        return cls(fulls, slots, values, regions[-1].view(num_ranks, -1))
