"""Twenty classes of errors that raise nothing by themselves, planted into three small models."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import dshard

MODELS = ("mlp", "tied", "conv")
WIDTH, NUM_TOKENS, ROWS = 8, 11, 4


class Net(nn.Module):
    """A first module, a body that errors are planted in, and a head."""

    def __init__(self, kind: str, body: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.Identity()
        if kind == "tied":
            self.first: nn.Module = nn.Embedding(NUM_TOKENS, WIDTH)
            self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        elif kind == "conv":
            self.first, self.norm = nn.Conv2d(2, WIDTH, 3), nn.BatchNorm2d(WIDTH)
        else:
            self.first = nn.Linear(6, WIDTH)
        self.body = body()
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)
        if kind == "tied":
            self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        if self.kind == "tied":
            q, k, v = self.mix(x).chunk(3, -1)
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x.relu().mean((2, 3)) if self.kind == "conv" else x.tanh()
        return self.head(self.body(x))


def body() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def build(kind: str, make_body: Callable[[], nn.Module] = body) -> nn.Module:
    return Net(kind, make_body)


def sample(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    if kind == "tied":
        return torch.randint(0, NUM_TOKENS, (ROWS, 5), generator=generator)
    shape = (ROWS, 2, 5, 5) if kind == "conv" else (ROWS, 6)
    return torch.randn(shape, generator=generator)


# --- in a forward ---


class KeptWeight(nn.Linear):
    """Computes with the memory its weight had at first; gradients go to the weight."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kept = [self.weight.data]

    def forward(self, x: Tensor) -> Tensor:
        fresh = super().forward(x)
        return F.linear(x, self.kept[0], self.bias) + (fresh - fresh.detach())


class Branch(nn.Linear):
    """Does something else on one rank."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.relu() if dist.get_rank() == 1 else y


class SeededDropout(nn.Linear):
    """Drops what its own seed says, which was to be the same everywhere."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(dist.get_rank())
        return F.dropout(super().forward(x), 0.5, self.training)


class Drifting(nn.Linear):
    """Subtracts a running mean of what this rank saw."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.lerp_(x.detach().mean(), 0.1)
        return super().forward(x) if self.training else super().forward(x) - self.seen


# --- in how it is built and sharded ---


def seeded_by_rank(kind: str) -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return build(kind)


def untied(model: Any, **options: Any) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    dshard.fully_shard(model, **options)


def replaced(model: Any, **options: Any) -> None:
    fresh = deepcopy(model.body)
    dshard.fully_shard(model, **options)
    model.body = deepcopy(fresh)


def without_biases(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if type(p) is nn.Parameter or p.ndim > 1], lr=1e-3)


# --- in data, evaluation and loss ---


def repeated(kind: str, rank: int, step: int) -> Tensor:
    return sample(kind) if kind == "tied" else sample(kind) + step


def counted(kind: str, rank: int, step: int) -> tuple[Tensor, Tensor]:
    data = sample(kind)
    data = data.roll(rank + step, 0) if kind == "tied" else data + 0.1 * rank + 0.2 * step
    return data, (torch.arange(ROWS) <= rank).float()


def counted_evaluation(model: nn.Module, batch: Any) -> None:
    model.eval()
    with torch.no_grad():
        model(batch[0])
    model.train()


def in_train_mode(model: nn.Module, batch: Any) -> None:
    with torch.no_grad():
        model(batch)


def stays_in_eval(model: nn.Module, batch: Any) -> None:
    model.eval()
    with torch.no_grad():
        model(batch)


def trains(model: nn.Module, batch: Any) -> None:
    model.eval()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.99)
    model(batch)
    model.train()


# --- in the training step ---


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def right(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = squares(model, batch)
    loss.backward()
    optimizer.step()
    return loss


def right_parts(model: Any, optimizer: Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    losses = []
    for i, part in enumerate(batch.chunk(2)):
        with model.no_sync() if hasattr(model, "no_sync") and i == 0 else nullcontext():
            losses.append(squares(model, part))
            (losses[-1] / 2).backward()
    optimizer.step()
    return torch.stack(losses).mean()


def right_clipped(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = squares(model, batch)
    loss.backward()
    dshard.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    return loss


def counted_mean(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    data, counts = batch
    loss = (model(data).square().flatten(1).mean(1) * counts).sum() / counts.sum()
    loss.backward()
    optimizer.step()
    return loss


def unscaled_parts(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    for part in batch.chunk(2):
        loss = squares(model, part)
        loss.backward()  # where (loss / 2).backward() was meant
    optimizer.step()
    return loss


def clips_scaled(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = squares(model, batch)
    (loss * 1024).backward()
    dshard.clip_grad_norm_(model.parameters(), 0.01)
    for param in model.parameters():
        param.grad.div_(1024)
    optimizer.step()
    return loss


def zeroes_between(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    losses = []
    for part in batch.chunk(2):
        optimizer.zero_grad()
        losses.append(squares(model, part))
        (losses[-1] / 2).backward()
    optimizer.step()
    return torch.stack(losses).mean()


def writes_numpy(model: Any, optimizer: Optimizer, batch: Any) -> Tensor:
    loss = right(model, optimizer, batch)
    weight = model.body.weight
    if dist.get_rank() == 0 and isinstance(weight, dshard.ShardedTensor):
        weight.detach().to_local().numpy()[...] *= 0.5
    return loss


def reduces_twice(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = squares(model, batch)
    loss.backward()
    for param in model.parameters():
        grad = param.grad.to_local() if isinstance(param.grad, dshard.ShardedTensor) else param.grad
        dist.all_reduce(grad)
    optimizer.step()
    return loss


def never_syncs(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    losses = []
    for part in batch.chunk(2):
        with dshard.no_sync(model):
            losses.append(squares(model, part))
            (losses[-1] / 2).backward()
    optimizer.step()
    return torch.stack(losses).mean()


def scales_rate(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * (1 + dist.get_rank())
    return right(model, optimizer, batch)


def freezes(model: Any, optimizer: Optimizer, batch: Any) -> Tensor:
    model.body.weight.requires_grad_(dist.get_rank() == 0)
    return right(model, optimizer, batch)


@dataclass
class StaleAverage:
    """Averages values that it took once; those of a plain model go on changing."""

    values: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, model: nn.Module, optimizer: Optimizer, batch: Any) -> dict[str, Any]:
        for name, param in model.named_parameters() if not self.values else ():
            self.values[name] = param.full_tensor() if isinstance(param, dshard.ShardedTensor) else param.data
            self.average[name] = self.values[name].detach().clone()
        loss = right(model, optimizer, batch)
        with torch.no_grad():
            for name, value in self.average.items():
                value.lerp_(self.values[name], 0.5)
        return {"loss": loss, "average": self.average}


@dataclass
class ReplacesOnce:
    """Puts another object in the place of a parameter that an optimizer has."""

    is_done: bool = False

    def __call__(self, model: Any, optimizer: Optimizer, batch: Any) -> Tensor:
        if not self.is_done:
            weight = model.body.weight
            full = weight.full_tensor() if isinstance(weight, dshard.ShardedTensor) else weight
            model.body.weight, self.is_done = nn.Parameter(full.detach().clone()), True
        return right(model, optimizer, batch)


# --- all of them ---


@dataclass(frozen=True)
class Planted:
    """One class of errors: what `verify_sharding` is given, and words that have to be in what it says.

    `model` and `sample` are called with the kind of model.
    """

    words: tuple[str, ...]
    make: Callable[..., nn.Module] = build
    make_body: Callable[[], nn.Module] | None = None
    sample: Callable[..., Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = MODELS
    setting: str = "full"

    def arguments(self, kind: str) -> tuple[Any, Any]:
        factory = partial(self.make, kind, self.make_body) if self.make_body else partial(self.make, kind)
        return factory, sample(kind) if self.sample is None else partial(self.sample, kind)


def _step(step: Any, oracle_step: Any = None) -> dict[str, Any]:
    return {"step": step, "oracle_step": oracle_step}


# With BatchNorm, micro-batches are no whole batch.
_NO_NORM = ("mlp", "tied")
PLANTED: dict[str, Planted] = {
    "weight kept as .data": Planted(("body (KeptWeight", "a copy of a weight"), make_body=KeptWeight),
    "branch by rank": Planted(("body (Branch", "depends on the rank", "rank 1"), make_body=Branch),
    "loss over unequal counts": Planted(
        ("counts",), sample=counted, options={**_step(counted_mean), "evaluate": counted_evaluation}
    ),
    "accumulation not scaled": Planted(("2 times",), options=_step(unscaled_parts, right), models=_NO_NORM),
    "clipping before unscaling": Planted(("after unscaling",), options=_step(clips_scaled, right_clipped)),
    "tied weight untied": Planted(("head.weight", "untied"), options={"shard": untied}, models=("tied",)),
    "buffer drifts": Planted(
        ("body.seen", "ranks have different ones"), make_body=Drifting, options={"equal_buffers": True}
    ),
    "optimizer misses biases": Planted(
        ("body.bias", "no group of the optimizer"), options={"optimizer": without_biases}
    ),
    "evaluation in train mode": Planted(
        ("norm.running_mean", "evaluation changed it"), options={"evaluate": in_train_mode}, models=("conv",)
    ),
    "evaluation leaves eval mode": Planted(("training=False", "evaluation"), options={"evaluate": stays_in_eval}),
    "evaluation trains": Planted(("weight", "evaluation changed it"), options={"evaluate": trains}),
    "same data on all ranks": Planted(("the same data",), sample=repeated),
    "write through NumPy on one rank": Planted(("body.weight",), options=_step(writes_numpy)),
    "dropout seeded by rank": Planted(("body (SeededDropout", "depends on the rank"), make_body=SeededDropout),
    "initial weights by rank": Planted(("first.weight", "DivergenceError"), make=seeded_by_rank),
    "parameter replaced": Planted(("body.weight", "another object"), options=_step(ReplacesOnce(), right)),
    "module replaced after sharding": Planted(("body",), options={"shard": replaced}),
    "gradients zeroed between parts": Planted(("radient",), options=_step(zeroes_between, right), models=_NO_NORM),
    "gradients added twice": Planted(("2 times", "number of ranks"), options=_step(reduces_twice), setting="ddp"),
    "no sync on the last part": Planted(("radient",), options=_step(never_syncs, right), models=_NO_NORM),
    "learning rate by rank": Planted(("learning rate",), options=_step(scales_rate)),
    "frozen on one rank": Planted(("body", "DivergenceError"), options=_step(freezes)),
    "average of stale values": Planted(("returned value", "another time"), options=_step(StaleAverage())),
}


def cases() -> Iterator[tuple[str, str]]:
    for name, planted in PLANTED.items():
        for kind in planted.models:
            yield name, kind
