"""Small models, meshes and programs as picklable values: drawn in the parent process, made on the ranks.

`tests.kit.drawing` draws them.
"""

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from dshard.setup.fully_shard import fully_shard
from dshard.testing.strategies import MeshCase

ROWS, LENGTH = 3, 4


@dataclass(frozen=True, slots=True)
class LayerCase:
    """One layer, which gives back the shape that it is given.

    Attributes:
        kind: of `LAYER_KINDS`.
        size: of what is inside, or the number of an earlier layer that is used again.
        layers: of a list.
    """

    kind: str
    size: int = 1
    layers: tuple["LayerCase", ...] = ()


LAYER_KINDS = ("linear", "norm", "mlp", "conv", "scale", "frozen", "unused", "dropout", "tied", "again", "list")


@dataclass(frozen=True, slots=True)
class ModelCase:
    """A small model in fp64.

    Attributes:
        width: of the layers.
        layers: one after the other, each beside an identity.
        num_tokens: of an embedding in front of them; 0 for a layer, and batches of floats.
        is_tied: whether the head has the embedding's weight.
        seed: of the weights.
    """

    width: int
    layers: tuple[LayerCase, ...]
    num_tokens: int = 0
    is_tied: bool = False
    seed: int = 0

    def build(self) -> nn.Module:
        """The model, with equal weights at each call."""
        torch.manual_seed(self.seed)
        return _Layers(self).double()

    def batch(self, rank: int, step: int) -> Tensor:
        """Of a rank in a step: shape (3, 4) of tokens, or (3, 4, width)."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        if self.num_tokens:
            return torch.randint(0, self.num_tokens, (ROWS, LENGTH), generator=generator)
        return torch.randn(ROWS, LENGTH, self.width, generator=generator, dtype=torch.float64)

    def sharded(self, mesh: MeshCase | None = None, strategy: Any = None, dim: int = 0) -> nn.Module:
        """The model behind `fully_shard`, its parameters cut along a dim, or their last one. Communicates: as that."""

        def place(param: nn.Parameter) -> Shard | None:
            return Shard(min(dim, param.ndim - 1)) if param.ndim else None

        options: dict[str, Any] = {"shard_placement_fn": place} if dim else {}
        return fully_shard(self.build(), mesh=None if mesh is None else mesh.build(), strategy=strategy, **options)


class _Layers(nn.Module):
    """The layers of a `ModelCase`."""

    def __init__(self, case: ModelCase) -> None:
        super().__init__()
        width = case.width
        self.first = nn.Embedding(case.num_tokens, width) if case.num_tokens else nn.Linear(width, width)
        self.layers = nn.ModuleList()
        for layer in case.layers:
            self.layers.append(_made(layer, width, list(self.layers)))
        self.head = nn.Linear(width, case.num_tokens or width, bias=not case.is_tied)
        if case.is_tied and isinstance(self.first, nn.Embedding):
            self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = _through(layer, x)
        return self.head(x)


def _made(layer: LayerCase, width: int, before: list[nn.Module]) -> nn.Module:
    linear = nn.Linear(width, width, bias=layer.size % 2 == 0)
    if layer.kind == "again" and before:
        return before[layer.size % len(before)]
    if layer.kind == "tied":
        others = [each for each in before if isinstance(each, nn.Linear)]
        linear.weight = others[layer.size % len(others)].weight if others else linear.weight
    if layer.kind == "list":
        found: list[nn.Module] = []
        for each in layer.layers:
            found.append(_made(each, width, found))
        return nn.ModuleList(found)
    made: dict[str, Callable[[], nn.Module]] = {
        "norm": lambda: nn.LayerNorm(width),
        "mlp": lambda: nn.Sequential(nn.Linear(width, layer.size), nn.Tanh(), nn.Linear(layer.size, width)),
        "conv": lambda: _Convolution(width, 2 * (layer.size % 2) + 1),
        "scale": _Scale,
        "frozen": lambda: linear.requires_grad_(requires_grad=False),
        "unused": lambda: _unused(width, layer.size),
        "dropout": lambda: nn.Dropout(0.0),
    }
    return made.get(layer.kind, lambda: linear)()


def _through(layer: nn.Module, x: Tensor) -> Tensor:
    if isinstance(layer, nn.ModuleList):
        for each in layer:
            x = _through(each, x)
        return x
    return x + torch.tanh(layer(x))


class _Convolution(nn.Module):
    """Over the length."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class _Scale(nn.Module):
    """A parameter and a buffer without dims; evaluation leaves the parameter out."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.shift if self.training else x + self.shift


def _unused(width: int, size: int) -> nn.Module:
    """With a parameter that no forward uses."""
    layer = nn.Identity()
    layer.weight = nn.Parameter(torch.ones(size, width))
    return layer


# What programs do to tensors, under one name each.


def values(like: Tensor, seed: int) -> Tensor:
    """Random numbers of the shape and dtype of a tensor, equal on every rank."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(like.dtype)


def rows(tensor: Tensor) -> Tensor:
    """Its second and third row; itself, if it has no dims."""
    return tensor[1:3] if tensor.dim() else tensor


def _assign(tensor: Tensor, value: Any) -> None:
    tensor[slice(1, 3) if tensor.dim() else ...] = value


def _initialize(param: Tensor) -> None:
    torch.manual_seed(3)
    nn.init.normal_(param)


def _set_data(param: Tensor) -> None:
    param.data = param.data * 0.5


WRITES: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "mul": lambda p: p.mul_(1.25),
        "copy": lambda p: p.copy_(values(p, 1)),
        "data copy": lambda p: p.data.copy_(values(p, 2)),
        "data mul": lambda p: p.data.mul_(-0.75),
        "set data": _set_data,
        "slice": lambda p: _assign(p, 0.25),
        "rows": lambda p: _assign(p, values(rows(p), 4)),
        "element": lambda p: p.view(-1)[-1].fill_(0.5),
        "transposed": lambda p: p.t().add_(0.125),
        "masked": lambda p: p.masked_fill_(p > 0.5, 0.1),
        "itself": lambda p: p.add_(p),
        "out": lambda p: torch.mul(p, 0.5, out=p),
        "foreach": lambda p: torch._foreach_add_([p], 0.25),
        "init": _initialize,
    }
)
READS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "value": lambda t: t.detach().clone(),
        "sum": lambda t: t.sum().item(),
        "norm": lambda t: t.norm().item(),
        "equal": lambda t: torch.equal(t, t.detach().clone()),
        "list": lambda t: t.tolist(),
        "element": lambda t: t.reshape(-1)[-1:].tolist(),
        "product": lambda t: t.detach().t() @ torch.ones_like(t.detach()) if t.dim() == 2 else t.detach() * 2,
        "cast": lambda t: t.detach().to(torch.float32),
    }
)
VIEWS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "detach": lambda p: p.detach(),
        "data": lambda p: p.data,
        "flat": lambda p: p.detach().view(-1)[1:],
        "rows": lambda p: rows(p.detach()),
        "transposed": lambda p: p.data.t(),
        "part": lambda p: p.detach().view(-1).split(2)[0],
        "clone": lambda p: p.detach().clone(),
        "grad": lambda p: p.grad,
    }
)
COPIES: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}
)


GRAD_MODES: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
)
Command = tuple[Any, ...]


def play(
    case: ModelCase, commands: Sequence[Command], *, mesh: MeshCase | None = None, strategy: Any = None, dim: int = 0
) -> None:
    """Do the same to a sharded model and to a plain one, and compare what comes of each command, and at the end.

    The plain one is on the batches of all ranks, the sharded one on this rank's. Where plain PyTorch raises a
    RuntimeError, the sharded model has to raise one.

    Args:
        case: The model.
        commands: What `strategies.commands()` draws.
        mesh: As for `ModelCase.sharded`.
        strategy: The same.
        dim: The same.

    Raises:
        AssertionError: Something differs; on the ranks where it does.

    Communicates:
        What the commands do.
    """
    ours = _Side(case, case.sharded(mesh, strategy, dim), [dist.get_rank()])
    theirs = _Side(case, case.build(), range(dist.get_world_size()))
    for name, *args in (*commands, ("drop",), ("forward", "grad"), ("backward",), ("step",)):
        expected, found = theirs.do(name, args), ours.do(name, args)
        _same(found, expected, f"what {name}{tuple(args)} gives")
    _same(ours.state(), theirs.state(), "state at the end")


def _same(ours: Any, theirs: Any, what: str) -> None:
    if isinstance(ours, RuntimeError) or isinstance(theirs, RuntimeError):
        assert type(ours) is type(theirs), f"{what}: {ours!r}, where the plain model gives {theirs!r}"
        return
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10, msg=lambda text: f"{what}: {text}")


def _full(value: Any) -> Any:
    value = value.detach() if isinstance(value, Tensor) else value
    return value.full_tensor() if hasattr(value, "full_tensor") else value


class _Side:
    """A model with its optimizer, and what a program keeps of it."""

    def __init__(self, case: ModelCase, model: nn.Module, ranks: Sequence[int]) -> None:
        self.case, self.model, self.ranks = case, model, ranks
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        self.losses: list[Tensor] = []
        self.held: list[Tensor] = []
        self.num_forwards = 0

    def do(self, name: str, args: Sequence[Any]) -> Any:
        """What a command gives: numbers, or an error."""
        try:
            return _full(getattr(self, name)(*args))
        except RuntimeError as error:
            self.drop()
            self.model.zero_grad()  # what a backward that raised has left of gradients is anybody's guess
            return error

    def state(self) -> list[Any]:
        """Weights, gradients and what is held."""
        params = list(self.model.parameters())
        return [_full(each) for each in (*params, *(param.grad for param in params), *self.held)]

    def _param(self, i: int) -> nn.Parameter:
        params = list(self.model.parameters())
        return params[i % len(params)]

    def _target(self, what: str, i: int) -> Any:
        if what == "held":
            return self.held[i % len(self.held)] if self.held else None
        return self._param(i).grad if what == "grad" else self._param(i)

    def forward(self, mode: str) -> Tensor:
        with GRAD_MODES[mode]():
            batches = {rank: self.case.batch(rank, self.num_forwards) for rank in self.ranks}
            losses = {rank: self.model(batch).square().mean() for rank, batch in batches.items()}
        self.num_forwards += 1
        if mode == "grad":
            self.losses.append(torch.stack(list(losses.values())).mean())
        return losses[dist.get_rank()]

    def backward(self) -> None:
        losses, self.losses = self.losses, []
        if losses:
            torch.stack(losses).sum().backward()

    def drop(self) -> None:
        self.losses.clear()

    def step(self) -> None:
        self.optimizer.step()

    def zero(self, to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=to_none)

    def clip(self, norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def write(self, kind: str, what: str, i: int) -> None:
        target = self._target(what, i)
        if kind == "set data":  # a backward of a forward from before has either values: docs/limits.md
            self.drop()
        with torch.no_grad():
            if target is not None:
                WRITES[kind](target)

    def read(self, kind: str, what: str, i: int) -> Any:
        target = self._target(what, i)
        return None if target is None else READS[kind](target)

    def hold(self, kind: str, i: int) -> None:
        if (view := VIEWS[kind](self._param(i))) is not None:
            self.held.append(view)

    def write_held(self, i: int) -> None:
        with torch.no_grad():
            if self.held:
                self.held[i % len(self.held)].mul_(1.5).add_(0.125)

    def requires_grad(self, i: int, on: bool) -> None:
        self._param(i).requires_grad = on

    def train(self, on: bool) -> None:
        self.model.train(on)

    def load(self, seed: int) -> None:
        state = {name: values(value, seed) for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(state)

    def copy(self, kind: str) -> None:
        self.losses.clear()
        self.held.clear()
        state = copy.deepcopy(self.optimizer.state_dict())
        self.model = COPIES[kind](self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)
        self.optimizer.load_state_dict(state)
