"""A plan: a strategy for each unit of a model, what it is predicted to cost, and the proof that it is the best."""

import json
import os
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from dshard import arguments
from dshard.errors import PlanError
from dshard.planner.costs import CHECKPOINTING, Cluster, ModelCosts, scaled
from dshard.planner.files import of_record, read_text, to_record, write_text
from dshard.planner.measuring import Comparison, Measured
from dshard.planner.memory import MemoryForecast, PeakParts, forecast, parts_of_peak, peak_bytes
from dshard.planner.options import check_costs
from dshard.planner.profiles import home_bytes
from dshard.planner.rates import Interval, interval_text
from dshard.planner.solver import MEASURED, Certificate, Solution, solve, within_limit
from dshard.planner.tables import (
    Choice,
    choice_table,
    few_rows_text,
    home_text,
    mix_text,
    named,
    peak_text,
    ranks_text,
    unit_table,
)
from dshard.planner.texts import bytes_text, number_text, parse_bytes, seconds_text
from dshard.planner.timeline import (
    Timeline,
    bound_text,
    deferred_step_time,
    draw_timeline,
    simulate,
    step_time,
    terms_of,
)
from dshard.policies import Strategy, read_per_unit

SCHEMA = 10
_MEASURED_WAY = "Pass what dshard.planner.measure_step gave."
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # of checkpoint_wrapper, and of torch.compile
_SINGLES = ("ddp", "zero1", "zero2", "keep", "full")


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")


@dataclass(frozen=True)
class Plan:
    """A strategy for each unit, and the costs that it was planned with.

    `str(plan)` is one line, `explain()` a table, `plot()` a picture; `to_json` and `from_json` keep all of it.

    Args:
        model: Costs of the units, in the order in which forward runs them.
        cluster: Devices and links.
        strategies: One per unit.
        candidates: Those that each unit could have had.
        certificate: How good the choice is; None for one that was given rather than found.
        flops: Floating-point operations of a step on one rank, recomputation included.
        spread: What 8 of 10 measured steps take, in parts of the predicted one; None for costs that say nothing of it.
    """

    model: ModelCosts
    cluster: Cluster
    strategies: tuple[Strategy, ...]
    candidates: tuple[Strategy, ...] = ()
    certificate: Certificate | None = None
    flops: float = 0.0
    spread: Interval | None = None

    def __post_init__(self) -> None:
        check_costs("Plan", self.model, self.cluster)
        arguments.fields(self, read_per_unit, "strategies", "candidates")
        arguments.fields(self, arguments.from_0, "flops")
        if len(self.strategies) != len(self.model.units):
            raise PlanError(
                f"plan: needs a strategy for each of the {len(self.model.units)} units, but it has "
                f"{len(self.strategies)}. Pass one for each."
            )
        modes = None if self.certificate is None else [kind.checkpointing for kind in self.certificate.fastest_kinds]
        if modes is not None and (len(modes) != len(self.strategies) or not {*modes} <= {*CHECKPOINTING}):
            raise PlanError(
                f"plan: the certificate's fastest choice has one of {', '.join(CHECKPOINTING)} for each of the "
                f"{len(self.strategies)} units, but it says {modes}. Plan again."
            )

    @cached_property
    def timeline(self) -> Timeline:
        """A simulated step."""
        return simulate(self.model, self.strategies, self.cluster)

    @property
    def step_s(self) -> float:
        """Predicted time of a step, in seconds."""
        return self.timeline.step_s

    @cached_property
    def deferred_step_s(self) -> float | None:
        """Predicted time of a step of which the host's part is deferred, in seconds.

        `CPUOffloadPolicy` defers what the optimizer does in the CPU's memory to the next forward, unless it is told not
        to, and the optimizer is one whose steps cannot be deferred, as AdamW8bit. A plan is chosen for `step_s`, of
        steps that are taken at once. None where nothing is stepped there, or by the cores that compute.
        """
        return deferred_step_time(self.model, self.strategies, self.cluster)

    @property
    def step_interval_s(self) -> Interval | None:
        """What a real step takes in 8 of 10, by runs that calibration kept aside; None where nobody knows.

        By the shipped profile, on a cluster of which no run was seen; by one of runs of a cluster, there.
        """
        parts = self.spread
        return None if parts is None else Interval(self.step_s * parts.low, self.step_s * parts.high)

    @cached_property
    def peak_bytes(self) -> int:
        """Predicted peak of a step, the most bytes at one moment on one rank."""
        return peak_bytes(self.model, self.strategies, self.cluster)

    @property
    def exposed_s(self) -> float:
        """Seconds of the step that wait for communication."""
        return self.timeline.exposed_s

    @property
    def tflops(self) -> float:
        """Predicted TFLOP/s of each rank, recomputation included."""
        return self.flops / self.step_s / 1e12

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks together."""
        return self.model.batch_size * self.cluster.num_ranks / self.step_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all ranks together; None where nobody said how many a sample has."""
        return self.samples_per_s * self.model.tokens_per_sample if self.model.tokens_per_sample else None

    @cached_property
    def memory_at_peak(self) -> PeakParts:
        """The moment of the peak, and what its bytes are."""
        return parts_of_peak(self.model, self.strategies, self.cluster)

    @cached_property
    def memory_seen(self) -> MemoryForecast:
        """Forecast of what is reserved on CUDA, by a measured factor, and of what `nvidia-smi` shows."""
        return forecast(self.model, self.strategies, self.cluster)

    @cached_property
    def time_by_term(self) -> dict[str, float]:
        """Seconds of the step by what takes them, the most first; they add up to `step_s`.

        These are arithmetic, traffic, copies, the optimizer, and waiting for communication. Where times were measured,
        all that computes is one term.
        """
        return terms_of(self.model, self.strategies, self.cluster, self.timeline)

    @property
    def _limit_bytes(self) -> int:
        return self.cluster.memory_bytes if self.certificate is None else self.certificate.limit_bytes

    @property
    def checkpointing(self) -> tuple[str, ...]:
        """Which activations each unit computes again, by name (none, selective or full)."""
        return tuple(unit.checkpointing for unit in self.model.units)

    @property
    def is_offloaded(self) -> tuple[bool, ...]:
        """Of each unit, whether its parameters are kept in the CPU's memory."""
        return tuple(unit.is_offloaded for unit in self.model.units)

    @property
    def home_bytes(self) -> int:
        """What a rank has in the CPU's memory of what is kept there, which is shards, their gradients and states."""
        return home_bytes(self.model, self.strategies, self.cluster)

    @property
    def _step_text(self) -> str:
        interval = self.step_interval_s
        return seconds_text(self.step_s) + (f" ({interval_text(interval)})" if interval else "")

    @property
    def _deferred_text(self) -> list[str]:
        if self.deferred_step_s is None:
            return []
        step = seconds_text(self.deferred_step_s)
        return [f"deferred: {step} a step, if what the optimizer does on the CPU runs beside the next forward"]

    @property
    def by_parameter(self) -> dict[str, Strategy]:
        """The strategy of each parameter, by its name in the model."""
        units = zip(self.model.units, self.strategies, strict=True)
        return {name: strategy for unit, strategy in units for name in unit.param_names}

    def __str__(self) -> str:
        choices = map(named, self.strategies, (unit.kind for unit in self.model.units))
        names = ", ".join(f"{len(list(run))} x {name}" for name, run in groupby(choices))
        return (
            f"{names}: step {self._step_text}, of which {seconds_text(self.exposed_s)} waits for "
            f"communication; peak {bytes_text(self.peak_bytes)}"
        )

    def explain(self) -> str:
        """Tables: each unit, or run of units that are alike; the totals; and the plan beside every single strategy."""
        cluster, model, proof, limit = self.cluster, self.model, self.certificate, self._limit_bytes
        rates = f"{number_text(self.samples_per_s)} samples/s"
        rates += f"; {number_text(self.tokens_per_s)} tokens/s" if self.tokens_per_s is not None else ""
        rates += f"; {number_text(self.tflops)} TFLOP/s per rank" if self.flops else ""
        known = self.candidates or tuple(map(Strategy.of, _SINGLES))
        others: dict[str, Choice] = {
            named(strategy, kind): (model.under(kind), (strategy,) * len(model.units))
            for kind in model.kinds
            for strategy in known
        }
        if proof is not None:
            fastest = model.under(proof.fastest_kinds), proof.fastest
            if fastest not in ((model, self.strategies), *others.values()):
                others[f"fastest: {mix_text(*fastest)}"] = fastest
        left, memory_of = (0, "live") if proof is None else (proof.left_bytes, proof.memory_of)
        lines = [
            *unit_table(model.units, self.strategies),
            "",
            f"ranks: {ranks_text(cluster)}; batch: {model.batch_size} per rank",
            f"step: {self._step_text}, of which {seconds_text(self.exposed_s)} waits for communication",
            *bound_text(self.time_by_term),
            *self._deferred_text,
            f"rate: {rates}",
            f"peak: {bytes_text(self.peak_bytes)}" + (f" of {bytes_text(limit)}" if limit else ""),
            *peak_text(self.memory_at_peak, model.units),
            *home_text(model.units, self.home_bytes, cluster),
            *few_rows_text(model.units, self.strategies, cluster.num_ranks, self.peak_bytes),
            *([] if cluster.keeps_received_rows else self.memory_seen.lines(limit, memory_of)),
            "",
            *choice_table((model, self.strategies), cluster, others, limit - left),
            "",
        ]
        if proof is not None:
            lines.append(f"certificate: {proof}")
        return "\n".join([*lines, f"costs: {model.source}", f"links: {cluster.source}"])

    def plot(self, path: str | Path) -> None:
        """Write a picture of the simulated step: both streams, and bytes over time. Needs matplotlib (extra `cli`)."""
        arguments.path("Plan.plot", "path", path)
        draw_timeline(Path(path), self.timeline, title=str(self), limit_bytes=self._limit_bytes)

    def to_json(self) -> str:
        """All of it as JSON text."""
        return json.dumps({"schema": SCHEMA, **to_record(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that `to_json` wrote.

        Raises:
            PlanError: It is no JSON, of another schema, or has fields that are missing, unknown or of another type.
        """
        is_text = isinstance(text, (str, bytes))
        arguments.expect(is_text, "Plan.from_json", "text", text, "JSON text", "Pass what to_json() gave.")
        try:
            record = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise PlanError(
                f"plan: must be a plan as JSON, but reading it says: {error}. Pass what Plan.save or to_json() gave."
            ) from error
        if not isinstance(record, dict) or "schema" not in record:
            raise PlanError(
                "plan: must be a plan as JSON, but it is none: a plan has the field 'schema'. Pass what Plan.save or "
                "dshard plan --out wrote."
            )
        schema = record.pop("schema")
        if schema != SCHEMA:
            raise PlanError(
                f"plan: must be a plan of schema {SCHEMA}, but it is of {schema!r}. Plan again with this version."
            )
        try:
            return of_record(cls, record)
        except PlanError:
            raise
        except (ValueError, TypeError, OverflowError, LookupError, AttributeError, RecursionError) as error:
            raise PlanError(
                f"plan: must be a plan as JSON, but its values make none: {error}. Pass what Plan.save gave."
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON; what was there before is replaced whole.

        Raises:
            PlanError: The file cannot be written.
        """
        arguments.path("Plan.save", "path", path)
        write_text(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read what `save`, or `dshard plan --out`, wrote.

        Raises:
            PlanError: There is no such file, it cannot be read, or it holds no plan; names the path.
        """
        arguments.path("Plan.load", "path", path)
        text = read_text(Path(path))
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"{path}: {str(error).removeprefix('plan').lstrip(':. ')}") from error

    def compared(self, measured: Measured) -> Comparison:
        """Prediction against what a real step took."""
        arguments.instance("Plan.compared", "measured", measured, Measured, _MEASURED_WAY)
        return Comparison(Measured(self.step_s, self.peak_bytes), measured)

    def replanned(self, measured: Measured, *, memory_bytes: int | str | None = None) -> "Plan":
        """Plan again, with costs that fit what a real step of this plan took.

        All times are scaled alike until the predicted step takes as long as the measured one. What the measured peak
        has more than the predicted one is added to what is always there; less is not taken away.

        Args:
            measured: Of a step under this plan.
            memory_bytes: Another limit, in bytes or as text; None keeps it.

        Raises:
            PlanError: Nothing fits any more, or the plan was given rather than found.
        """
        who = "Plan.replanned"
        arguments.instance(who, "measured", measured, Measured, _MEASURED_WAY)
        limit = parse_bytes(who, "memory_bytes", memory_bytes, or_none=True)
        if not self.candidates or self.certificate is None:
            raise PlanError("plan: only what was planned can be planned again, but this was given. Call dshard.plan.")
        factor = measured.step_s / step_time(self.model, self.strategies, self.cluster)
        more = max(0, (measured.peak_bytes or 0) - self.peak_bytes)
        model = replace(
            scaled(self.model, factor), buffer_bytes=self.model.buffer_bytes + more, source="replanned, measured"
        )
        cluster = scaled(self.cluster, factor)
        limit = limit or self.certificate.limit_bytes
        margin = min(MEASURED, self.certificate.margin)

        def choose(room: int) -> Solution:
            return solve(model, cluster, self.candidates, room, tolerance=margin)

        solution = within_limit(choose, cluster, limit, self.certificate.memory_of)
        return replace(
            self,
            model=solution.model,
            cluster=cluster,
            strategies=solution.strategies,
            certificate=solution.certificate,
            spread=None,
        )


def plain_name(name: str) -> str:
    """A parameter's name without wrappers: it is the same one whether its module is checkpointed, or compiled, or not.

    Example:
        >>> plain_name("blocks.0._checkpoint_wrapped_module.mlp._orig_mod.up.weight")
        'blocks.0.mlp.up.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
