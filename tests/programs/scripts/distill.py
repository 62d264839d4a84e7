"""Distillation: a frozen teacher in bf16, and a student that learns its logits and the labels."""

import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

BATCH, FEATURES, CLASSES, HEAT = 16, 12, 6, 2.0


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def network(width: int, depth: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, width), *(Residual(width) for _ in range(depth)), nn.Linear(width, CLASSES)
    )


def shard(model: nn.Sequential, bf16: bool) -> nn.Sequential:
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model[1:-1]:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=replace(policy, output_dtype=torch.float32 if bf16 else None))


def main(steps: int = 6, bf16: bool = True) -> dict[str, Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    teacher, student = network(32, 3).requires_grad_(False).eval(), network(16, 2)
    if bf16:
        teacher = teacher.to(torch.bfloat16)
    shard(teacher, bf16=False)
    shard(student, bf16)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    losses = []
    for step in range(steps):
        x = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]
        labels = x[:, :CLASSES].argmax(1)
        with torch.inference_mode():
            targets = teacher(x.to(next(teacher.parameters()).dtype)).to(x.dtype)
        logits = student(x)
        soft = F.kl_div((logits / HEAT).log_softmax(1), (targets / HEAT).softmax(1).clone(), reduction="batchmean")
        hard = F.cross_entropy(logits, labels)
        loss = 0.5 * HEAT**2 * soft + 0.5 * hard
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        both = torch.stack([soft.detach(), hard.detach()])
        dist.all_reduce(both)
        losses.append((both / world_size).tolist())
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {"losses": losses, "weights": get_model_state_dict(student, options=whole)}
