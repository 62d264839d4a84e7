"""Models of which a step is traced."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dshard.cli.models import GPT, GPTConfig
from dshard.planner.steps import Part

CONFIG = GPTConfig(block_size=32, num_layers=3, width=64, num_heads=4, vocab_size=256)


class Checkpointed(nn.Module):
    """A block that computes its forward again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def gpt(*, checkpointed: bool = False) -> GPT:
    """A tiny GPT."""
    model = GPT(CONFIG)
    if checkpointed:
        model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
    return model


def convolutions() -> nn.Module:
    """Convolutions, batch norms with buffers, and a head."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


CASES = {
    "gpt": (gpt, lambda batch: torch.zeros(batch, 32, dtype=torch.int64)),
    "checkpointed": (lambda: gpt(checkpointed=True), lambda batch: torch.zeros(batch, 32, dtype=torch.int64)),
    "convolutions": (convolutions, lambda batch: torch.ones(batch, 3, 16, 16)),
}


def parts_of(model: nn.Module) -> tuple[Part, ...]:
    """Each child with parameters, and each element of a list, is a part."""
    parts = []
    for name, child in model.named_children():
        each = child.named_children() if isinstance(child, nn.ModuleList) else [("", child)]
        for label, module in each:
            full = f"{name}.{label}" if label else name
            names = tuple(f"{full}.{own}" for own, _ in module.named_parameters())
            parts += [Part(full, (module,), names)] if names else []
    return tuple(parts)
