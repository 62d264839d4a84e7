"""Draws losses and memory with matplotlib, which is optional."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from dshard.cli.history import Outcome
from dshard.cli.report import largest
from dshard.cli.usage import UsageError
from dshard.planner.files import write_picture

_PARTS = {"parameters": "C2", "gradients": "C4", "optimizer": "C8"}  # other colors than those of losses
_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Checks that a plot can be drawn at the end, before anything starts.

    Raises:
        UsageError: the suffix is unknown or matplotlib is missing.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"--plot must end in one of {', '.join(_SUFFIXES)}, but it is {path}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, but it is not installed. Run: pip install 'dshard[cli]'.")


def draw(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Writes a figure of the runs' losses (left) and of the memory of the rank that holds most (right)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, memory) = pyplot.subplots(1, 2, figsize=(11, 4.2), width_ratios=(2, 1), layout="constrained")
    for outcome, style in zip(outcomes, ("-", "--"), strict=False):
        history = outcome.history
        (line,) = losses.plot(range(1, len(history.losses) + 1), history.losses, style, lw=1, label=outcome.name)
        losses.plot(
            list(history.validation), list(history.validation.values()), "o" + style, ms=4, color=line.get_color(),
            label=f"{outcome.name}, validation",
        )  # fmt: skip
    losses.set(xlabel="step", ylabel="loss per byte (nats)")
    losses.legend(frameon=False)
    losses.grid(alpha=0.3)
    names = [outcome.name for outcome in outcomes]
    bottoms = [0.0] * len(outcomes)
    for part, color in _PARTS.items():
        heights = [getattr(largest(outcome.memory), part) / 1e6 for outcome in outcomes]
        memory.bar(names, heights, 0.6, bottom=bottoms, label=part, color=color)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    memory.set(ylabel="MB per rank", ylim=(0, 1.35 * max(bottoms)))  # the legend goes above the bars
    memory.set_xlim(-0.8, max(1, len(names) - 1) + 0.8)
    memory.legend(frameon=False)
    write_picture(path, figure, dpi=150)
    pyplot.close(figure)
