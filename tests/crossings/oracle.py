"""What is right: the plain model in one process, on the batches of all ranks, with the casts of the row by hand.

Nothing here knows dshard. Each rank's gradients are computed in the compute dtype with weights that were cast, and
added up in the dtype of the reduction; then they are converted to the parameter's dtype.
"""

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.crossings.factors import num_ranks_of
from tests.crossings.model import BF16, F64, NUM_STEPS, batch, build, loss_of, num_micro, optimizers_of, runs_tower

MAX_NORM, MAX_VALUE, PENALTY, DIVISOR = 0.25, 0.02, 1e-2, 4.0


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a training.

    Args:
        losses: By step, micro-batch, and rank of the data.
        norms: By step, of the gradients before they were clipped.
        start: Weights before the first step, by name.
        weights: Weights in the end, by name.
        grads: Gradients of the last step, after clipping.
    """

    losses: list[list[list[float]]]
    norms: list[float]
    start: dict[str, Tensor]
    weights: dict[str, Tensor]
    grads: dict[str, Tensor]


def num_data_ranks(row: Mapping[str, str]) -> int:
    return 2 if row["mesh"] == "TP" else num_ranks_of(row)


def dtypes_of(row: Mapping[str, str]) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Of computation and of reduction, None for that of the parameters."""
    return {"bf16": (BF16, F64), "all bf16": (BF16, BF16)}.get(row["precision"], (None, None))


def context_of(row: Mapping[str, str]) -> Any:
    """In which forwards run."""
    is_autocast = row["precision"] == "autocast"
    return torch.autocast(row.get("device", "cpu"), dtype=BF16) if is_autocast else contextlib.nullcontext()


def scale_of(row: Mapping[str, str]) -> float:
    """By what sums of gradients over the ranks are multiplied."""
    mean = 1.0 / num_data_ranks(row) if row["grad_reduce"] == "mean" else 1.0
    factor = 1 / DIVISOR if row["reduction"] == "divide factor" else mean
    return 2 * factor if row["reduction"] == "reduce hook" else factor


def own_grads(net: nn.Module, row: Mapping[str, str], *at: int) -> tuple[float, dict[str, Tensor]]:
    """A rank's loss, and gradients of what it used, on one micro-batch: (step, micro-batch, rank)."""
    compute, _ = dtypes_of(row)
    cast: dict[str, Tensor] = {}
    for name, param in net.named_parameters():
        keeps = compute is None or (row["ignored"] == "gain" and name == "gain")
        cast[name] = param.detach().to(param.dtype if keeps else compute).clone().requires_grad_(param.requires_grad)
    net.runs_tower = runs_tower(*at)
    with context_of(row):
        loss = loss_of(lambda ids: functional_call(net, cast, ids), batch(*at))
    trained = {name: value for name, value in cast.items() if value.requires_grad}
    grads = torch.autograd.grad(loss / num_micro(row), list(trained.values()), allow_unused=True)
    return loss.item(), {name: grad for name, grad in zip(trained, grads, strict=True) if grad is not None}


def add_up(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum, in pairs, rounded once for each of two levels as over shards and replicas."""
    wide = [p.float() if dtype == BF16 else p.to(dtype) for p in parts]
    if len(wide) == 1:
        return wide[0]
    half = len(wide) // 2
    left, right = (add_up(each, dtype) for each in (wide[:half], wide[half:]))
    return (left + right).to(dtype)


def reduced(grid: Sequence[Sequence[Tensor]], row: Mapping[str, str], own: torch.dtype) -> Tensor:
    """The gradient of a parameter of dtype `own`, from those of each micro-batch and rank."""
    reduce = dtypes_of(row)[1] or own
    grid = [[each.to(reduce) for each in ranks] for ranks in grid]
    if row["accumulation"] in ("no_sync", "set sync") and len(grid) > 1:
        grid = [[(a + b) for a, b in zip(*grid, strict=True)]]
    sums = [add_up(ranks, reduce).to(own) for ranks in grid]
    return sum(sums[1:], sums[0])


def compiled(row: Mapping[str, str], function: Any) -> Any:
    """A step as the row's program calls it; compiled, Adam's bias corrections are in fp32."""
    if row["compile"] != "step":
        return function
    compiled = torch.compile(function, backend="aot_eager")

    def run(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dynamo's own
            return compiled(*args)

    return run


def clip(row: Mapping[str, str], params: list[nn.Parameter]) -> float:
    if row["clip"] == "value":
        nn.utils.clip_grad_value_(params, MAX_VALUE)
    if row["clip"] in ("dshard", "torch"):
        return nn.utils.clip_grad_norm_(params, MAX_NORM).item()
    return 0.0


def train(row: Mapping[str, str]) -> Result:
    """The training of a row, in one process."""
    if row["compile"] == "step":
        torch._dynamo.reset()  # else rows before this one decide what is compiled again, and when that is given up
    net = build(row)
    if row["use"] == "gathered":
        with torch.no_grad():
            net.norm.weight.mul_(0.5)
    params = {n: p for n, p in net.named_parameters() if p.requires_grad}
    start = {n: p.detach().clone() for n, p in net.named_parameters()}
    optimizers = optimizers_of(row, net)
    losses: list[list[list[float]]] = []
    norms = []
    for step in range(NUM_STEPS):
        grid = [
            [own_grads(net, row, step, micro, rank) for rank in range(num_data_ranks(row))]
            for micro in range(num_micro(row))
        ]
        losses.append([[loss for loss, _ in ranks] for ranks in grid])
        for name, param in params.items():
            none = torch.zeros_like(param, dtype=dtypes_of(row)[0])
            param.grad = None
            if any(name in grads for ranks in grid for _, grads in ranks):
                parts = [[grads.get(name, none) for _, grads in ranks] for ranks in grid]
                param.grad = reduced(parts, row, param.dtype) * scale_of_param(row, name)
            if row["use"] == "penalty":
                param.grad = penalty_grad(row, name, param) + (0 if param.grad is None else param.grad)
        norms.append(clip(row, list(params.values())))
        for optimizer in optimizers:
            compiled(row, optimizer.step)()
    weights = {n: p.detach() for n, p in net.named_parameters()}
    return Result(losses, norms, start, weights, {n: p.grad for n, p in params.items() if p.grad is not None})


def scale_of_param(row: Mapping[str, str], name: str) -> float:
    """The same for one parameter: the program itself reduces what `fully_shard` ignores."""
    is_plain = row["ignored"] == "gain" and name == "gain"
    return scale_of(dict(row) | {"reduction": "none"}) if is_plain else scale_of(row)


def penalty_grad(row: Mapping[str, str], name: str, param: Tensor) -> Tensor:
    """Of `PENALTY` times the sum of squares, once per rank and step."""
    return 2 * PENALTY * param.detach() * num_data_ranks(row) * scale_of_param(row, name)
