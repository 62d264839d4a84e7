"""Plots of results, with matplotlib, which is optional and imported when something is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Bars", "Lines", "Panel", "draw"]


@dataclass(frozen=True, slots=True)
class Bars:
    """Groups of bars: ``values[group][name]``; a name that a group lacks has no bar there."""

    title: str
    unit: str
    values: Mapping[str, Mapping[str, float | None]]


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines over a number: ``values[name][x]``, both axes logarithmic."""

    title: str
    unit: str
    x_name: str
    values: Mapping[str, Mapping[int, float]]


Panel = Bars | Lines

_HUES = {"unsharded": "C7", "plain": "C7", "DDP": "C2", "FSDP2": "C1", "dshard": "C0"}
_SHADES = {", no reshard": 0.6, ", root alone": 0.35, ", shards": 0.45, ", compiled": 0.6}


def _style(name: str) -> dict[str, Any]:
    """One hue per library in every plot, paler for its other ways."""
    hue = next((color for start, color in _HUES.items() if name.startswith(start)), "C4")
    return {"color": hue, "alpha": next((alpha for end, alpha in _SHADES.items() if name.endswith(end)), 1.0)}


def _draw_bars(axes: Any, panel: Bars) -> None:
    names = list(dict.fromkeys(name for group in panel.values.values() for name in group))
    width = 0.85 / max(1, len(names))
    named = set()
    for i, name in enumerate(names):
        for j, group in enumerate(panel.values.values()):
            value = group.get(name)
            if value is not None:
                place = j + (i - (len(names) - 1) / 2) * width
                axes.barh(place, value, width * 0.9, label=None if name in named else name, **_style(name))
                named.add(name)
                axes.annotate(f" {value:.3g}", (value, place), va="center", fontsize=6)
    axes.set_yticks(range(len(panel.values)), list(panel.values))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(panel.unit)


def _draw_lines(axes: Any, panel: Lines) -> None:
    for name, points in panel.values.items():
        axes.plot(list(points), list(points.values()), "o-", ms=4, label=name, **_style(name))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    xs = sorted({x for points in panel.values.values() for x in points})
    axes.set_xticks(xs, [str(x) for x in xs])
    axes.set_xlabel(panel.x_name)
    axes.set_ylabel(panel.unit)
    axes.grid(alpha=0.3)


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """Write a figure of some panels, side by side; the suffix of ``path`` says the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    num_bars = max((sum(map(len, p.values.values())) for p in panels if isinstance(p, Bars)), default=0)
    size = (6.5 * len(panels), max(3.8, 1.2 + 0.22 * num_bars))
    figure, all_axes = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axes, panel in zip(all_axes[0], panels, strict=True):
        if isinstance(panel, Bars):
            _draw_bars(axes, panel)
        else:
            _draw_lines(axes, panel)
        axes.set_title(panel.title, fontsize=10)
        if any(axes.get_legend_handles_labels()[1]):
            axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
