"""What programs do around a model that is wrong and raises nothing: sharding, data, training steps."""

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

import dshard
from tests.testing.silent_models import ROWS, build, sample

# --- in how a model is built and sharded ---


def seeded_by_rank(kind: str) -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return build(kind)


def untied(model: Any, **options: Any) -> None:
    owner = model.head if model.kind == "lm" else model.body.other
    owner.weight = nn.Parameter(owner.weight.detach().clone())
    dshard.fully_shard(model, **options)


def replaced(model: Any, **options: Any) -> None:
    fresh = deepcopy(model.body)
    dshard.fully_shard(model, **options)
    model.body = deepcopy(fresh)


def drawn_anew(model: Any, **options: Any) -> None:
    dshard.fully_shard(model, **options)
    if dist.get_rank() == 1:  # as a checkpoint would be loaded, or an init run, by one rank
        model.body.weight.detach().to_local().normal_()


def without_biases(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if type(p) is nn.Parameter or p.ndim > 1], lr=1e-3)


# --- in data and loss ---


def repeated(kind: str, rank: int, step: int) -> Tensor:
    return sample(kind) if kind == "lm" else sample(kind) + step


def counted(kind: str, rank: int, step: int) -> tuple[Tensor, Tensor]:
    data = sample(kind)
    data = data.roll(rank + step, 0) if kind == "lm" else data + 0.1 * rank + 0.2 * step
    return data, (torch.arange(ROWS) <= rank).float()


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


def right_whole(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    """Of batch norms, parts are no whole."""
    has_norm = any(isinstance(module, _BatchNorm) for module in model.modules())
    return (right_parts if has_norm else right)(model, optimizer, batch)


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


def clips_shards(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = squares(model, batch)
    loss.backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    parts = [grad.to_local() if isinstance(grad, dshard.ShardedTensor) else grad for grad in grads]
    norm = torch.stack([part.norm() for part in parts]).norm()
    for part in parts:
        part.mul_(0.01 / norm)
    optimizer.step()
    return loss


def divides_by_ranks(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = squares(model, batch)
    (loss / dist.get_world_size()).backward()  # and gradients are averaged
    optimizer.step()
    return loss


def decays_shards(model: Any, optimizer: Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    weight = model.body.weight
    penalty = (weight.to_local() if isinstance(weight, dshard.ShardedTensor) else weight).square().sum()
    loss = squares(model, batch) + 0.1 * penalty
    loss.backward()
    optimizer.step()
    return loss


def skips(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = squares(model, batch)
    loss.backward()
    if dist.get_rank() == 0:  # as where each rank looks for infinities in what it has
        optimizer.step()
    return loss


def never_zeroes(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    loss = squares(model, batch)
    loss.backward()
    optimizer.step()
    return loss


def right_measured(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    with torch.no_grad():
        model(batch)
    return right(model, optimizer, batch)


def measures_own(model: nn.Module, optimizer: Optimizer, batch: Any) -> dict[str, Tensor]:
    with torch.no_grad():
        largest = model(batch).max()  # of this rank's rows alone
    return {"loss": right(model, optimizer, batch), "largest": largest}


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
