"""The losses of a run: kept in memory, in its checkpoints, and in a file with one JSON object per line."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dshard.cli.memory import StateBytes
from dshard.cli.writable import write_whole


@dataclass(slots=True)
class History:
    """Losses by number of finished steps; both are means over all ranks.

    Attributes:
        losses: training loss of step i at index i.
        norms: gradient norm of step i, before clipping, at index i.
        validation: validation loss by the number of steps before it.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As a value that JSON holds exactly."""
        return {
            "losses": list(self.losses),
            "norms": list(self.norms),
            "validation": [[step, loss] for step, loss in self.validation.items()],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> History:
        """The inverse of `to_json`.

        Raises:
            ValueError: it is none.
        """
        try:
            validation = {int(step): float(loss) for step, loss in value["validation"]}
            losses, norms = ([float(each) for each in value[name]] for name in ("losses", "norms"))
        except (LookupError, TypeError, OverflowError, ValueError) as error:
            raise ValueError(f"it has no losses, norms and validation losses ({error!r})") from error
        if len(losses) != len(norms):
            raise ValueError(f"it has {len(losses)} losses and {len(norms)} norms")
        return cls(losses=losses, norms=norms, validation=validation)

    def write(self, path: Path) -> None:
        """Replaces a file by this history, at once: one line per step, in exact decimals.

        Raises:
            OSError: it cannot be written; the file stays as it was.
        """
        lines = [json.dumps({"step": 0, "validation_loss": self.validation[0]})] if 0 in self.validation else []
        for index, (loss, norm) in enumerate(zip(self.losses, self.norms, strict=True)):
            row: dict[str, Any] = {"step": index + 1, "loss": loss, "norm": norm}
            if index + 1 in self.validation:
                row["validation_loss"] = self.validation[index + 1]
            lines.append(json.dumps(row))
        write_whole(path, "\n".join(lines) + "\n")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run left behind: its losses, every rank's memory, the seconds its steps took, and its tokens."""

    name: str
    history: History
    memory: list[StateBytes]
    step_s: float
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks per second of training, without validation and saving."""
        return self.num_tokens / self.step_s if self.step_s else math.nan
