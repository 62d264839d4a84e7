"""A classifier of images: an average of the weights is kept, swapped in to evaluate, and saved when it is the best."""

import os
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

BATCH, CLASSES, DECAY = 16, 4, 0.8
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Stage(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.GroupNorm(2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages, self.head = nn.Sequential(Stage(1, 8), Stage(8, 16)), nn.Linear(16, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(images).mean((2, 3)))


class Ema:
    """The average of a model's parameters, by hand."""

    def __init__(self, model: nn.Module, foreach: bool) -> None:
        self.params, self.foreach = list(model.parameters()), foreach
        self.average = [param.detach().clone() for param in self.params]

    @torch.no_grad()
    def update(self) -> None:
        if self.foreach:
            torch._foreach_lerp_(self.average, self.params, 1 - DECAY)
            return
        for average, param in zip(self.average, self.params, strict=True):
            average.lerp_(param, 1 - DECAY)

    @contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Any:
        kept = [param.detach().clone() for param in self.params]
        for param, average in zip(self.params, self.average, strict=True):
            param.copy_(average)
        yield
        for param, value in zip(self.params, kept, strict=True):
            param.copy_(value)


def batch(number: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    waves = torch.sin(torch.arange(8) * (labels[:, None] + 1) / torch.ones(()))[:, None, None]
    images = waves + 0.1 * torch.randn(BATCH, 1, 8, 8, generator=generator)
    return images.chunk(world_size)[rank], labels.chunk(world_size)[rank]


@torch.no_grad()
def evaluate(model: nn.Module, rank: int, world_size: int) -> list[float]:
    model.eval()
    images, labels = batch(999, rank, world_size)
    logits = model(images)
    found = torch.stack([F.cross_entropy(logits, labels), (logits.argmax(1) == labels).to(logits.dtype).mean()])
    model.train()
    dist.all_reduce(found)
    return (found / world_size).tolist()


def build(bf16: bool) -> Classifier:
    torch.manual_seed(0)
    model = Classifier()
    policy = last = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        last = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, output_dtype=torch.float32)
    for stage in model.stages:
        fully_shard(stage, mp_policy=policy)
    return fully_shard(model, mp_policy=last)


def main(steps: int = 6, how: str = "by hand", bf16: bool = False, folder: str = "") -> dict[str, Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = build(bf16)
    averaged: Any = None
    if how.startswith("averaged"):
        average = get_ema_multi_avg_fn(DECAY) if how == "averaged, ema" else get_swa_multi_avg_fn()
        averaged = AveragedModel(model, multi_avg_fn=average)
    ema = Ema(model, foreach=how == "foreach")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2, fused=how == "foreach")
    log: dict[str, Any] = {"losses": [], "evaluations": []}
    best = float("inf")
    for step in range(steps):
        images, labels = batch(step, rank, world_size)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        log["losses"].append(loss.item())
        if averaged is not None:
            averaged.update_parameters(model)
            log["evaluations"].append(evaluate(averaged, rank, world_size))
            continue
        ema.update()
        with ema.swapped_in():
            log["evaluations"].append(evaluate(model, rank, world_size))
            if log["evaluations"][-1][0] < best and folder:
                best = log["evaluations"][-1][0]
                state = get_model_state_dict(model, options=FULL)
                if rank == 0:
                    torch.save(state, f"{folder}/best.pt")
    mean = torch.tensor(log["losses"])
    dist.all_reduce(mean)
    log["losses"] = (mean / world_size).tolist()
    kept = averaged.module if averaged is not None else model
    return {**log, "weights": [get_model_state_dict(each, options=FULL) for each in (model, kept)]}
