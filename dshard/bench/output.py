"""Where a benchmark's results go: a table on the terminal, JSON with a header, and a plot where matplotlib is."""

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
from dshard.bench.common import Summary
from dshard.bench.plots import Panel, draw
from dshard.checkpoint.disk import write_whole


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

    def write(self, name: str, content: Mapping[str, Any], panels: Sequence[Panel]) -> None:
        """Write ``name.json`` and ``name.png`` and say so, unless nothing is to be written."""
        if self.folder is None:
            return
        path = self.folder / f"{name}.json"
        write_whole(path, (json.dumps(content, indent=1) + "\n").encode())
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
