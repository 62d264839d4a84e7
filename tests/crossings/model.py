"""The model of the crossings, and its optimizers: plain PyTorch, for the oracle and to be sharded."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, HIDDEN, LENGTH, BATCH, NUM_STEPS = 12, 8, 16, 5, 2, 3
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


class OnDemandError(Exception):
    """What a program raises within a forward or backward."""


def fail(grad: Tensor) -> Tensor:
    raise OnDemandError


class Block(nn.Module):
    """Weights that backward sees through a view (linear) and directly (norm); an adapter beside them, or none."""

    def __init__(self, *, adapts: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False))
        if not adapts:
            self.adapter = nn.Sequential()
        self.run: Callable[..., Tensor] | None = None

    def body(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        out = self.down(nn.functional.silu(self.up(x)))
        return out + self.adapter(x) if len(self.adapter) else out

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.body(x) if self.run is None else self.run(self.body, x))


class Net(nn.Module):
    """Embedding, an optional tower that not every batch needs, two blocks and a head.

    `runs_tower` says whether this rank's batch needs the tower, `beside_tower` is what the program puts around it.
    """

    def __init__(self, *, adapts: bool = False, ties: bool = False, has_tower: bool = False) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(adapts=adapts) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if ties:
            self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))
        self.tower = nn.Linear(WIDTH, WIDTH) if has_tower else None
        self.runs_tower = True
        self.beside_tower: Callable[..., Any] | None = None
        self.fails = ""
        self.seen: list[torch.dtype] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.shift.to(x.dtype)
        if torch.is_grad_enabled() and not x.requires_grad:
            x.requires_grad_()  # for reentrant checkpoints over frozen weights, as enable_input_require_grads does
        if self.tower is not None:
            with self.beside_tower(self.tower, runs=self.runs_tower) if self.beside_tower else nullcontext():
                x = x + self.tower(x) if self.runs_tower else x
        for i, block in enumerate(self.blocks):
            if self.fails == "in forward" and i == 1:
                raise OnDemandError
            x = block(x)
            if self.fails == "in backward" and i == 0 and x.requires_grad:
                x.register_hook(fail)
        self.seen = [self.head.weight.dtype]
        return self.head(self.norm(x) * self.gain.to(x.dtype))


def build(row: Mapping[str, str], seed: int = 0) -> Net:
    """The model of a row, with the same weights for the same seed."""
    torch.manual_seed(seed)
    params = row["params"]
    net = Net(adapts=params == "adapters", ties=params == "tied", has_tower=row["use"] == "some ranks")
    for name, param in net.named_parameters():
        is_frozen = params == "frozen" and name.startswith(("embed", "blocks.0"))
        param.requires_grad_(not is_frozen and (params != "adapters" or "adapter" in name))
    return net.to({"autocast": F32, "bf16 model": BF16}.get(row["precision"], F64))


def checkpoint_inside(net: Net, row: Mapping[str, str]) -> None:
    """Have blocks compute their bodies again in backward."""
    for block in net.blocks:
        if row["checkpoint"] in ("inside", "reentrant"):
            block.run = partial(checkpoint, use_reentrant=row["checkpoint"] == "reentrant")


def batch(step: int, micro: int, rank: int) -> Tensor:
    """Tokens: a function of the arguments alone."""
    seed = 1000 * step + 100 * micro + rank
    return torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def runs_tower(step: int, micro: int, rank: int) -> bool:
    """Whether the batch needs the tower: on all ranks, on some, or on none (the first micro-batch of the last step)."""
    return bool(step < 2 and (step + micro + rank) % 3) if micro == 0 else (rank + step) % 2 == 0


def loss_of(net: Any, tokens: Tensor) -> Tensor:
    """To be minimized; the targets are other tokens of the same."""
    return nn.functional.cross_entropy(net(tokens).double().flatten(0, 1), tokens.roll(1, 1).flatten())


def num_micro(row: Mapping[str, str]) -> int:
    return 1 if row["accumulation"] == "one" else 2


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers add."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


class AveragingSGD(torch.optim.Optimizer):
    """SGD along an average of the gradients, which for a DTensor is made by `DTensor.from_local`, as torchao does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if "average" not in self.state[param]:
                    self.state[param]["average"] = zeros_beside(param)
                average = self.state[param]["average"]
                average.lerp_(param.grad, 0.5)
                param.copy_(torch.mul(average, -group["lr"]) + param)


def zeros_beside(param: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return torch.zeros_like(param)
    zeros = torch.zeros_like(param.to_local())
    return DTensor.from_local(
        zeros, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def optimizers_of(row: Mapping[str, str], net: nn.Module) -> list[Optimizer]:
    """The optimizers of a row, over what of a model is trained."""
    trained = [(plain_name(n), p) for n, p in net.named_parameters() if p.requires_grad]
    params = [p for _, p in trained]
    kind = row["optimizer"]
    if kind == "sgd":
        return [torch.optim.SGD(params, lr=0.2, momentum=0.9)]
    if kind == "adafactor":
        return [torch.optim.Adafactor(params, lr=0.1)]
    if kind == "muon and sgd":
        of_muon = {n for n, p in trained if p.ndim == 2 and ("down" in n or "adapter" in n)}
        rest = [p for n, p in trained if n not in of_muon]
        muon = torch.optim.Muon([p for n, p in trained if n in of_muon], lr=0.05)
        return [muon, torch.optim.SGD(rest, lr=0.1)] if rest else [muon]
    if kind == "DTensor states":
        return [AveragingSGD(params, lr=0.2)]
    # A large eps: where a gradient is zero up to rounding, Adam would make a full step of the rounding.
    return [torch.optim.AdamW(params, lr=0.05, eps=1e-2, fused=kind == "fused", foreach=kind == "foreach")]
