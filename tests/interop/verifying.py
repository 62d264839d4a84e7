"""What `verify_sharding` says of models of `transformers`; `python -m tests.interop.verifying` prints it."""

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dshard.testing import WorldPool, verify_sharding
from tests.interop import models

SETTINGS = ("full", "mix", "accumulation", "checkpointing", "clipping")
_LARGE = ("t5", "clip", "whisper")  # two stacks: trained for one step, to keep to some ten seconds
_WITH_CACHE = ("t5", "whisper")  # which a block that is computed again would find filled


def build(name: str) -> nn.Module:
    return models.build(name).float()


def batch(name: str, has_cache: bool, rank: int, step: int) -> dict[str, Any]:
    made: dict[str, Any] = models.batch(name, step, rank)
    made = {key: value.float() if value.is_floating_point() else value for key, value in made.items()}
    return made if has_cache or name not in _WITH_CACHE else made | {"use_cache": False}


def loss_of(name: str, output: Any) -> Tensor:
    """The model's own loss; for CLIP, whose loss couples the examples of a batch, one that does not."""
    return (output.text_embeds * output.image_embeds).sum(-1).mean() if name == "clip" else output.loss


def step_in_parts(name: str, num_parts: int, model: nn.Module, optimizer: Optimizer, inputs: dict[str, Any]) -> Tensor:
    """A step as a user writes it, with micro-batches."""
    optimizer.zero_grad()
    losses = []
    for i in range(num_parts):
        part = {key: value.chunk(num_parts)[i] if isinstance(value, Tensor) else value for key, value in inputs.items()}
        losses.append(loss_of(name, model(**part)))
        (losses[-1] / num_parts).backward()
    optimizer.step()
    return torch.stack(losses).mean()


def num_steps(name: str) -> int:
    return 1 if name in _LARGE else 2


def verify(
    pool: WorldPool, name: str, settings: tuple[str, ...] = SETTINGS, *, has_cache: bool = False, **options: Any
) -> Any:
    """The report on a model, in fp32 on two ranks."""
    factory, sample = partial(build, name), partial(batch, name, has_cache)
    given = {"worlds": (2,), "steps": num_steps(name), "loss": partial(loss_of, name)} | options
    return verify_sharding(factory, sample, settings=settings, pool=pool, **given)


def verify_parts(pool: WorldPool, name: str) -> Any:
    """The report on a step with two micro-batches, beside one on the whole batch."""
    step, whole = (partial(step_in_parts, name, num) for num in (2, 1))
    return verify(pool, name, ("full",), step=step, oracle_step=whole)


def line(name: str, report: Any) -> str:
    """Of a table: what came of each setting."""
    words = []
    for row in report.rows:
        said = row.skipped or ("ok" if row.difference is None else str(row.difference).partition("\n")[0])
        words.append(f"{row.setting}: {said}")
    return f"{name:<10} {', '.join(words)} ({sum(row.num_compared for row in report.rows)} quantities)"


if __name__ == "__main__":
    with WorldPool(group_timeout_s=60.0) as pool:
        for each in models.MODELS:
            sys.stdout.write(f"{line(each, verify(pool, each))}\n")
