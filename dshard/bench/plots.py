"""Plots of results, with matplotlib, which is optional and imported when something is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dshard.planner.files import write_picture
from dshard.planner.texts import number_text


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
_OTHER_HUES = ("C4", "C9", "C8", "C3", "C5", "C6")  # of names that are no library's
_OTHER_SHADES = (1.0, 0.55, 0.3)
_TICKS = (1.0, 2.0, 3.0, 5.0)  # of each power of ten


def _styles(panels: Sequence[Panel]) -> dict[str, dict[str, Any]]:
    """A look for each name, the same in all panels: one hue per library, paler for its other ways."""
    groups = [g for p in panels for g in ([p.values] if isinstance(p, Lines) else p.values.values())]
    found: dict[str, dict[str, Any]] = {}
    taken = set[tuple[str, float]]()
    others = [(hue, shade) for shade in _OTHER_SHADES for hue in _OTHER_HUES]
    for name in dict.fromkeys(name for group in groups for name in group):
        hue = next((color for start, color in _HUES.items() if name.startswith(start)), None)
        shade = next((alpha for end, alpha in _SHADES.items() if name.endswith(end)), 1.0)
        wanted = [(hue, each) for each in (shade, *_OTHER_SHADES)] if hue is not None else others
        color, alpha = next((each for each in (*wanted, *others) if each not in taken), wanted[0])
        taken.add((color, alpha))
        found[name] = {"color": color, "alpha": alpha}
    return found


def _draw_bars(axes: Any, panel: Bars, styles: Mapping[str, Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(name for group in panel.values.values() for name in group))
    width = 0.85 / max(1, len(names))
    named = set()
    for i, name in enumerate(names):
        for j, group in enumerate(panel.values.values()):
            value = group.get(name)
            if value is not None:
                place = j + (i - (len(names) - 1) / 2) * width
                axes.barh(place, value, width * 0.9, label=None if name in named else name, **styles[name])
                named.add(name)
                axes.annotate(f" {number_text(value)}", (value, place), va="center", fontsize=6)
    axes.set_yticks(range(len(panel.values)), list(panel.values))
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.xaxis.set_major_formatter(_plain)
    axes.set_xlabel(panel.unit)


def _draw_lines(axes: Any, panel: Lines, styles: Mapping[str, Mapping[str, Any]]) -> None:
    from matplotlib import ticker

    for i, (name, points) in enumerate(panel.values.items()):
        pale = styles[name]["alpha"] < 1  # in dashes that leave others to be seen, where lines are the same
        dashes = (4 * i, (4, 4)) if pale else "-"
        axes.plot(list(points), list(points.values()), marker="o", ls=dashes, ms=4, label=name, **styles[name])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    xs = sorted({x for points in panel.values.values() for x in points})
    axes.set_xticks(xs, [number_text(x) for x in xs])
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=_TICKS))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter(_plain)
    axes.set_xlabel(panel.x_name)
    axes.set_ylabel(panel.unit)
    axes.grid(alpha=0.3)


def _plain(value: float, _: object) -> str:
    return number_text(value)


def figure_of(panels: Sequence[Panel]) -> Any:
    """Some panels side by side, and below them one legend for all; a figure of matplotlib's, to be closed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    num_bars = max((sum(map(len, p.values.values())) for p in panels if isinstance(p, Bars)), default=0)
    size = (6.5 * len(panels), max(3.8, 1.2 + 0.22 * num_bars))
    figure, all_axes = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    styles = _styles(panels)
    handles: dict[str, Any] = {}
    for axes, panel in zip(all_axes[0], panels, strict=True):
        if isinstance(panel, Bars):
            _draw_bars(axes, panel, styles)
        else:
            _draw_lines(axes, panel, styles)
        axes.set_title(panel.title, fontsize=10)
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    handles.pop("", None)
    if handles:
        columns = min(len(handles), 5 * len(panels))
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=columns, frameon=False, fontsize=7
        )
    return figure


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """Write a figure of some panels, side by side; the suffix of ``path`` says the format."""
    figure = figure_of(panels)
    from matplotlib import pyplot

    write_picture(path, figure, dpi=130)
    pyplot.close(figure)
