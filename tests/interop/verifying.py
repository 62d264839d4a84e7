"""What `verify_sharding` says of models of `transformers`; `python -m tests.interop.verifying` prints it."""

import sys
from functools import partial
from typing import Any

from torch import Tensor, nn

from dshard.testing import WorldPool, verify_sharding
from tests.interop import models

SETTINGS = ("full", "mix", "accumulation", "checkpointing", "clipping")
_WITH_CACHE = ("t5", "whisper")  # which a block that is computed again would find filled


def build(name: str) -> nn.Module:
    return models.build(name).float()


def batch(name: str, has_cache: bool, rank: int, step: int) -> dict[str, Any]:
    made: dict[str, Any] = models.batch(name, step, rank)
    made = {key: value.float() if value.is_floating_point() else value for key, value in made.items()}
    return made if has_cache or name not in _WITH_CACHE else made | {"use_cache": False}


def loss_of_embeddings(output: Any) -> Tensor:
    """Of CLIP, whose own loss couples the examples of a batch."""
    return (output.text_embeds * output.image_embeds).sum(-1).mean()


def verify(pool: WorldPool, name: str, settings: tuple[str, ...] = SETTINGS, *, has_cache: bool = False) -> Any:
    """The report on a model, in fp32 on two ranks."""
    factory, sample = partial(build, name), partial(batch, name, has_cache)
    loss = loss_of_embeddings if name == "clip" else None
    return verify_sharding(factory, sample, worlds=(2,), settings=settings, steps=2, loss=loss, pool=pool)


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
