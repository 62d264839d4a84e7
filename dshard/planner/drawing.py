"""Pictures of simulated steps, with matplotlib, which is optional and imported when something is drawn."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dshard.errors import PlanError
from dshard.planner.timeline import Timeline

__all__ = ["draw_scaling", "draw_timeline"]

_COLORS = {"forward": "C0", "backward": "C3", "step": "C7", "gather": "C2", "slices": "C8", "reduce": "C1"}
_ROWS = {"compute": 1, "comm": 0}


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
        2, 1, figsize=(11, 4.6), sharex=True, height_ratios=(1, 1.2), layout="constrained"
    )
    for kind, color in _COLORS.items():
        for stream, row in _ROWS.items():
            found = [s for s in timeline.segments if s.kind == kind and s.stream == stream]
            if found:
                spans = [(s.start_s, s.stop_s - s.start_s) for s in found]
                edge = "white" if stream == "compute" else color  # the latter so that no short one gets lost
                streams.broken_barh(
                    spans, (row - 0.4, 0.8), facecolors=color, edgecolors=edge, linewidth=0.3, label=kind
                )
    streams.set_yticks(list(_ROWS.values()), list(_ROWS))
    streams.legend(frameon=False, fontsize=7, ncols=6, loc="upper center", bbox_to_anchor=(0.5, 1.18))
    events = sorted(timeline.memory, key=lambda event: event.start_s)
    times = [event.start_s for event in events] + [timeline.step_s]
    sizes = [event.num_bytes / 2**30 for event in events]
    memory.step(times, [*sizes, *sizes[-1:]], where="post", lw=1)
    if limit_bytes:
        memory.axhline(limit_bytes / 2**30, color="C3", ls="--", lw=1)
    memory.set(xlabel="seconds", ylabel="GiB", ylim=(0, None))
    figure.suptitle(title, fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw_scaling(path: Path, tflops: Mapping[int, float], peaks: Mapping[int, int], *, title: str) -> None:
    """TFLOP/s and peak bytes of each rank against the number of ranks."""
    pyplot = _pyplot()
    figure, all_axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    panels = ((tflops, "TFLOP/s per rank"), ({n: b / 2**30 for n, b in peaks.items()}, "peak, GiB per rank"))
    for axes, (points, unit) in zip(all_axes, panels, strict=True):
        axes.plot(list(points), list(points.values()), "o-", ms=4)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(points), [str(n) for n in points])
        axes.set(xlabel="ranks", ylabel=unit, ylim=(0, 1.15 * max(points.values())))
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
