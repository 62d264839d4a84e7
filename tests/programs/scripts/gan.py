"""A GAN: two models, two optimizers, a discriminator that is frozen while the generator learns."""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

LATENT, BATCH = 8, 8


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(LATENT, 16 * 4 * 4), nn.GroupNorm(4, 16)
        self.up = nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1)
        self.out = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(z).unflatten(1, (16, 4, 4))))
        return torch.tanh(self.out(F.relu(self.up(x))))


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 4, 2, 1))
        self.head = nn.Linear(16 * 2 * 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(F.leaky_relu(self.down(images), 0.2).flatten(1)).squeeze(1)


def batch(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    centre = torch.rand(BATCH, 1, 1, 1, generator=generator)
    real = torch.sin(torch.arange(8) + 8 * centre).expand(-1, -1, 8, -1)
    z = torch.randn(BATCH, LATENT, generator=generator)
    mix = torch.rand(BATCH, 1, 1, 1, generator=generator)
    return tuple(each.chunk(world_size)[rank] for each in (real, z, mix))


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    between = torch.lerp(fake, real, mix).requires_grad_()
    (grad,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (grad.flatten(1).norm(dim=1) - 1).square().mean()


def policy(bf16: bool, output_dtype: torch.dtype) -> MixedPrecisionPolicy:
    if not bf16:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=output_dtype)


def freeze(model: nn.Module, frozen: bool) -> None:
    for param in model.parameters():
        param.requires_grad_(not frozen)


def reported(*values: Tensor) -> list[float]:
    both = torch.stack([value.detach() for value in values])
    dist.all_reduce(both)
    return (both / dist.get_world_size()).tolist()


def main(steps: int = 6, bf16: bool = False, penalty: float = 0.0) -> dict[str, Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    generator, critic = Generator(), Discriminator()
    for parent, child in ((generator, generator.stem), (critic, critic.down)):
        fully_shard(child, mp_policy=policy(bf16, torch.bfloat16))
        fully_shard(parent, mp_policy=policy(bf16, torch.float32))
    for_g = torch.optim.Adam(generator.parameters(), lr=5e-3, betas=(0.5, 0.999))
    for_d = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.999))
    losses = []
    for step in range(steps):
        real, z, mix = batch(step, rank, world_size)
        freeze(critic, frozen=False)
        fake = generator(z)
        d_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        if penalty:
            d_loss = d_loss + penalty * gradient_penalty(critic, real, fake.detach(), mix)
        for_d.zero_grad()
        d_loss.backward()
        for_d.step()
        freeze(critic, frozen=True)
        g_loss = F.softplus(-critic(fake)).mean()
        for_g.zero_grad()
        g_loss.backward()
        for_g.step()
        losses.append(reported(d_loss, g_loss))
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = [get_model_state_dict(model, options=whole) for model in (generator, critic)]
    return {"losses": losses, "weights": weights}
