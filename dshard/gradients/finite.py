"""Where NaN and infinity come from: which rank's own gradient had them first, ahead of the sum that hides it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dshard import collectives
from dshard.agreement import of_all_ranks
from dshard.collectives import ReduceOp, ShardGroup
from dshard.errors import DivergenceError


class FiniteCheck:
    """Looks at the gradients of a backward before they are reduced, without waiting for a device until it ends."""

    def __init__(self) -> None:
        self._found: list[tuple[str, int, Tensor]] = []

    def note(self, name: str, grad: Tensor) -> None:
        """Take this rank's gradient of a parameter."""
        values = grad.to_local() if hasattr(grad, "to_local") else grad
        self._found.append((name, values.numel(), values.numel() - torch.isfinite(values).sum()))

    def forget(self) -> None:
        """Drop what a backward that raised has left behind."""
        self._found = []

    def settle(self, groups: Sequence[ShardGroup]) -> None:
        """Raise, on every rank alike, unless all gradients since the last time were finite on all ranks.

        Raises:
            DivergenceError: They were not; names for each rank the first that was not.

        Communicates:
            For each group an all-reduce of 8 bytes; if they were not, one of 160 bytes per rank.
        """
        found, self._found = self._found, []
        counts = torch.stack([count for _, _, count in found]).tolist() if found else []
        own = [f"{name} ({n} of {size} values)" for (name, size, _), n in zip(found, counts, strict=True) if n]
        texts: list[str] = []
        for group in groups:
            flag = torch.tensor([len(own)], dtype=torch.int64, device=group.device_type)
            label = "whether gradients are finite"
            if int(collectives.all_reduce([flag], group, ReduceOp.MAX, label=label, everywhere=True).wait()[0]):
                said = of_all_ranks(own[0] if own else "", group)
                texts += [f"on rank {rank} that of {text}" for rank, text in enumerate(said) if text != "nothing"]
        if texts:
            more = f" and {len(texts) - 4} more ranks" if len(texts) > 4 else ""
            raise DivergenceError(
                "backward: the gradients of every rank must be finite, but the first that are not are "
                f"{', '.join(dict.fromkeys(texts[:4]))}{more}, before any sum over the ranks. Look at the batch and "
                "the loss there; the optimizer has not stepped."
            )
