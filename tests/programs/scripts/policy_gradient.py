"""Reinforcement learning: a plain copy of the policy samples, and gets the weights of the sharded one every round."""

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

VOCAB, PROMPTS, ANSWER, WIDTH = 24, 8, 6, 24


class Policy(nn.Module):
    """Logits of the next token, and the value of each state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(VOCAB, WIDTH), nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head, self.value = nn.Linear(WIDTH, VOCAB), nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        states, _ = self.cell(self.embed(tokens))
        return self.head(states), self.value(states).squeeze(-1)


@torch.no_grad()
def sync(policy: nn.Module, actor: nn.Module) -> None:
    """As to an inference engine: parameter by parameter."""
    targets = dict(actor.named_parameters())
    for name, param in policy.named_parameters():
        value = param.full_tensor() if isinstance(param, DTensor) else param
        targets[name].copy_(value)


@torch.no_grad()
def sample(actor: nn.Module, step: int, rank: int, world_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (PROMPTS, 2), generator=generator).chunk(world_size)[rank]
    uniform = torch.rand(ANSWER, PROMPTS, VOCAB, generator=generator).chunk(world_size, 1)[rank]
    for noise in uniform:
        logits, _ = actor(tokens)
        token = (logits[:, -1] - (-noise.log()).log()).argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, token], 1)
    return tokens


def answered(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    logits, values = model(tokens[:, :-1])
    each = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return each[:, 1:], values[:, 1:]


def main(rounds: int = 3, epochs: int = 2, clip: float = 0.2) -> dict[str, Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    policy = Policy()
    actor = copy.deepcopy(policy).requires_grad_(False)
    fully_shard(policy.cell)
    fully_shard(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-2)
    log: dict[str, Any] = {"losses": [], "rewards": [], "tokens": []}
    for step in range(rounds):
        sync(policy, actor)
        tokens = sample(actor, step, rank, world_size)
        old, _ = answered(actor, tokens)
        reward = (tokens[:, 2:] % 3 == 0).to(old.dtype).mean(1, keepdim=True)
        for _ in range(epochs):
            new, values = answered(policy, tokens)
            ratio, advantage = (new - old).exp(), (reward - values).detach()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
            loss = -gain.mean() + 0.5 * F.mse_loss(values, reward.expand_as(values))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
            both = torch.stack([loss.detach(), reward.mean()])
            dist.all_reduce(both)
            log["losses"].append((both[0] / world_size).item())
        log["rewards"].append((both[1] / world_size).item())
        everyones = [torch.empty_like(tokens) for _ in range(world_size)]
        dist.all_gather(everyones, tokens)
        log["tokens"].append(torch.cat(everyones))
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {**log, "weights": get_model_state_dict(policy, options=whole)}
