"""Traces of a step: each gather and reduction of a unit, when, how long, and for which line; and reports of memory."""

import json
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dshard import arguments
from dshard.autograd import Watchers, in_backward
from dshard.collectives import CommRecord, CommTrace, is_users
from dshard.compiling import outside_of_graphs
from dshard.errors import ArgumentError
from dshard.inspection.explain import (
    CATEGORIES,
    Activations,
    Explanation,
    MemorySample,
    ShownInNotebooks,
    contexts_of,
    explain,
    memory_now,
    text_table,
)
from dshard.planner.texts import bytes_text
from dshard.tensor.dispatch import dispatch
from dshard.units.unit import Unit

log = logging.getLogger("dshard")

_COLUMNS = ("unit", "forward", "eval", "backward", "other", "bytes", "reduced", "bytes", "issued ms", "waited ms")
_BYTES = "on this rank now", "bytes", ""
_WAITS = "waited", "ms", "share"
_PHASES = ("forward", "eval", "backward", "")
_DISPATCH = dispatch.__code__
_PREFETCH = Unit.prefetch.__code__
Told = dict[str, Any]  # a trace of a rank, as a dict

_PLACE = "{{traces}}"  # in the page


@dataclass(slots=True)
class Event:
    """A gather or reduction of a unit that began, or that was waited for.

    Attributes:
        what: "gather" or "reduce" where one begins, "gather_wait" or "reduce_wait" where one is waited for.
        unit: Label of the unit; of reductions also the divisor of the sum, where the program chose one.
        phase: "forward", "eval" (a forward without gradients), "backward", or "" between them.
        run: Number of the phase: events of one forward, or of one backward, share it.
        op: Operation that asked for it, as "aten.mm.default"; "" where none did: as a module's forward begins, in
            backward for what such a forward saved, in `unshard()`.
        line: Line of the program, as file:line; within a backward the line that called it.
        is_ahead: Whether the unit was prefetched.
        at_s: When it began, in seconds since the trace did.
        took_s: Seconds of the host.
        gathered_bytes: Bytes of full values of the model on this rank when it ended.
        records: The collectives that it issued.
        waits: The waits within it.
    """

    what: str
    unit: str
    phase: str
    run: int
    op: str
    line: str
    is_ahead: bool
    at_s: float
    took_s: float = 0.0
    gathered_bytes: int = 0
    records: list[CommRecord] = field(default_factory=list, repr=False)
    waits: list[Any] = field(default_factory=list, repr=False)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank sends for it."""
        return sum(record.total_bytes for record in self.records)

    @property
    def waited_s(self) -> float:
        """Seconds for which this rank waited for its peers in it; on CUDA this waits for the device."""
        return sum(wait.waited_s for wait in self.waits)

    def as_dict(self) -> dict[str, Any]:
        """The event as numbers and texts."""
        shown = [each.name for each in fields(self) if each.repr]
        return {name: getattr(self, name) for name in (*shown, "num_bytes", "waited_s")}


class Trace(ShownInNotebooks):
    """Records what a model's units gather and reduce while it is open; `trace` makes it. `str()` of it is a table.

    Attributes:
        activations: Counts the activations, if asked for.
        memory: Bytes on this rank by category, at the beginning, after each event and each step of an optimizer, and
            at the end, if asked for.
        took_s: Seconds from the beginning to the end.

    Communicates:
        Nothing.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer] | None = None, *, memory: bool = False
    ) -> None:
        self._model, self._contexts = model, contexts_of("trace", model)
        self._is_own: dict[object, bool] = {}  # by what stands for a model
        self._comm = CommTrace()
        self._events: list[Event] = []
        self._begin_s = 0.0
        self._serials: dict[Any, int] = {}
        self.took_s = 0.0
        self.memory: list[MemorySample] = []
        self.activations = Activations(model.parameters()) if memory else None
        self._optimizers = optimizers
        self._stack = ExitStack()

    def __enter__(self) -> "Trace":
        self._begin_s = time.perf_counter()
        if self.activations is not None:
            self._stack.enter_context(self.activations.hooks())
            for optimizer in self._optimizers or ():
                self._stack.callback(optimizer.register_step_post_hook(lambda *_: self._sample()).remove)
        self._sample()
        self._comm.__enter__()
        Watchers.present.append(self)
        return self

    def __exit__(self, *raised: Any) -> None:
        Watchers.present.remove(self)
        self._comm.__exit__(*raised)
        self._stack.close()
        self.took_s = time.perf_counter() - self._begin_s
        self._sample()
        if raised[0] is None:
            for text in self.warnings():
                log.warning("trace: %s", text)

    @contextmanager
    def watch(self, what: str, label: str, model: object) -> Iterator[None]:
        """Note an event of a unit, if the unit is of this model."""
        is_own = self._is_own.get(model)
        if is_own is None:  # blocks may have joined another model since
            self._contexts = contexts_of("trace", self._model)
            is_own = self._is_own[model] = any(context.token is model for context in self._contexts)
        if not is_own:
            yield
            return
        (phase, run), (op, line, is_ahead) = self._phase(), _asked_by(sys._getframe())
        event = Event(what, label, phase, run, op, line, is_ahead, at_s=time.perf_counter() - self._begin_s)
        num_records, num_waits = len(self._comm.records), len(self._comm.waits)
        try:
            yield
        finally:
            event.took_s = time.perf_counter() - self._begin_s - event.at_s
            event.records, event.waits = self._comm.records[num_records:], self._comm.waits[num_waits:]
            gathered = (unit for context in self._contexts for unit in context.eviction.gathered)
            event.gathered_bytes = sum(unit.full_bytes for unit in gathered)
            self._events.append(event)
            self._sample()

    @outside_of_graphs  # a step of an optimizer may be compiled
    def _sample(self) -> None:
        """Count the memory, if asked for."""
        if self.activations is not None:
            now = memory_now(self._model, self._contexts, self._optimizers, self.activations)
            self.memory.append(MemorySample(time.perf_counter() - self._begin_s, now))

    def _phase(self) -> tuple[str, int]:
        """Name the phase that runs, and its number among all phases."""
        for context in self._contexts:
            if context.schedule.phase is not None:
                key = context, context.schedule.serial
                return context.schedule.phase.name.lower(), self._serials.setdefault(key, len(self._serials))
        return ("backward", len(self._serials) - 1) if in_backward() else ("", -1)

    @property
    def events(self) -> list[Event]:
        """All events, in the order in which they began."""
        return sorted(self._events, key=lambda event: event.at_s)

    @property
    def others(self) -> list[CommRecord]:
        """Collectives other than a unit's gathers and reductions, such as norms, flags, checks of ranks, the user's."""
        known = {id(record) for event in self._events for record in event.records}
        return [record for record in self._comm.records if id(record) not in known]

    def warnings(self) -> list[str]:
        """Describe what is sent more often than needed, and from where."""
        gathers: dict[tuple[str, str, int], list[Event]] = defaultdict(list)
        waits: dict[tuple[str, int], int] = defaultdict(int)
        for s in self._events:
            if s.what == "gather" and s.records:
                gathers[s.unit, s.phase, s.run].append(s)
            waits[s.unit, s.run] += s.what == "gather_wait"
        found = []
        for (unit, phase, run), each in gathers.items():
            where = f"one {phase}" if phase else "between forwards and backwards"
            if len(each) > 1 and (phase or len(each) > 2):
                line = max((s.line for s in each), key=[s.line for s in each].count)
                found.append(
                    f"gathered '{unit}' {len(each)} times in {where}, at {line or 'no line of the program'}. Hold it "
                    "meanwhile: with dshard.gathered(module)."
                )
            if not waits[unit, run] and phase and all(s.is_ahead for s in each):
                found.append(f"gathered '{unit}' ahead in {where} that did not use it: the order of use has changed.")
        return found

    def _rows(self) -> list[list[str]]:
        by_unit: dict[str, list[Event]] = {}
        for event in self.events:
            by_unit.setdefault(event.unit, []).append(event)
        rows = [_row(unit, each) for unit, each in by_unit.items()]
        others = bytes_text(sum(record.total_bytes for record in self.others))
        return [*rows, _row("total", self.events), ["beside them", *[""] * 6, others, "", ""]]

    def __str__(self) -> str:
        text = text_table(_COLUMNS, self._rows(), to_left=(0,))
        return "\n".join([text, *self.warnings()])

    def __repr__(self) -> str:
        return f"<Trace: {len(self._events)} events of {len({s.unit for s in self._events})} units>"

    def unit_waits_s(self) -> dict[str, float]:
        """Seconds for which this rank waited for its peers, by unit; the most first."""
        found: dict[str, float] = defaultdict(float)
        for event in self.events:
            found[event.unit] += event.waited_s
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def peer_waits_s(self) -> dict[int, float]:
        """Seconds for which this rank waited for each peer beyond those before it, by rank; the most first.

        Of all collectives in the trace, where ranks say headers ahead of them: on NCCL there are none.
        """
        return dict(sorted(self._comm.peer_waits_s.items(), key=lambda item: -item[1]))

    def as_dict(self, *, rank: int = 0) -> dict[str, Any]:
        """The trace as numbers and texts: `save` writes it, and a page shows it."""
        columns, rows = list(_COLUMNS), self._rows()
        return {
            "rank": rank,
            "took_s": self.took_s,
            "events": [event.as_dict() for event in self.events],
            "memory": [asdict(sample) for sample in self.memory],
            "peers": {str(peer): seconds for peer, seconds in self.peer_waits_s().items()},
            "warnings": self.warnings(),
            "table": [columns, *rows],
        }

    def save(self, path: str | Path, *, rank: int = 0) -> None:
        """Write it to a file of the kind that the suffix says.

        Args:
            path: Path of the file. ".json" is a timeline that chrome://tracing and ui.perfetto.dev show; ".html" is a
                page that loads nothing.
            rank: The rank that the file names.

        Raises:
            ArgumentError: The suffix is another one.
        """
        export(path, [self.as_dict(rank=rank)])


def trace(model: nn.Module, optimizer: Any = None, *, memory: bool = False) -> Trace:
    """Record what the units of a model gather and reduce, for which operation and line, and how long that takes.

    ::

        with dshard.trace(model) as trace:
            step()
        print(trace)
        trace.save("step.html")

    The logger "dshard" warns of what is sent more often than needed when the block ends; `warnings()` returns the same.
    Outside of a trace nothing is recorded.

    Args:
        model: A model that `fully_shard` was called on, or one that holds such models.
        optimizer: With `memory`: an optimizer, or several, whose states count.
        memory: Record bytes by category over time in `trace.memory`. Hooks count the tensors that autograd keeps on
            this thread; each sample looks at all parameters.

    Raises:
        StateError: Nothing of the model is sharded.

    Communicates:
        Nothing: each rank records itself.
    """
    arguments.module("trace", "model", model)
    optimizers, memory = (
        arguments.optimizers("trace", "optimizer", optimizer),
        arguments.boolean("trace", "memory", memory),
    )
    return Trace(model, optimizers, memory=memory)


@dataclass(frozen=True, slots=True)
class Report(ShownInNotebooks):
    """The result of `report`: `str()` of it is tables, and a notebook shows those.

    Attributes:
        units: The result of `explain`.
        num_bytes: On this rank now, by category; None where nobody knows: "states" without an optimizer,
            "activations" without a trace that counts them, and "other" on a CPU, whose allocator does not count.
        unit_waits_s: Of a trace: seconds for which this rank waited for its peers, by unit; the most first.
        peer_waits_s: Of a trace: by rank of the peer, the seconds beyond those for peers that were waited for before
            it. Empty where collectives are the backend's own.
    """

    units: Explanation
    num_bytes: dict[str, int | None]
    unit_waits_s: dict[str, float] = field(default_factory=dict)
    peer_waits_s: dict[int, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """All of it as numbers and texts, for a log."""
        units = [asdict(unit) for unit in self.units.units]
        waits = {"units": dict(self.unit_waits_s), "peers": dict(self.peer_waits_s)}
        return {"units": units, "bytes": dict(self.num_bytes), "waits": waits}

    def _waits(self) -> list[tuple[str, str, str]]:
        named = [(f"in '{unit}'", seconds) for unit, seconds in self.unit_waits_s.items()]
        peers = [(f"for rank {rank}", seconds) for rank, seconds in self.peer_waits_s.items()]
        return [
            (name, f"{1e3 * seconds:.2f}", f"{seconds / (sum(s for _, s in rows) or 1):.0%}")
            for rows in (named, peers)
            for name, seconds in rows
        ]

    def __str__(self) -> str:
        known = {name: "-" if num is None else bytes_text(num) for name, num in self.num_bytes.items()}
        rows = [(name, text, CATEGORIES[name]) for name, text in known.items()]
        parts = [str(self.units), text_table(_BYTES, rows, to_left=(0, 2))]
        if self._waits():
            parts.append(text_table(_WAITS, self._waits(), to_left=(0,)))
        return "\n\n".join(parts)


def report(model: nn.Module, optimizer: Any = None, trace: Trace | None = None) -> Report:
    """Count what of a model is in this rank's memory now: units, and bytes by what they are for.

    Args:
        model: A model that `fully_shard` was called on, or one that holds such models. Units that form at the first use
            form now.
        optimizer: An optimizer, or several, whose states count.
        trace: A trace of the model: its waits by unit and by peer are shown, and its activations, if it counts them.

    Raises:
        StateError: Nothing of the model is sharded.

    Communicates:
        Nothing. It does not wait for gradients that are on their way; their buffers count.
    """
    contexts = contexts_of("report", arguments.module("report", "model", model))
    optimizers = arguments.optimizers("report", "optimizer", optimizer)
    is_trace, way = isinstance(trace, Trace), "Pass what dshard.trace gave."
    arguments.expect(is_trace, "report", "trace", trace, "a Trace", way, or_none=True)
    activations = trace.activations if trace is not None else None
    num_bytes = memory_now(model, contexts, optimizers, activations)
    waits = (trace.unit_waits_s(), trace.peer_waits_s()) if trace is not None else ()
    return Report(explain(model), num_bytes, *waits)


def _asked_by(frame: FrameType | None) -> tuple[str, str, bool]:
    """Find the operation that a stack computes, the line of the program, and whether this is a prefetch."""
    op, is_ahead = "", False
    while frame is not None:
        code = frame.f_code
        if code is _DISPATCH:
            op = op or str(frame.f_locals["func"])
        elif code is _PREFETCH:
            is_ahead = is_ahead or not op
        if is_users(code.co_filename):
            return op, f"{code.co_filename}:{frame.f_lineno}", is_ahead
        frame = frame.f_back
    return op, "", is_ahead


def _row(name: str, events: Sequence[Event]) -> list[str]:
    gathers = [e for e in events if e.what == "gather"]
    reductions = [e for e in events if e.what == "reduce"]
    counts = [str(sum(e.phase == phase for e in gathers)) for phase in _PHASES]
    sent = [bytes_text(sum(e.num_bytes for e in each)) for each in (gathers, reductions)]
    issued = sum(e.took_s for e in (*gathers, *reductions))
    waited = sum(e.waited_s for e in events)
    return [name, *counts, sent[0], str(len(reductions)), sent[1], f"{1e3 * issued:.2f}", f"{1e3 * waited:.2f}"]


def export(path: str | Path, traces: Sequence[Told]) -> None:
    """Write traces of one step on some ranks, as the suffix of the file says: ".json" or ".html".

    Raises:
        ArgumentError: The suffix is another one.
    """
    writers = {".json": chrome, ".html": page}
    if (write := writers.get(Path(path).suffix.lower())) is None:
        raise ArgumentError(
            f"path must end in .json or .html, which says what is written, but it is {str(path)!r}. Rename the file."
        )
    Path(path).write_text(write(traces), encoding="utf-8")


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
    data = json.dumps({"traces": list(traces)})
    return template.replace(_PLACE, data.replace("<", "\\u003c"))  # or a name could end the script
