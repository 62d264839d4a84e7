"""Pictures of simulated steps, with matplotlib, which is optional and imported when something is drawn."""

from pathlib import Path
from typing import Any

from dshard.errors import PlanError
from dshard.planner.files import write_picture
from dshard.planner.texts import bytes_text, number_text
from dshard.planner.timeline import Timeline

_COLORS = {"forward": "C0", "backward": "C3", "step": "C7", "gather": "C2", "slices": "C8", "reduce": "C1"}
_ROWS = {"compute": 1, "comm": 0}
_STREAMS = {"compute": "computation", "comm": "communication"}


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


def _plain(value: float, _: object) -> str:
    return number_text(value)
