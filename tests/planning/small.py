"""What tests of plans train: a GPT of four blocks, on tokens that differ from step to step and from rank to rank."""

import torch
from torch import Tensor, nn

from dshard.cli.models import GPT, GPTConfig


def build(*, tie: bool = False, num_layers: int = 4) -> GPT:
    """The same weights whenever it is called."""
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=16, num_layers=num_layers, width=32, num_heads=4, vocab_size=64, tie_head=tie))


def tokens(seed: int = 0) -> Tensor:
    """A batch for it."""
    return torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(seed))


def losses(model: nn.Module, seed: int, num_steps: int = 3) -> list[float]:
    """Of steps of AdamW on batches that follow from a seed."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(num_steps):
        x = tokens(10 * step + seed)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
