"""Modules that several files of tests train."""

import torch
from torch import Tensor, nn

VOCAB, WIDTH = 11, 6  # 11 rows: uneven over 2 and 3 ranks


class TokenNet(nn.Module):
    """An embedding, a trunk of blocks, a head: with methods besides `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.trunk = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.cache: list[Tensor] = []
        self.cached_weights = [self.head.weight, self.trunk[0].bias]

    def encode(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.trunk:
            x = x + torch.tanh(layer(x))
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encode(ids))

    @torch.no_grad()
    def generate(self, ids: Tensor, count: int) -> Tensor:
        for _ in range(count):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], dim=1)
        return ids
