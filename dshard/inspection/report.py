"""What of a model is in this rank's memory now, by what it is for; and for whom a trace has waited."""

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from dshard.arguments import checked
from dshard.inspection.explain import Explanation, contexts_of, explain
from dshard.inspection.memory import CATEGORIES, Memory
from dshard.inspection.tables import html_table, known_bytes, text_table
from dshard.inspection.tracing import Trace

_BYTES = "on this rank now", "bytes", ""
_WAITS = "waited", "ms", "share"


@dataclass(frozen=True, slots=True)
class Report:
    """What `report` gives: `str()` of it is a table, and so is what a notebook shows.

    Attributes:
        units: As of `explain`.
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

    def _rows(self) -> list[tuple[str, str, str]]:
        return [(name, known_bytes(num), CATEGORIES[name]) for name, num in self.num_bytes.items()]

    def _waits(self) -> list[tuple[str, str, str]]:
        named = [(f"in '{unit}'", seconds) for unit, seconds in self.unit_waits_s.items()]
        peers = [(f"for rank {rank}", seconds) for rank, seconds in self.peer_waits_s.items()]
        return [
            (name, f"{1e3 * seconds:.2f}", f"{seconds / (sum(s for _, s in rows) or 1):.0%}")
            for rows in (named, peers)
            for name, seconds in rows
        ]

    def __str__(self) -> str:
        parts = [str(self.units), text_table(_BYTES, self._rows(), to_left=(0, 2))]
        if self._waits():
            parts.append(text_table(_WAITS, self._waits(), to_left=(0,)))
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        waits = html_table(_WAITS, self._waits(), to_left=(0,)) if self._waits() else ""
        return self.units._repr_html_() + html_table(_BYTES, self._rows(), to_left=(0, 2)) + waits


@checked
def report(model: nn.Module, optimizer: Any = None, trace: Trace | None = None) -> Report:
    """Say what of a model is in this rank's memory now: units, and bytes by what they are for.

    Args:
        model: That `fully_shard` was called on, or one that holds such models. Units that are formed at the first use
            are formed now.
        optimizer: Of whose states to tell, or several.
        trace: Of the model: whose waits to tell, by unit and by peer, and whose activations, if it counts them.

    Raises:
        StateError: Nothing of the model is sharded.

    Communicates:
        Nothing. Gradients that are on their way are not waited for: their buffers count as such.
    """
    contexts = contexts_of("report", model)
    activations = trace.activations if trace is not None else None
    num_bytes = Memory(model, contexts, optimizer, activations).now()
    if trace is None:
        return Report(explain(model), num_bytes)
    return Report(explain(model), num_bytes, trace.unit_waits_s(), trace.peer_waits_s())
