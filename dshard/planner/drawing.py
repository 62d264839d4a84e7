"""Pictures of simulated steps, with matplotlib, which is optional and imported when something is drawn."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dshard.errors import PlanError
from dshard.planner.files import write_picture
from dshard.planner.texts import bytes_text, number_text
from dshard.planner.timeline import Timeline

_COLORS = {"forward": "C0", "backward": "C3", "step": "C7", "gather": "C2", "slices": "C8", "reduce": "C1"}
_ROWS = {"compute": 1, "comm": 0}
_STREAMS = {"compute": "computation", "comm": "communication"}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise PlanError("plot: needs matplotlib, but it is not installed. Run: pip install 'dshard[cli]'.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_timeline(path: Path, timeline: Timeline, *, title: str, limit_bytes: int = 0) -> None:
    """Both streams over time, and the bytes that live.

    Args:
        path: Its suffix says the format.
        timeline: A simulated step.
        title: Above it.
        limit_bytes: Drawn as a line; 0 for none.
    """
    pyplot = _pyplot()
    figure, (streams, memory) = pyplot.subplots(
        2, 1, figsize=(11, 4.8), sharex=True, height_ratios=(1, 1.2), layout="constrained"
    )
    unit, scale = ("s", 1.0) if timeline.step_s >= 10 else ("ms", 1e3)
    for kind, color in _COLORS.items():
        for stream, row in _ROWS.items():
            found = [s for s in timeline.segments if s.kind == kind and s.stream == stream]
            if found:
                spans = [(s.start_s * scale, (s.stop_s - s.start_s) * scale) for s in found]
                edge = "white" if stream == "compute" else color  # the latter so that no short one gets lost
                streams.broken_barh(
                    spans, (row - 0.4, 0.8), facecolors=color, edgecolors=edge, linewidth=0.3, label=kind
                )
    streams.set_yticks(list(_ROWS.values()), [_STREAMS[name] for name in _ROWS])
    streams.legend(frameon=False, fontsize=8, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    events = sorted(timeline.memory, key=lambda event: event.start_s)
    times = [event.start_s * scale for event in events] + [timeline.step_s * scale]
    sizes = [event.num_bytes / 2**30 for event in events]
    memory.step(times, [*sizes, *sizes[-1:]], where="post", lw=1, label="memory")
    if limit_bytes:
        memory.axhline(limit_bytes / 2**30, color="C3", ls="--", lw=1, label=f"limit, {bytes_text(limit_bytes)}")
    memory.legend(frameon=False, fontsize=8, ncols=2, loc="lower right")
    memory.set(xlabel=unit, ylabel="GiB per rank", ylim=(0, None))
    for axis in (memory.xaxis, memory.yaxis):
        axis.set_major_formatter(_plain)
    figure.suptitle(title, fontsize=9, wrap=True)
    write_picture(path, figure, dpi=130)
    pyplot.close(figure)


@dataclass(frozen=True, slots=True)
class Scaled:
    """A step on some number of ranks.

    Args:
        tflops: TFLOP/s of each rank.
        peak_bytes: Of each rank.
    """

    tflops: float
    peak_bytes: int


def scaling_figure(points: Mapping[str, Mapping[int, Scaled]], *, title: str, limit_bytes: int = 0) -> Any:
    """TFLOP/s and peak bytes of each rank against the number of ranks; a figure of matplotlib's, to be closed.

    Args:
        points: By the name of a strategy, and the number of ranks.
        title: Above it.
        limit_bytes: Drawn as a line; 0 for none.
    """
    pyplot = _pyplot()
    figure, (rates, peaks) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    num = len(points)
    for i, (name, of_ranks) in enumerate(points.items()):
        worlds = sorted(of_ranks)
        look: dict[str, Any] = {"color": f"C{i % 10}", "marker": _MARKERS[i % len(_MARKERS)], "label": name}
        look |= {"lw": 1 + (num - i) / num, "ms": 4 + 3 * (num - i) / num}  # of lines that are the same all are seen
        rates.plot(worlds, [of_ranks[n].tflops for n in worlds], **look)
        peaks.plot(worlds, [of_ranks[n].peak_bytes / 2**30 for n in worlds], **look)
    if limit_bytes:
        peaks.axhline(limit_bytes / 2**30, color="black", ls="--", lw=1, label="limit")
    ticks = sorted({n for of_ranks in points.values() for n in of_ranks})
    for axes, unit in ((rates, "TFLOP/s per rank"), (peaks, "peak, GiB per rank")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [number_text(n) for n in ticks])
        axes.set(xlabel="ranks", ylabel=unit, ylim=(0, 1.1 * axes.get_ylim()[1]))
        axes.yaxis.set_major_formatter(_plain)
        axes.grid(alpha=0.3)
    handles, names = peaks.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 8), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9)
    return figure


def draw_scaling(path: Path, points: Mapping[str, Mapping[int, Scaled]], *, title: str, limit_bytes: int = 0) -> None:
    """Write `scaling_figure`; the suffix of `path` says the format."""
    figure = scaling_figure(points, title=title, limit_bytes=limit_bytes)
    write_picture(path, figure, dpi=130)
    _pyplot().close(figure)


def _plain(value: float, _: object) -> str:
    return number_text(value)
