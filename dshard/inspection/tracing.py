"""What a step of a model sends: each gather and reduction, when, for how long, and for which line of the program."""

import logging
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from torch import nn

from dshard.arguments import checked
from dshard.autograd.modes import Watchers, in_backward
from dshard.collectives import CommRecord, CommTrace, is_users
from dshard.inspection.explain import contexts_of
from dshard.inspection.exports import export
from dshard.inspection.memory import Activations, Memory, MemorySample
from dshard.inspection.tables import html_table, text_table
from dshard.planner.texts import bytes_text
from dshard.tensor.dispatch import dispatch
from dshard.units.unit import Unit

log = logging.getLogger("dshard")

_COLUMNS = ("unit", "forward", "eval", "backward", "other", "bytes", "reduced", "bytes", "issued ms", "waited ms")
_PHASES = ("forward", "eval", "backward", "")
_DISPATCH = dispatch.__code__
_PREFETCH = Unit.prefetch.__code__


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was done for a unit.

    Attributes:
        what: "gather" or "reduce" where one starts, "gather_wait" or "reduce_wait" where one is waited for.
        unit: Its label; of reductions with what the sum is divided by, where that was chosen.
        phase: "forward", "eval" (a forward without gradients), "backward", or "" between them.
        run: Number of the phase: the same for all that is done in one forward, or one backward.
        op: Operation that asked for it, as "aten.mm.default"; "" for none, as in `unshard()`.
        line: Of the program, as file:line; within a backward that is where it was called.
        is_ahead: Whether it was gathered ahead of its use.
        at_s: When it began, in seconds since the trace did.
        took_s: Seconds of the host.
        num_bytes: That this rank sends for it.
        waited_s: Seconds for which this rank waited for its peers in it; on CUDA those of the stream.
        gathered_bytes: Bytes of full values of the model that were on this rank when it ended.
    """

    what: str
    unit: str
    phase: str
    run: int
    op: str
    line: str
    is_ahead: bool
    at_s: float
    took_s: float
    num_bytes: int
    waited_s: float
    gathered_bytes: int


@dataclass(slots=True)
class _Seen:
    """An event as it is written down, while nothing may take long."""

    what: str
    unit: str
    phase: str
    run: int
    op: Any
    line: tuple[str, int]
    is_ahead: bool
    at_s: float
    took_s: float = 0.0
    records: list[CommRecord] = field(default_factory=list)
    waits: list[Any] = field(default_factory=list)
    gathered: list[Unit] = field(default_factory=list)

    @property
    def where(self) -> str:
        """The line, as text."""
        file, number = self.line
        return f"{file}:{number}" if file else ""


class _Range:
    """As long as something is done for a unit."""

    __slots__ = ("_began", "_label", "_trace", "_what")

    def __init__(self, trace: "Trace", what: str, label: str) -> None:
        self._trace, self._what, self._label = trace, what, label

    def __enter__(self) -> None:
        self._began = self._trace._begin(self._what, self._label)

    def __exit__(self, *raised: object) -> None:
        self._trace._end(*self._began)


class Trace:
    """What a model's units gather and reduce while it is open; made by `trace`. `str()` of it is a table by unit.

    Attributes:
        activations: What counts them, if asked for.
        memory: Bytes on this rank by category, at the beginning, after each event and each step of an optimizer, and
            at the end, if asked for.
        took_s: Seconds from the beginning to the end.

    Communicates:
        Nothing.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None, *, memory: bool = False) -> None:
        self._model, self._contexts = model, contexts_of("trace", model)
        self._is_own: dict[object, bool] = {}  # by what stands for a model
        self._comm = CommTrace()
        self._seen: list[_Seen] = []
        self._begin_s = 0.0
        self._serials: dict[Any, int] = {}
        self.took_s = 0.0
        self.memory: list[MemorySample] = []
        self.activations = Activations(model.parameters()) if memory else None
        self._measured = Memory(model, self._contexts, optimizer, self.activations)
        self._stack = ExitStack()

    def __enter__(self) -> "Trace":
        self._begin_s = time.perf_counter()
        if self.activations is not None:
            self._stack.enter_context(self.activations.hooks())
            for optimizer in self._measured.optimizers or ():
                self._stack.callback(optimizer.register_step_post_hook(lambda *_: self._sample()).remove)
        self._sample()
        self._comm.__enter__()
        Watchers.present.append(self)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        Watchers.present.remove(self)
        self._comm.__exit__(exc_type, exc, tb)
        self._stack.close()
        self.took_s = time.perf_counter() - self._begin_s
        self._sample()
        if exc_type is None:
            for text in self.warnings():
                log.warning("trace: %s", text)

    def watch(self, what: str, label: str, model: object) -> AbstractContextManager[Any]:
        """Note what is done for a unit of this model within a context."""
        is_own = self._is_own.get(model)
        if is_own is None:  # blocks may have joined another model since
            self._contexts = contexts_of("trace", self._model)
            is_own = self._is_own[model] = any(context.token is model for context in self._contexts)
        return _Range(self, what, label) if is_own else nullcontext()

    def _begin(self, what: str, label: str) -> tuple[_Seen, int, int]:
        """Something begins; gives what it is, and how many records and waits there are."""
        phase, run = self._phase()
        op, line, is_ahead = _asked_by(sys._getframe(2))
        seen = _Seen(what, label, phase, run, op, line, is_ahead, time.perf_counter() - self._begin_s)
        return seen, len(self._comm.records), len(self._comm.waits)

    def _end(self, seen: _Seen, num_records: int, num_waits: int) -> None:
        """It has ended."""
        seen.took_s = time.perf_counter() - self._begin_s - seen.at_s
        seen.records, seen.waits = self._comm.records[num_records:], self._comm.waits[num_waits:]
        seen.gathered = [unit for context in self._contexts for unit in context.eviction.gathered]
        self._seen.append(seen)
        self._sample()

    def _sample(self) -> None:
        """See what is in memory, if asked for."""
        if self.activations is not None:
            self.memory.append(MemorySample(time.perf_counter() - self._begin_s, self._measured.now()))

    def _phase(self) -> tuple[str, int]:
        """What runs, and which number it has among what ran."""
        for context in self._contexts:
            if context.schedule.phase is not None:
                key = context, context.schedule.serial
                return context.schedule.phase.name.lower(), self._serials.setdefault(key, len(self._serials))
        return ("backward", len(self._serials) - 1) if in_backward() else ("", -1)

    @property
    def events(self) -> list[Event]:
        """All that was done, in order. On CUDA this waits for the device."""
        return [
            Event(
                *(s.what, s.unit, s.phase, s.run, str(s.op or ""), s.where, s.is_ahead, s.at_s, s.took_s),
                num_bytes=sum(record.total_bytes for record in s.records),
                waited_s=sum(wait.waited_s for wait in s.waits),
                gathered_bytes=sum(unit.full_bytes for unit in s.gathered),
            )
            for s in sorted(self._seen, key=lambda s: s.at_s)
        ]

    @property
    def others(self) -> list[CommRecord]:
        """Collectives that are no gather or reduction of a unit, as norms, flags, checks of ranks, the user's."""
        known = {id(record) for seen in self._seen for record in seen.records}
        return [record for record in self._comm.records if id(record) not in known]

    def warnings(self) -> list[str]:
        """What is sent more often than it has to be, and from where."""
        gathers: dict[tuple[str, str, int], list[_Seen]] = defaultdict(list)
        waits: dict[tuple[str, int], int] = defaultdict(int)
        for s in self._seen:
            if s.what == "gather" and s.records:
                gathers[s.unit, s.phase, s.run].append(s)
            waits[s.unit, s.run] += s.what == "gather_wait"
        found = []
        for (unit, phase, run), each in gathers.items():
            where = f"one {phase}" if phase else "between forwards and backwards"
            if len(each) > 1 and (phase or len(each) > 2):
                line = max((s.where for s in each), key=[s.where for s in each].count)
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
        return f"<Trace: {len(self._seen)} events of {len({s.unit for s in self._seen})} units>"

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._rows(), to_left=(0,)) + "".join(f"<p>{w}</p>" for w in self.warnings())

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
        """All of it as numbers and texts: what `save` writes as JSON, and a page shows."""
        columns, rows = list(_COLUMNS), self._rows()
        return {
            "rank": rank,
            "took_s": self.took_s,
            "events": [asdict(event) for event in self.events],
            "memory": [asdict(sample) for sample in self.memory],
            "peers": {str(peer): seconds for peer, seconds in self.peer_waits_s().items()},
            "warnings": self.warnings(),
            "table": [columns, *rows],
        }

    def save(self, path: str | Path, *, rank: int = 0) -> None:
        """Write it to a file: what kind of one its suffix says.

        Args:
            path: Of the file. ".json" is a timeline that chrome://tracing and ui.perfetto.dev show; ".html" a page that
                needs nothing beside it; ".png" a picture of the timeline, and of memory, with matplotlib.
            rank: Whose it is called.

        Raises:
            ArgumentError: The suffix is another one.
        """
        export(path, [self.as_dict(rank=rank)])


@checked
def trace(model: nn.Module, optimizer: Any = None, *, memory: bool = False) -> Trace:
    """Follow what the units of a model gather and reduce, for which operation and line, and how long that takes.

    ::

        with dshard.trace(model) as trace:
            step()
        print(trace)
        trace.save("step.html")

    What is sent more often than it has to be is told by the logger "dshard" when the block ends, and by `warnings()`.
    Outside of a trace nothing is noted.

    Args:
        model: That `fully_shard` was called on, or one that holds such models.
        optimizer: With `memory`: of whose states to tell, or several.
        memory: Have `trace.memory` tell bytes by category over time. Tensors that autograd keeps are counted by hooks
            around them, on this thread; each sample looks at all parameters.

    Raises:
        StateError: Nothing of the model is sharded.

    Communicates:
        Nothing: each rank tells of itself.
    """
    return Trace(model, optimizer, memory=memory)


def _asked_by(frame: FrameType | None) -> tuple[Any, tuple[str, int], bool]:
    """The operation that a stack computes, the line of the program, and whether that is ahead of a use."""
    op, is_ahead = None, False
    while frame is not None:
        code = frame.f_code
        if code is _DISPATCH:
            op = op or frame.f_locals["func"]
        elif code is _PREFETCH:
            is_ahead = is_ahead or op is None
        if is_users(code.co_filename):
            return op, (code.co_filename, frame.f_lineno), is_ahead
        frame = frame.f_back
    return op, ("", 0), is_ahead


def _row(name: str, events: Sequence[Event]) -> list[str]:
    gathers = [e for e in events if e.what == "gather"]
    reductions = [e for e in events if e.what == "reduce"]
    counts = [str(sum(e.phase == phase for e in gathers)) for phase in _PHASES]
    sent = [bytes_text(sum(e.num_bytes for e in each)) for each in (gathers, reductions)]
    issued = sum(e.took_s for e in (*gathers, *reductions))
    waited = sum(e.waited_s for e in events)
    return [name, *counts, sent[0], str(len(reductions)), sent[1], f"{1e3 * issued:.2f}", f"{1e3 * waited:.2f}"]
