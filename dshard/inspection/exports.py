"""Files of traces: a timeline for Chrome's viewer, a page, a picture."""

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from dshard.errors import ArgumentError
from dshard.planner.files import write_picture

Told = dict[str, Any]  # a trace of a rank, as a dict

_PLACE = "{{traces}}"  # in the page
COLORS = {
    "parameters": "#4c72b0",
    "gradients": "#55a868",
    "states": "#8172b3",
    "buffers": "#8c8c8c",
    "gathered": "#dd8452",
    "activations": "#c44e52",
    "on their way": "#937860",
    "pool": "#ccb974",
    "other": "#da8bc3",
}
_EVENTS = {"gather": "#dd8452", "gather_wait": "#f2c9a8", "reduce": "#55a868", "reduce_wait": "#b5dcc0"}


def export(path: str | Path, traces: Sequence[Told]) -> None:
    """Write traces of one step on some ranks to a file of the kind that its suffix says: ".json", ".html" or ".png".

    Raises:
        ArgumentError: It is another one, or matplotlib is not installed for a picture.
    """
    kind = Path(path).suffix.lower()
    if kind == ".json":
        Path(path).write_text(chrome(traces), encoding="utf-8")
    elif kind == ".html":
        Path(path).write_text(page(traces), encoding="utf-8")
    elif kind == ".png":
        _draw(Path(path), traces[0])
    else:
        raise ArgumentError(
            f"path must end in .json, .html or .png, for that says what is written, but it is {str(path)!r}. Name the "
            "file anew."
        )


def chrome(traces: Sequence[Told]) -> str:
    """A timeline as JSON: each rank is a process, and bytes of full values, or by category, are counters."""
    told = []
    for trace in traces:
        rank = trace["rank"]
        for e in trace["events"]:
            args = {"phase": e["phase"], "op": e["op"], "line": e["line"], "bytes": e["num_bytes"]}
            args["waited ms"] = 1e3 * e["waited_s"]
            what = {"name": f"{e['what']} {e['unit']}", "cat": e["what"], "args": args}
            told.append({"ph": "X", "pid": rank, "tid": 0, "ts": 1e6 * e["at_s"], "dur": 1e6 * e["took_s"], **what})
            counter = {"name": "gathered", "args": {"bytes": e["gathered_bytes"]}}
            told.append({"ph": "C", "pid": rank, "ts": 1e6 * (e["at_s"] + e["took_s"]), **counter})
        for sample in trace["memory"]:
            known = {name: num for name, num in sample["num_bytes"].items() if num is not None}
            told.append({"ph": "C", "pid": rank, "ts": 1e6 * sample["at_s"], "name": "memory", "args": known})
    return json.dumps({"traceEvents": told, "displayTimeUnit": "ms"})


def page(traces: Sequence[Told]) -> str:
    """A page with its data in it: timeline, memory, tables and warnings of each rank. It loads nothing."""
    template = resources.files("dshard.inspection").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps({"traces": list(traces), "colors": COLORS, "events": _EVENTS})
    return template.replace(_PLACE, data.replace("<", "\\u003c"))  # or a name could end the script


def _draw(path: Path, trace: Told) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise ArgumentError(
            f"path must end in .json or .html where matplotlib is not installed, but it is {str(path)!r}. Run: pip "
            "install 'dshard[cli]'."
        ) from error

    matplotlib.use("Agg")
    from matplotlib import pyplot

    samples = trace["memory"]
    figure, all_axes = pyplot.subplots(
        2 if samples else 1, 1, figsize=(11, 6 if samples else 3), sharex=True, layout="constrained", squeeze=False
    )
    lanes, *rest = all_axes[:, 0]
    kinds = list(_EVENTS)
    for event in trace["events"]:
        spans = [(1e3 * event["at_s"], max(1e3 * event["took_s"], 1e-3))]
        lanes.broken_barh(spans, (kinds.index(event["what"]) - 0.4, 0.8), color=_EVENTS[event["what"]])
    lanes.set(yticks=range(len(kinds)), yticklabels=kinds, title=f"rank {trace['rank']}")
    lanes.invert_yaxis()
    if samples:
        names = [name for name in COLORS if any(sample["num_bytes"][name] for sample in samples)]
        rows = [[(sample["num_bytes"][name] or 0) / 1e6 for sample in samples] for name in names]
        times = [1e3 * sample["at_s"] for sample in samples]
        rest[0].stackplot(times, rows, labels=names, colors=[COLORS[name] for name in names], step="post")
        rest[0].set(ylabel="MB on this rank")
        rest[0].legend(frameon=False, ncols=len(names), fontsize="small", loc="lower left", bbox_to_anchor=(0, 1))
    (rest or [lanes])[-1].set(xlabel="ms")
    write_picture(path, figure, dpi=130)
    pyplot.close(figure)
