"""What optimizers train in tests, beside the plain one in the same process, and the table of all of them."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dshard
from dshard.testing import WorldPool
from tests.kit import oracle

SEED = 5


NUM_STEPS = 4


# Relative to the largest magnitude of each parameter, after four steps. Gradients of two ranks are the same bits, and
# what differs are kernels: vectorised on a whole tensor, scalar on the end of a shard.
TOLERANCE = 2e-6


LOOSE = 2e-4  # for LBFGS, whose steps divide dot products, which here are added over ranks


class Small(nn.Module):
    """Even, uneven and 0-d parameters, and one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 4)
        self.second = nn.Linear(4, 5)
        self.third = nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x))))) * self.scale


class WithEmpty(Small):
    """And one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x), self.nothing])


class Matrices(nn.Module):
    """Matrices alone, as Muon takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 4, bias=False)
        self.second = nn.Linear(4, 5, bias=False)
        self.third = nn.Linear(5, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def build(kind: type[nn.Module] = WithEmpty) -> nn.Module:
    torch.manual_seed(SEED)
    return kind()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """A loss on the batch of one rank, far enough from zero that gradients stay well above rounding."""
    generator = torch.Generator().manual_seed(step * 64 + rank)
    x, y = torch.randn(6, 7, generator=generator), torch.randn(6, 1, generator=generator) + 2
    return (model(x) - y).square().mean()


def average_gradients(model: nn.Module, step: int, ranks: Iterable[int]) -> float:
    """Leave in `.grad` of a plain model the mean over the ranks, added in pairs; gives the mean loss."""
    found: dict[str, list[Tensor]] = {}
    losses, ranks = [], list(ranks)
    before = {n: p.grad for n, p in model.named_parameters()}
    for rank in ranks:
        model.zero_grad()
        loss = loss_of(model, step, rank)
        loss.backward()
        losses.append(loss.item())
        for n, p in model.named_parameters():
            if p.grad is not None:
                found.setdefault(n, []).append(p.grad)
    for n, p in model.named_parameters():
        p.grad = before[n]
        if n in found:
            mean = oracle.sum_in_pairs(found[n]) / len(ranks)
            p.grad = mean if before[n] is None else before[n] + mean
    return sum(losses) / len(losses)


def full(value: Any) -> Any:
    """A plain copy of a tensor; everything else as it is."""
    if not isinstance(value, Tensor):
        return value
    with torch.no_grad():
        return (value.full_tensor() if isinstance(value, dshard.ShardedTensor) else value).detach().clone()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: full(p) for n, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: full(p.grad) for n, p in model.named_parameters()}


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Two units."""
    dshard.fully_shard(model.first, **options)
    dshard.fully_shard(model, **options)
    return model


def differences(found: Any, expected: Any, tolerance: float) -> list[str]:
    """Where two nested results differ by more than `tolerance`, relative to the largest magnitude of each tensor."""
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            return [f"keys {found.keys() ^ expected.keys()}"]
        return [f"{k}: {w}" for k in expected for w in differences(found[k], expected[k], tolerance)]
    if isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return [f"{len(found)} items, not {len(expected)}"]
        return [f"{i}: {w}" for i, e in enumerate(expected) for w in differences(found[i], e, tolerance)]
    if not isinstance(expected, Tensor):
        return [] if found == expected else [f"{found!r} is not {expected!r}"]
    if not isinstance(found, Tensor) or found.shape != expected.shape or found.dtype != expected.dtype:
        return [f"{found!r} is not {expected!r}"]
    if not expected.numel() or torch.equal(found, expected):
        return []
    off = (found - expected).abs().max().item() / max(expected.abs().max().item(), 1e-30)
    return [] if off <= tolerance else [f"off by {off:.2g}"]


@dataclass(frozen=True, slots=True)
class Kind:
    """An optimizer.

    Args:
        options: Those without which a test would be weak: an eps well above the rounding of the gradients.
        variants: Further options, each a case of its own.
        is_elementwise: Whether its step needs no other element, so must not communicate.
        model: What it trains.
        tolerance: Relative difference after four steps.
    """

    options: dict[str, Any]
    variants: tuple[dict[str, Any], ...] = ()
    is_elementwise: bool = True
    model: type[nn.Module] = WithEmpty
    tolerance: float = TOLERANCE


KINDS: dict[str, Kind] = {
    "ASGD": Kind({"lr": 0.05, "t0": 1.0, "lambd": 1e-2}, ({"weight_decay": 0.1},)),
    "Adadelta": Kind({"lr": 1.0, "eps": 1e-4}, ({"weight_decay": 0.1},)),
    "Adafactor": Kind({"lr": 0.05}, ({"weight_decay": 0.1, "d": 1.5},), False, model=Small),
    "Adagrad": Kind({"lr": 0.05, "eps": 1e-6}, ({"weight_decay": 0.1, "initial_accumulator_value": 0.1},)),
    "Adam": Kind(
        {"lr": 0.02, "eps": 1e-5}, ({"amsgrad": True}, {"weight_decay": 0.1}, {"decoupled_weight_decay": True})
    ),
    "AdamW": Kind({"lr": 0.02, "eps": 1e-5, "weight_decay": 0.1}, ({"amsgrad": True},)),
    "Adamax": Kind({"lr": 0.02, "eps": 1e-5}, ({"weight_decay": 0.1},)),
    "LBFGS": Kind(
        {"lr": 0.1, "max_iter": 3}, ({"line_search_fn": "strong_wolfe", "max_iter": 2},), False, tolerance=LOOSE
    ),
    "Muon": Kind(
        {"lr": 0.02}, ({"adjust_lr_fn": "match_rms_adamw"}, {"nesterov": False}), False, model=Matrices, tolerance=1e-5
    ),
    "NAdam": Kind({"lr": 0.02, "eps": 1e-5}, ({"weight_decay": 0.1, "decoupled_weight_decay": True},)),
    "RAdam": Kind({"lr": 0.02, "eps": 1e-5}, ({"weight_decay": 0.1, "decoupled_weight_decay": True},)),
    "RMSprop": Kind(
        {"lr": 0.02, "eps": 1e-4}, ({"momentum": 0.5, "centered": True}, {"weight_decay": 0.1, "momentum": 0.9})
    ),
    "Rprop": Kind({"lr": 0.02}),
    "SGD": Kind({"lr": 0.1}, ({"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1})),
}


def make(name: str, mode: dict[str, Any], params: Any) -> torch.optim.Optimizer:
    options = {**KINDS[name].options, **mode}
    if mode.get("lr") == "tensor":
        options["lr"] = torch.tensor(KINDS[name].options["lr"])
    return getattr(torch.optim, name)(params, **options)


class Counted:
    """Cases that the tests of this file ran."""

    cases: ClassVar[Counter[str]] = Counter()


@dataclass(slots=True)
class Report:
    """What one rank found.

    Args:
        wrong: What differs.
        num_cases: How many cases it compared.
        refused: Cases that plain torch refuses, so that dshard has to too.
    """

    wrong: list[str] = field(default_factory=list)
    num_cases: int = 0
    refused: list[str] = field(default_factory=list)


def check(worlds: WorldPool, num_ranks: int, kind: str, fn: Callable[..., Any], *args: Any) -> list[Report]:
    """Run a function that gives a report, or a list of what is wrong, on every rank."""
    results = worlds.run(num_ranks, fn, *args)
    reports = [r if isinstance(r, Report) else Report(r, 1) for r in results]
    assert [r.wrong for r in reports] == [[] for _ in range(num_ranks)]
    assert reports[0].num_cases > 0
    Counted.cases[kind] += reports[0].num_cases
    return reports


def run_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> list[str]:
    """One step; gives the kinds of collectives that it started itself."""
    with dshard.CommTrace() as trace:
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
    return [f"{r.kind} of {r.label}" for r in trace.records]


def sharded_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, *, needs_closure: bool) -> list[str]:
    rank = dist.get_rank()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)  # a line search must see one loss on all ranks
        return total / dist.get_world_size()

    if needs_closure:
        return run_step(optimizer, closure)
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    return run_step(optimizer, None)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, *, needs_closure: bool) -> None:
    ranks = range(dist.get_world_size())

    def closure() -> Tensor:
        optimizer.zero_grad()
        return torch.tensor(average_gradients(model, step, ranks))

    if needs_closure:
        optimizer.step(closure)  # type: ignore[arg-type]
        return
    optimizer.zero_grad()
    average_gradients(model, step, ranks)
    optimizer.step()
