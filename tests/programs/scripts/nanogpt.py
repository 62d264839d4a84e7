"""Training of a small GPT with tied embeddings, for DDP: autocast, accumulation, evaluation, best checkpoints."""

import math
import os
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel as distribute

VOCAB, BLOCK, WIDTH, LAYERS, HEADS = 48, 12, 24, 2, 3
BATCH, ACCUMULATION = 8, 2  # sequences of a micro-batch, over all ranks
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class CausalSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), CausalSelfAttention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        wte, wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.transformer = nn.ModuleDict(
            {"wte": wte, "wpe": wpe, "h": nn.ModuleList(Block() for _ in range(LAYERS)), "ln_f": nn.LayerNorm(WIDTH)}
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        wte.weight = self.lm_head.weight
        for name, param in self.named_parameters():
            if param.dim() >= 2:
                nn.init.normal_(param, std=0.02 / (2 * LAYERS) ** 0.5 if name.endswith("c_proj.weight") else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.transformer.wte(tokens) + self.transformer.wpe(torch.arange(tokens.size(1)))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizer(self, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def get_batch(split: str, number: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number + (10_000 if split == "val" else 0))
    data = (torch.arange(BATCH)[:, None] + torch.randint(7, (BATCH, BLOCK + 1), generator=generator)).cumsum(1) % VOCAB
    own = data.chunk(world_size)[rank]
    return own[:, :-1], own[:, 1:]


def mean_over_ranks(value: Tensor) -> float:
    value = value.detach().clone()
    dist.all_reduce(value)
    return (value / dist.get_world_size()).item()


@torch.no_grad()
def estimate_loss(model: nn.Module, context: Any, rank: int, world_size: int) -> dict[str, float]:
    model.eval()
    out = {}
    for split in ("train", "val"):
        with context():
            losses = [model(*get_batch(split, i, rank, world_size))[1] for i in range(2)]
        out[split] = mean_over_ranks(torch.stack(losses).mean())
    model.train()
    return out


def get_lr(step: int, total: int, top: float) -> float:
    if step < 2:
        return top * (step + 1) / 3
    return top * (0.1 + 0.45 * (1.0 + math.cos(math.pi * step / total)))


def save(folder: str, model: nn.Module, optimizer: Any, step: int, best: float) -> None:
    """Called on every rank; rank 0 writes."""
    checkpoint = {
        "model": get_model_state_dict(model, options=FULL),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FULL),
        "step": step,
        "best": best,
    }
    if int(os.environ["RANK"]) == 0:
        torch.save(checkpoint, f"{folder}/ckpt.pt")
    dist.barrier()


def load(folder: str, model: nn.Module, optimizer: Any) -> tuple[int, float]:
    checkpoint = torch.load(f"{folder}/ckpt.pt", weights_only=True)
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, checkpoint["model"], options=whole)
    set_optimizer_state_dict(model, optimizer, checkpoint["optimizer"], options=whole)
    return checkpoint["step"], checkpoint["best"]


def main(
    folder: str = "",
    steps: int = 8,
    total: int = 8,
    bf16: bool = False,
    resume: bool = False,
    patience: int = 99,
    top: float = 1e-2,
    grad_clip: float = 1.0,
) -> dict[str, Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1337)
    context: Any = (lambda: torch.autocast("cpu", dtype=torch.bfloat16)) if bf16 else nullcontext
    gpt = GPT()
    optimizer = gpt.configure_optimizer(top, 0.1)
    model: Any = distribute(gpt)
    step, best, worse = 0, math.inf, 0
    if resume:
        step, best = load(folder, model, optimizer)
    log: dict[str, Any] = {"losses": [], "evaluations": [], "norms": [], "saved": []}
    while step < steps and worse < patience:
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step, total, top)
        for micro in range(ACCUMULATION):
            inputs, targets = get_batch("train", ACCUMULATION * step + micro, rank, world_size)
            with model.no_sync() if micro < ACCUMULATION - 1 else nullcontext():
                with context():
                    _, loss = model(inputs, targets)
                (loss / ACCUMULATION).backward()
        if grad_clip:
            log["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        log["losses"].append(mean_over_ranks(loss))
        if step % 2 == 0:
            losses = estimate_loss(model, context, rank, world_size)
            log["evaluations"].append(losses)
            worse = worse + 1 if losses["val"] >= best else 0
            best = min(best, losses["val"])
            if folder and not worse:
                save(folder, model, optimizer, step, best)
                log["saved"].append(step)
    return {**log, "weights": get_model_state_dict(model, options=FULL)}
