"""Results of a benchmark: a table on the terminal, JSON with a header, and a plot where matplotlib is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dshard
from benchmarks.measure import Summary


@dataclass(frozen=True, slots=True)
class Bars:
    """Groups of bars: ``values[group][name]``; a name that a group lacks has no bar there."""

    title: str
    unit: str
    values: Mapping[str, Mapping[str, float | None]]


def _revision() -> str | None:
    """The git revision of the working directory, if it is in a repository."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None  # no git
    return done.stdout.strip() or None


@dataclass(frozen=True, slots=True)
class Output:
    """Place for results.

    Args:
        command: The command line, for the header.
        folder: For the files, which exists; None writes nothing.
    """

    command: str
    folder: Path | None

    def header(self, **facts: Any) -> dict[str, Any]:
        """Hardware, versions and command of a run, and what else is said."""
        return {
            "command": self.command,
            "dshard": dshard.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "num_cpus": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "revision": _revision(),
            **facts,
        }

    def write(self, name: str, content: Mapping[str, Any], panels: Sequence[Bars]) -> None:
        """Write ``name.json`` and ``name.png`` and say so, unless nothing is to be written."""
        if self.folder is None:
            return
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"\nwrote {path}")
        if importlib.util.find_spec("matplotlib") is None:
            print("no plot: matplotlib is not installed. Run: pip install 'dshard[cli]'")
            return
        plot = self.folder / f"{name}.png"
        draw(plot, panels)
        print(f"wrote {plot}")


def table(columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """Text: a row's name to the left, cells to the right of their columns."""
    first = max(map(len, rows), default=0)
    widths = [max([len(column), *(len(cells[i]) for cells in rows.values())]) for i, column in enumerate(columns)]
    lines = []
    for name, cells in {"": columns, **rows}.items():
        lines.append("  ".join([f"{name:<{first}}", *(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))]))
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def timing_table(rows: Mapping[str, Summary], *, with_exposed: bool = False) -> str:
    """Medians and quartiles as text, and exposed time if asked for; ``-`` where it is not known."""
    columns = {"median ms": "median_ms", "q1": "q1_ms", "q3": "q3_ms"}
    if with_exposed:
        columns["exposed ms"] = "exposed_ms"
    return table(list(columns), {name: [_cell(row.get(key)) for key in columns.values()] for name, row in rows.items()})


def bars_of(title: str, results: Mapping[str, Mapping[str, Summary]], key: str, unit: str = "ms, median") -> Bars:
    """Bars of one column of a table's rows; a row that lacks it has no bar."""
    return Bars(
        title, unit, {name: {kind: row.get(key) for kind, row in rows.items()} for name, rows in results.items()}
    )


def _number(value: float, _: object = None) -> str:
    """A number without an exponent: 3.14, 98.7, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _draw_bars(axes: Any, panel: Bars, colors: Mapping[str, Any]) -> None:
    """Draw horizontal bars, grouped by row, each with its number."""
    names = list(dict.fromkeys(name for group in panel.values.values() for name in group))
    width = 0.85 / max(1, len(names))
    for i, name in enumerate(names):
        places = [row + (i - (len(names) - 1) / 2) * width for row in range(len(panel.values))]
        found = [(place, group.get(name)) for place, group in zip(places, panel.values.values(), strict=True)]
        drawn = [(place, value) for place, value in found if value is not None]
        axes.barh([p for p, _ in drawn], [v for _, v in drawn], width * 0.9, label=name, color=colors[name])
        for place, value in drawn:
            axes.annotate(f" {_number(value)}", (value, place), va="center", fontsize=6)
    axes.set_yticks(range(len(panel.values)), list(panel.values))
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.xaxis.set_major_formatter(_number)
    axes.set_xlabel(panel.unit)


def figure_of(panels: Sequence[Bars]) -> Any:
    """Some panels side by side, and below them one legend for all; a figure of matplotlib's, to be closed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for panel in panels for group in panel.values.values() for name in group))
    colors = {name: matplotlib.colormaps["tab20"](i % 20) for i, name in enumerate(names)}  # one in all panels
    num_bars = max((sum(map(len, panel.values.values())) for panel in panels), default=0)
    size = (6.5 * len(panels), max(3.8, 1.2 + 0.22 * num_bars))
    figure, all_axes = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    handles: dict[str, Any] = {}
    for axes, panel in zip(all_axes[0], panels, strict=True):
        _draw_bars(axes, panel, colors)
        axes.set_title(panel.title, fontsize=10)
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    handles.pop("", None)
    if handles:
        columns = min(len(handles), 5 * len(panels))
        place = {"loc": "outside lower center", "ncols": columns, "frameon": False, "fontsize": 7}
        figure.legend(list(handles.values()), list(handles), **place)
    return figure


def draw(path: Path, panels: Sequence[Bars]) -> None:
    """Write a figure of some panels; the suffix of ``path`` says the format."""
    figure = figure_of(panels)
    from matplotlib import pyplot

    figure.savefig(path, dpi=130)
    pyplot.close(figure)
