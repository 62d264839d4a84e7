"""A random training program on 2 ranks, and what of it is left when everything but the training steps is taken out."""

import random
from dataclasses import dataclass

__all__ = ["BEGINNING", "STRATEGIES", "Step", "plan", "strategy_of", "survivors"]

STRATEGIES = ("full", "keep", "zero1", "zero2", "ddp", "hybrid(1)", "mixed", "split(2)")
FAILURES = ("forward", "loss", "backward", "hook", "recompute", "step")

# What is done between two steps, and how often.
BETWEEN = {
    "evaluate": 6,
    "save": 2,
    "save asynchronously": 2,
    "load": 2,
    "safetensors": 1,
    "switch": 4,
    "gathered": 3,
    "write back": 3,
    "copy model": 2,
    "copy state": 3,
    "second optimizer": 3,
    "second model": 1,
    "iter_full": 3,
    "full_tensor": 3,
    "hooks": 3,
    "recompute": 4,
    "state_dict": 2,
    "failing evaluation": 2,
    "failing scope": 2,
    "failing call": 2,
}

# What programs begin with, one a step: everything, so that what is made at its first use is there from then on.
_EVERYTHING = [*[(name, drawn) for drawn in (0.1, 0.5, 0.9) for name in BETWEEN], *[(f, 0.0) for f in FAILURES * 2]]
BEGINNING = len(_EVERYTHING)


@dataclass(frozen=True, slots=True)
class Step:
    """One training step, and what is done ahead of it.

    Args:
        index: Says which batches it sees.
        before: Names of BETWEEN, with what they draw.
        failure: Where it raises, or None; such a step is skipped.
        num_batches: All but the last without sync.
        clips: Whether gradients are clipped.
        is_split: Whether weights are gathered in slices, which rounds otherwise.
    """

    index: int
    before: tuple[tuple[str, float], ...]
    failure: str | None
    num_batches: int
    clips: bool
    is_split: bool


def strategy_of(draw: float) -> str:
    return STRATEGIES[int(draw * len(STRATEGIES))]


def plan(seed: int, num_steps: int, *, failures: float = 0.06, busy: float = 0.5) -> list[Step]:
    """A program: the beginning, and then steps of which the share `busy` has something ahead of it, or two things."""
    draw = random.Random(seed)
    names, weights = list(BETWEEN), list(BETWEEN.values())
    steps, strategy = [], "full"
    for index in range(num_steps):
        count = draw.choices((0, 1, 2), (1 - busy, busy * 0.7, busy * 0.3))[0]
        before = [(name, draw.random()) for name in draw.choices(names, weights, k=count)]
        failure = draw.choice(FAILURES) if draw.random() < failures else None
        if index < BEGINNING:
            name, drawn = _EVERYTHING[index]
            before, failure = ([(name, drawn)], None) if name in BETWEEN else ([], name)
        before.sort(key=lambda each: each[0] == "save asynchronously")  # nothing but a step may follow it
        for name, drawn in before:
            if name == "switch":
                strategy = strategy_of(drawn)
        if index == num_steps - 1 or any(name == "save asynchronously" for name, _ in before):
            failure = None
        num_batches, clips = draw.choice((1, 1, 1, 2)), draw.random() < 0.3
        steps.append(Step(index, tuple(before), failure, num_batches, clips, strategy.startswith("split")))
    return steps


def survivors(steps: list[Step]) -> list[Step]:
    """The steps that the last state came from: without those that raised, and those that a load took back."""
    chain: list[Step] = []
    saved: list[Step] | None = None
    for step in steps:
        for name, _ in step.before:
            if name.split()[0] == "save":
                saved = list(chain)
            elif name == "load" and saved is not None:
                chain = list(saved)
        if step.failure is None:
            chain.append(step)
    return chain
