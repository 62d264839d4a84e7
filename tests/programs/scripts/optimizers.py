"""Optimizers of one's own: one step per parameter inside of backward, and orthogonal updates of whole matrices."""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

WIDTH, BATCH = 16, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))).square())


def step_in_backward(model: nn.Module) -> None:
    """Each parameter is updated, and its gradient freed, as soon as the gradient is there."""
    optimizers = {param: torch.optim.AdamW([param], lr=1e-2) for param in model.parameters()}

    def update(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)


def orthogonal(matrix: Tensor) -> Tensor:
    """Newton and Schulz's iteration."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(4):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(param)
                buffer = state["momentum"]
                buffer.lerp_(param.grad, 1 - group["momentum"])
                update = param.grad.lerp(buffer, group["momentum"])
                if isinstance(update, DTensor):
                    whole = orthogonal(update.full_tensor())
                    update = distribute_tensor(whole, update.device_mesh, update.placements)
                else:
                    update = orthogonal(update)
                param.mul_(1 - group["lr"] * 0.1)
                param.add_(update, alpha=-group["lr"])


def statistics(model: nn.Module) -> list[float]:
    """What is logged of gradients and weights, every step."""
    values = []
    for param in model.parameters():
        for value in (param, param.grad):
            if value is not None:
                size = value.detach().abs().mean()
                values.append((size.full_tensor() if isinstance(size, DTensor) else size).item())
    return values


def main(how: str, steps: int = 5) -> dict[str, Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, WIDTH), *(Block() for _ in range(2)), nn.Linear(WIDTH, 8))
    for block in model[1:-1]:
        fully_shard(block)
    fully_shard(model)
    optimizers: list[Any] = []
    if how == "in backward":
        step_in_backward(model)
    else:
        matrices = [param for param in model.parameters() if param.ndim == 2]
        others = [param for param in model.parameters() if param.ndim < 2]
        optimizers = [Muon(matrices), torch.optim.Adam(others, lr=1e-2)]
    log: dict[str, Any] = {"losses": [], "statistics": []}
    for step in range(steps):
        x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]
        loss = F.mse_loss(model(x), x.roll(1, 1))
        loss.backward()
        log["statistics"].append(statistics(model))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        log["losses"].append((total / world_size).item())
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {**log, "weights": get_model_state_dict(model, options=whole)}
