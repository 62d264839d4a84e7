"""Classes of errors that raise nothing by themselves, each planted into three models of different kinds.

`python -m tests.testing.silent` prints what `verify_sharding` says of each.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from dshard.testing import WorldPool, verify_sharding
from tests.testing import silent_models as models
from tests.testing import silent_steps as steps
from tests.testing.silent_models import MODELS

DROPOUT = 0.1


@dataclass(frozen=True)
class Planted:
    """One class of errors: what `verify_sharding` is given, and words that have to be in what it says.

    Attributes:
        words: of every model's report.
        make: makes the model of a kind.
        body: of the model; None for a layer.
        bodies: of some kinds alone, where the others have by themselves what the class needs.
        sample: of a kind, rank and step; None for the kind's own.
        options: of `verify_sharding`.
        setting: of sharding.
    """

    words: tuple[str, ...]
    make: Callable[..., nn.Module] | None = None
    body: Callable[[], nn.Module] = models.plain_body
    bodies: dict[str, Callable[[], nn.Module]] = field(default_factory=dict)
    sample: Callable[..., Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    setting: str = "full"

    def arguments(self, kind: str) -> tuple[Any, Any]:
        # Where the batches of all ranks are one, random numbers would be others.
        dropout = 0.0 if self.options.get("step") else DROPOUT
        factory = partial(models.build, kind, self.bodies.get(kind, self.body), dropout)
        sample = models.sample(kind) if self.sample is None else partial(self.sample, kind)
        return (factory if self.make is None else partial(self.make, kind)), sample


def _step(step: Any, oracle_step: Any = None) -> dict[str, Any]:
    return {"step": step, "oracle_step": oracle_step}


_COUNTED = _step(steps.counted_mean)
PLANTED: dict[str, Planted] = {
    "weight kept as .data": Planted(("body (KeptWeight", "a copy of a weight"), body=models.KeptWeight),
    "branch by rank": Planted(("body (Branch", "depends on the rank", "rank 1"), body=models.Branch),
    "dropout seeded by rank": Planted(("body (SeededDropout", "depends on the rank"), body=models.SeededDropout),
    "tied weight untied": Planted(
        ("weight", "untied"), bodies=dict.fromkeys(("conv", "rnn"), models.Shared), options={"shard": steps.untied}
    ),
    "initial weights by rank": Planted(("first.", "DivergenceError"), make=steps.seeded_by_rank),
    "initialised on one rank": Planted(
        ("initial value of body.weight", "shards of rank 1 alone"), options={"shard": steps.drawn_anew}
    ),
    "module replaced after sharding": Planted(("body",), options={"shard": steps.replaced}),
    "parameter replaced": Planted(("body.weight", "another object"), options=_step(steps.ReplacesOnce(), steps.right)),
    "optimizer misses biases": Planted(
        ("has not moved", "no optimizer has it"), options={"optimizer": steps.without_biases}
    ),
    "frozen on one rank": Planted(("body", "DivergenceError"), options=_step(steps.freezes)),
    "same data on all ranks": Planted(("the same data",), sample=steps.repeated),
    "loss over unequal counts": Planted(("counts",), sample=steps.counted, options=_COUNTED),
    "loss divided by the ranks": Planted(
        ("0.5 times", "number of ranks"), options=_step(steps.divides_by_ranks, steps.right)
    ),
    "penalty over shards": Planted(("radient", "of shards"), options=_step(steps.decays_shards)),
    "accumulation not scaled": Planted(
        ("2 times", "number of micro-batches"), options=_step(steps.unscaled_parts, steps.right_whole)
    ),
    "gradients zeroed between parts": Planted(
        ("zeroed too early",), options=_step(steps.zeroes_between, steps.right_whole)
    ),
    "gradients never zeroed": Planted(("step 1", "old gradients"), options=_step(steps.never_zeroes, steps.right)),
    "gradients added twice": Planted(("2 times", "number of ranks"), options=_step(steps.reduces_twice), setting="ddp"),
    "no sync on the last part": Planted(("radient",), options=_step(steps.never_syncs, steps.right_whole)),
    "clipping before unscaling": Planted(("after unscaling",), options=_step(steps.clips_scaled, steps.right_clipped)),
    "clipping by norms of shards": Planted(
        ("direction", "norm of shards"), options=_step(steps.clips_shards, steps.right_clipped)
    ),
    "step skipped on one rank": Planted(
        ("DivergenceError", "all ranks must", "rank-local data"), options=_step(steps.skips)
    ),
    "learning rate by rank": Planted(("learning rate",), options=_step(steps.scales_rate)),
    "write through NumPy on one rank": Planted(
        ("body.weight", "shards of rank 0 alone", "writes"), options=_step(steps.writes_numpy)
    ),
    "average of stale values": Planted(("returned value", "another time"), options=_step(steps.StaleAverage())),
    "measured on one rank's rows": Planted(("returned value", "largest"), options=_step(steps.measures_own)),
}
# Classes of which nothing is said, for dshard computes what was meant.
HARMLESS = {
    "module replaced after sharding": "what is put below a sharded root is sharded at the next forward",
    "no sync on the last part": "the optimizer reads the gradients, and reading reduces what is owed",
}


def verify(pool: WorldPool, name: str, kind: str) -> str:
    """What is said of an error in a model; "" for nothing."""
    planted = PLANTED[name]
    report = verify_sharding(
        *planted.arguments(kind), worlds=(2,), settings=[planted.setting], steps=2, pool=pool, **planted.options
    )
    return "\n".join(map(str, report.differences))


def judged(name: str, said: str) -> str:
    """What a report is worth: "named", "found", "harmless" or "missed"."""
    if not said:
        return "harmless" if name in HARMLESS else "missed"
    return "named" if all(word in said for word in PLANTED[name].words) else "found"


def table(pool: WorldPool) -> Iterator[str]:
    """A line for each class and model, and one for all of them."""
    words: dict[str, list[str]] = {}
    for name in PLANTED:
        for kind in MODELS:
            said = verify(pool, name, kind)
            words.setdefault(name, []).append(judged(name, said))
            yield f"{name:<31} {kind:<4} {words[name][-1]:<8} {said.partition(chr(10))[0][:150]}"
    num_named = sum(set(each) == {"named"} for each in words.values())
    num_harmless = sum(set(each) == {"harmless"} for each in words.values())
    num = len(words) - num_harmless
    yield f"{num_named} of {num} classes are named in all {len(MODELS)} models; {num_harmless} are harmless"


if __name__ == "__main__":
    with WorldPool() as worlds:
        for line in table(worlds):
            sys.stdout.write(f"{line}\n")
