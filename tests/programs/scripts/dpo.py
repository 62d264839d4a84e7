"""A DPO step: a policy, and a frozen reference that was copied from it."""

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

VOCAB, LENGTH, PROMPT, WIDTH, PAIRS, BETA = 40, 10, 4, 24, 8, 0.5


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.size(1)))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def pairs(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    chosen = torch.randint(VOCAB, (PAIRS, LENGTH), generator=generator)
    rejected = chosen.clone()
    rejected[:, PROMPT:] = torch.randint(VOCAB // 2, (PAIRS, LENGTH - PROMPT), generator=generator)
    chosen[:, PROMPT:] = VOCAB // 2 + chosen[:, PROMPT:] // 2
    return chosen.chunk(world_size)[rank], rejected.chunk(world_size)[rank]


def log_probs(model: nn.Module, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    """Of both answers, with one forward."""
    tokens = torch.cat([chosen, rejected])
    logits = model(tokens[:, :-1]).log_softmax(-1)
    each = logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return each[:, PROMPT - 1 :].sum(-1).chunk(2)


def dpo_loss(policy: nn.Module, reference: nn.Module, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        ref_chosen, ref_rejected = log_probs(reference, chosen, rejected)
    pi_chosen, pi_rejected = log_probs(policy, chosen, rejected)
    margin = BETA * ((pi_chosen - ref_chosen) - (pi_rejected - ref_rejected))
    return -F.logsigmoid(margin).mean(), margin.detach().mean()


def precision(bf16: bool, output_dtype: torch.dtype) -> MixedPrecisionPolicy:
    if not bf16:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=output_dtype)


def shard(model: Any, bf16: bool) -> None:
    for layer in model.layers:
        fully_shard(layer, mp_policy=precision(bf16, torch.bfloat16))
    fully_shard(model, mp_policy=precision(bf16, torch.float32))


def main(steps: int = 5, bf16: bool = False, copy_sharded: bool = False) -> dict[str, Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    policy = Policy()
    if not copy_sharded:
        reference = copy.deepcopy(policy).requires_grad_(False).eval()
        shard(reference, bf16)
    shard(policy, bf16)
    if copy_sharded:
        reference = copy.deepcopy(policy).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.0)
    log: dict[str, Any] = {"losses": [], "margins": []}
    for step in range(steps):
        loss, margin = dpo_loss(policy, reference, *pairs(step, rank, world_size))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        both = torch.stack([loss.detach(), margin])
        dist.all_reduce(both)
        for key, value in zip(log, (both / world_size).tolist(), strict=True):
            log[key].append(value)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {**log, "weights": [get_model_state_dict(model, options=whole) for model in (policy, reference)]}
