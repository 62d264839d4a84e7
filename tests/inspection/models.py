"""A model whose loss uses weights outside of any forward, as the tests of this folder look at it."""

from typing import Any

import torch
from torch import Tensor, nn

import dshard

WIDTH, VOCAB = 16, 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.register_buffer("offsets", torch.arange(5.0))
        self.skipped: nn.Module | None = None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x if block is self.skipped else block(x)
        return x


def sharded(options: dict[str, Any], **on_root: Any) -> Any:
    """Each block, embedding and head a unit; nothing is left with the root."""
    torch.manual_seed(0)
    net = Net()
    for module in (*net.blocks, net.embed, net.head):
        dshard.fully_shard(module, **options)
    return dshard.fully_shard(net, **options, **on_root)


def ids() -> Tensor:
    return torch.arange(12).view(3, 4)
