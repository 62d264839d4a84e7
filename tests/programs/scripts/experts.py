"""A mixture of experts in a loop: a rank whose tokens go elsewhere never calls an expert."""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

WIDTH, EXPERTS, BATCH, CLASSES = 16, 6, 8, 5


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )
        self.called: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights, chosen = self.router(y).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):  # data decides
                self.called.add(number)
                out = out.index_add(0, rows, weights[rows, None] * expert(y[rows]))
        return x + out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Experts() for _ in range(2)), nn.Linear(WIDTH, CLASSES)
        self.extra = nn.Linear(WIDTH, CLASSES)  # of some batches alone

    def forward(self, x: Tensor, marked: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out = self.head(x)
        rows = marked.nonzero().squeeze(1)
        return out.index_add(0, rows, self.extra(x[rows])) if len(rows) else out


def main(steps: int = 5) -> dict[str, Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    log: dict[str, Any] = {"losses": [], "norms": [], "called": []}
    for step in range(steps):
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        marked = torch.arange(BATCH) < BATCH // 4  # all of them on the first rank
        x, marked = x.chunk(world_size)[rank], marked.chunk(world_size)[rank]
        loss = F.cross_entropy(model(x, marked), x[:, :CLASSES].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        log["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        log["called"].append(sorted((i, expert) for i, layer in enumerate(model.layers) for expert in layer.called))
        for layer in model.layers:
            layer.called.clear()
        total = loss.detach().clone()
        dist.all_reduce(total)
        log["losses"].append((total / world_size).item())
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {**log, "weights": get_model_state_dict(model, options=whole)}
