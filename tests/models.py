"""Modules that several files of tests train; one that is peculiar to a test stands beside it."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, CONTEXT, WIDTH, HEADS = 32, 8, 16, 2  # of a GPT
ROWS, COLUMNS = 11, 6  # of a TokenNet's embedding and head: uneven over 2 and 3 ranks


def mlp() -> nn.Module:
    """Three layers, of even and uneven dims."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1))


class ResidualMlp(nn.Module):
    """A norm and two layers, whose sum with the input is the output.

    Args:
        width: Of input and output.
        hidden: Width between the layers.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LanguageModel(nn.Module):
    """An embedding, two layers, a norm and a head.

    Args:
        make_layer: Makes a layer.
        width: Of the layers.
        tied: Whether head and embedding share their weight.
        checkpoints: How the layers are recomputed: "" for not at all, "reentrant" or "not reentrant".
    """

    def __init__(
        self, make_layer: Callable[[], nn.Module], width: int, *, tied: bool = False, checkpoints: str = ""
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(21, width)
        self.layers = nn.ModuleList(make_layer() for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 21, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.checkpoints = checkpoints

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            if self.checkpoints:
                x = checkpoint(layer, x, use_reentrant=self.checkpoints == "reentrant")
            else:
                x = layer(x)
        return self.head(self.norm(x))


class Experts(nn.Module):
    """Experts between two layers, of which one is chosen: by default that of the number of the rank."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(count)])
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor, choice: int | None = None) -> Tensor:
        expert = self.experts[dist.get_rank() if choice is None else choice]
        return self.last(torch.tanh(expert(torch.tanh(self.first(x)))))


class TokenNet(nn.Module):
    """An embedding, a trunk of blocks, a head: with methods besides `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(ROWS, COLUMNS)
        self.trunk = nn.ModuleList([nn.Linear(COLUMNS, COLUMNS) for _ in range(3)])
        self.norm = nn.LayerNorm(COLUMNS)
        self.head = nn.Linear(COLUMNS, ROWS, bias=False)
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


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        # No bias: the gradient of a key's bias is zero but for rounding, and Adam would divide rounding by rounding.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Blocks with attention between embeddings and a head, which may be tied."""

    def __init__(
        self,
        *,
        layers: int = 2,
        tied: bool = False,
        vocab: int = VOCAB,
        context: int = CONTEXT,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))


class ConvNet(nn.Module):
    """Convolutions with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        # No bias ahead of a batch norm, for its gradient is zero but for rounding.
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU())
        self.body = nn.Sequential(nn.Conv2d(8, 12, 3, stride=2, bias=False), nn.BatchNorm2d(12), nn.SiLU())
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


class Classifier(nn.Module):
    """An LSTM over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, 6)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(ids))
        return self.head(states[:, -1])


class Uneven(nn.Module):
    """Dims 1, 3, 5 and 7, a 0-d scale, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.second = nn.Linear(5, 3)
        self.third = nn.Linear(3, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.third(torch.cat([x * self.scale, self.nothing]))
