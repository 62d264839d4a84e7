"""Three small models of different kinds, and bodies for them that compute something else without raising."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

MODELS = ("lm", "conv", "rnn")
WIDTH, NUM_TOKENS, ROWS = 8, 11, 4


class Net(nn.Module):
    """A first module, a body that errors are planted in, and a head.

    Args:
        kind: "lm" is a transformer with a tied embedding, "conv" has a batch norm, "rnn" two recurrent layers.
        body: Makes the body.
        dropout: Of "lm" and "rnn".
    """

    def __init__(self, kind: str, body: Callable[[], nn.Module], dropout: float) -> None:
        super().__init__()
        self.kind = kind
        if kind == "lm":
            self.first: nn.Module = nn.Embedding(NUM_TOKENS, WIDTH)
            self.norm: nn.Module = nn.LayerNorm(WIDTH)
            self.mix, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Dropout(dropout)
        elif kind == "conv":
            self.first, self.norm = nn.Conv2d(2, WIDTH, 3), nn.BatchNorm2d(WIDTH)
        else:
            self.first = nn.GRU(6, WIDTH, num_layers=2, dropout=dropout, batch_first=True)
        self.body = body()
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)
        if kind == "lm":
            self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.kind == "lm":
            q, k, v = self.mix(self.norm(x)).chunk(3, -1)
            x = x + self.drop(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        elif self.kind == "conv":
            x = self.norm(x).relu().mean((2, 3))
        else:
            x = x[0][:, -1]
        return self.head(self.body(x))


def plain_body() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def build(kind: str, make_body: Callable[[], nn.Module] = plain_body, dropout: float = 0.0) -> nn.Module:
    return Net(kind, make_body, dropout)


def sample(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    if kind == "lm":
        return torch.randint(0, NUM_TOKENS, (ROWS, 5), generator=generator)
    shape = (ROWS, 2, 5, 5) if kind == "conv" else (ROWS, 5, 6)
    return torch.randn(shape, generator=generator)


class Layer(nn.Linear):
    """A layer as wide as the body."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class KeptWeight(Layer):
    """Computes with the memory its weight had at first; gradients go to the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.weight.data]

    def forward(self, x: Tensor) -> Tensor:
        fresh = super().forward(x)
        return F.linear(x, self.kept[0], self.bias) + (fresh - fresh.detach())


class Branch(Layer):
    """Does something else on one rank."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.relu() if dist.get_rank() == 1 else y


class SeededDropout(Layer):
    """Drops what its own seed says, which was to be the same everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(dist.get_rank())
        return F.dropout(super().forward(x), 0.5, self.training)


class Shared(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Layer(), Layer()
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Any:
        return self.other(self.one(x).tanh())
