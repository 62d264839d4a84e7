"""Accelerate's loop: everything prepared, accumulation, clipping, metrics gathered from all ranks, a scheduler."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader, TensorDataset

FEATURES, CLASSES, ROWS, BATCH = 12, 4, 64, 8


def dataset(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.ReLU()) for _ in range(2)]
    return nn.Sequential(nn.Linear(FEATURES, 24), *layers, nn.Linear(24, CLASSES))


def evaluate(accelerator: Any, model: nn.Module, loader: Any) -> list[Tensor]:
    model.eval()
    with torch.no_grad():
        guesses = [accelerator.gather_for_metrics((model(x).argmax(1), labels)) for x, labels in loader]
    model.train()
    return [torch.cat(each) for each in zip(*guesses, strict=True)]


def main(world_size: int, sharded: bool = False, bf16: bool = False, epochs: int = 2) -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16" if bf16 else "no")
    model: Any = network()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Accelerate's scheduler makes as many steps at a time as there are processes.
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97 ** (step / world_size))
    loader: Any = DataLoader(dataset(1), batch_size=BATCH // world_size)
    held_out: Any = DataLoader(dataset(2), batch_size=BATCH // world_size)
    if sharded:
        from dshard import fully_shard

        model = accelerator.prepare_model(fully_shard(model), evaluation_mode=True)
        optimizer, scheduler, loader, held_out = accelerator.prepare(optimizer, scheduler, loader, held_out)
    else:
        model, optimizer, scheduler, loader, held_out = accelerator.prepare(
            model, optimizer, scheduler, loader, held_out
        )
    log: dict[str, Any] = {"losses": [], "norms": [], "rates": [], "guesses": []}
    for _ in range(epochs):
        for x, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    log["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 5.0)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            log["losses"].append(accelerator.gather(loss.detach()).mean().item())
        log["rates"].append(scheduler.get_last_lr()[0])
        log["guesses"].append(evaluate(accelerator, model, held_out)[0].tolist())
    plain = accelerator.unwrap_model(model)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {**log, "weights": get_model_state_dict(plain, options=whole)}
