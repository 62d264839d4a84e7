"""`assert_sharding_invariants`: a program trained under every way of sharding beside its plain model."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from dshard.errors import ArgumentError
from dshard.testing.verifying.comparison import (
    Difference,
    Oracle,
    by_rank,
    first_difference,
    oracle_of,
    with_mean_losses,
)
from dshard.testing.verifying.programs import SETTINGS, Program, Setting, adamw
from dshard.testing.verifying.recording import Record, put_together
from dshard.testing.verifying.training import Run, train_alone, train_sharded, try_checkpoint
from dshard.testing.worlds import RemoteRankError, WorldPool

DEFAULT_SETTINGS = tuple(name for name in SETTINGS if name != "bf16")
_NUM_NUDGES = 4
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Row:
    """How one setting on one number of ranks went.

    Attributes:
        setting: its name.
        num_ranks: whose batches there were.
        difference: the first one; None where all is the same.
        skipped: why it was not run; "" where it was.
        num_compared: quantities, over all ranks.
    """

    setting: str
    num_ranks: int
    difference: Difference | None = None
    skipped: str = ""
    num_compared: int = 0


@dataclass(slots=True)
class Verification:
    """What was run, and what differs.

    Attributes:
        rows: one for each setting and world.
        notes: what is no difference, but worth a look.
    """

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def differences(self) -> list[Difference]:
        """Of all rows."""
        return [row.difference for row in self.rows if row.difference is not None]

    def __str__(self) -> str:
        width = max(len(row.setting) for row in [*self.rows, Row("setting", 0)])
        lines = [f"{'setting':<{width}}  ranks"]
        for row in self.rows:
            ok = f"ok ({row.num_compared} quantities)"
            what = row.skipped or (ok if row.difference is None else f"wrong: {row.difference.quantity}")
            if row.difference is not None:
                what += f"{' of' if row.difference.expected else ''} {row.difference.where}"
            lines.append(f"{row.setting:<{width}}  {row.num_ranks:<5}  {what}")
        return "\n".join([*lines, *self.notes])


def assert_sharding_invariants(
    model_factory: Callable[[], nn.Module],
    sample_input: Any,
    **options: Any,
) -> Verification:
    """Train a model under every strategy, on several numbers of ranks, and compare all with the plain model.

    Args:
        model_factory: As for `verify_sharding`.
        sample_input: The same.
        **options: The same.

    Returns:
        What was run.

    Raises:
        AssertionError: Something differs. It names the first module in order of execution whose output or gradient
            does, or the parameter or number.

    Communicates:
        Nothing here; on the ranks what training does.
    """
    report = verify_sharding(model_factory, sample_input, **options)
    if report.differences:
        raise AssertionError(f"{report.differences[0]}\n\n{report}")
    return report


def verify_sharding(
    model_factory: Callable[[], nn.Module],
    sample_input: Any,
    *,
    worlds: Sequence[int] = (1, 2, 4),
    settings: Sequence[str] = DEFAULT_SETTINGS,
    steps: int = 3,
    loss: Callable[[Any], Tensor] | None = None,
    step: Callable[[nn.Module, Optimizer, Any], Any] | None = None,
    oracle_step: Callable[[nn.Module, Optimizer, Any], Any] | None = None,
    optimizer: Callable[[nn.Module], Optimizer] = adamw,
    shard: Callable[..., Any] | None = None,
    evaluate: Callable[[nn.Module, Any], Any] | None = None,
    equal_buffers: bool = False,
    dtype: torch.dtype | None = None,
    pool: WorldPool | None = None,
) -> Verification:
    """As `assert_sharding_invariants`, but differences are returned.

    Everything given is sent to the ranks by pickle: functions have to be at the top of a module.

    Args:
        model_factory: Makes the plain model; it is called with the same random numbers each time.
        sample_input: What the model is called with: a tensor, a tuple, or a dict of keywords. Each rank and step gets
            its elements in another order. Or a function of rank and step that returns one.
        worlds: Numbers of ranks, each a process.
        settings: Names of `SETTINGS`. With `step`, "accumulation" and "clipping" are left out: they are the step's.
        steps: Training steps.
        loss: Of the model's output; by default the output if it is one number, its `.loss`, or a mean of squares.
        step: A training step, `step(model, optimizer, batch)`; it may return its loss, or a dict of that and other
            values to compare. The plain model's step has the batches of all ranks in one.
        oracle_step: What the plain model's step is, if not `step` as well.
        optimizer: Makes the optimizer of a model.
        shard: Shards the model in place, `shard(model, **options)`; `fully_shard` on the root by default.
        evaluate: Evaluates, `evaluate(model, batch)`; it must change nothing.
        equal_buffers: Whether buffers have to be equal on all ranks after training.
        dtype: To convert the model and its input to.
        pool: Worlds that run already.

    Returns:
        A row for each setting and world.

    Raises:
        ArgumentError: A number is below 1, or there is no such setting.
        RemoteRankError: The plain model cannot be trained.

    Communicates:
        Nothing here; on the ranks what training does.
    """
    program = Program(*(model_factory, sample_input, loss, step, oracle_step, optimizer, shard, evaluate, steps, dtype))
    _check(settings, worlds, steps)
    with ExitStack() as stack:
        pool = pool if pool is not None else stack.enter_context(WorldPool(group_timeout_s=60.0))
        return _Verifier(program, pool, equal_buffers=equal_buffers).verify(worlds, settings)


def _check(settings: Sequence[str], worlds: Sequence[int], steps: int) -> None:
    if unknown := [name for name in settings if name not in SETTINGS]:
        raise ArgumentError(
            f"verify_sharding: settings must be of {', '.join(SETTINGS)}, but {unknown[0]!r} is none. Name others."
        )
    if not worlds or not settings or min(worlds) < 1 or steps < 1:
        raise ArgumentError(
            f"verify_sharding: worlds, settings and steps must be one or more, but they are {list(worlds)}, "
            f"{list(settings)} and {steps}. Pass worlds=(1, 2) and steps=3."
        )


class _Verifier:
    """Runs settings and worlds one after the other; a plain run is made once for all that are compared with it."""

    def __init__(self, program: Program, pool: WorldPool, *, equal_buffers: bool) -> None:
        self.program, self.pool, self.equal_buffers = program, pool, equal_buffers
        self._plain: dict[tuple[object, ...], list[Record]] = {}
        self.report = Verification()

    def verify(self, worlds: Sequence[int], settings: Sequence[str]) -> Verification:
        """A row for each."""
        for num_ranks in worlds:
            for name in settings:
                self.report.rows.append(self._row(name, SETTINGS[name], num_ranks))
        return self.report

    def _row(self, name: str, setting: Setting, num_ranks: int) -> Row:
        if self.program.step is not None and (setting.micro_batches > 1 or setting.is_clipped):
            return Row(name, num_ranks, skipped="left out: the step is yours")
        run = Run(self.program, setting, num_ranks, self._clip_norm(num_ranks) if setting.is_clipped else None)
        if self._same_batches(num_ranks):
            return Row(name, num_ranks, _problem(name, num_ranks, "ranks", ["0", "1"], _SAME_BATCHES))
        try:
            records = self.pool.run(num_ranks, train_sharded, run, timeout_s=_TIMEOUT_S)
        except RemoteRankError as error:
            self._oracle(run)  # raises where the plain model cannot be trained either
            said = self.pool.run(1, try_checkpoint, run, timeout_s=_TIMEOUT_S)[0] if setting.is_checkpointed else ""
            if said:
                return Row(name, num_ranks, skipped=f"left out: the plain model cannot recompute its blocks ({said})")
            return Row(name, num_ranks, _raised(name, num_ranks, error))
        if setting.is_checkpointed and not records[0].num_blocks:
            return Row(name, num_ranks, skipped="left out: no blocks in a ModuleList")
        put_together(records)
        oracle = self._oracle(run, records[0])
        if self.program.step is not None:
            with_mean_losses(records)
        num = sum(len(record.seen) for record in records)
        return Row(name, num_ranks, self._difference(name, records, oracle), num_compared=num)

    def _difference(self, name: str, records: Sequence[Record], oracle: Oracle) -> Difference | None:
        for record in (oracle.record, *records):
            for kind, _, words in record.problems[:1]:
                names = [each for other, each, said in record.problems if (other, said) == (kind, words)]
                return _problem(name, len(records), kind, list(dict.fromkeys(names)), words)
        found = first_difference(name, records, oracle)
        return self._unequal_buffers(name, records) if found is None else found

    def _unequal_buffers(self, name: str, records: Sequence[Record]) -> Difference | None:
        names = [
            key.name
            for key, value in records[0].seen.items()
            if key.kind == "buffer"
            and not all(torch.equal(r.seen[key.with_rank(i)], value) for i, r in enumerate(records))
        ]
        if names and self.equal_buffers:
            return _problem(name, len(records), "buffer", names, _OWN_BUFFERS)
        note = f"note: buffer {', '.join(names)}: {_OWN_BUFFERS}"
        if names and note not in self.report.notes:
            self.report.notes.append(note)
        return None

    def _same_batches(self, num_ranks: int) -> bool:
        if not callable(self.program.sample) or num_ranks == 1:
            return False
        first, second = (pytree.tree_leaves(self.program.batch(rank, 0)) for rank in (0, 1))
        pairs = [(a, b) for a, b in zip(first, second, strict=True) if isinstance(a, Tensor)]
        return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)

    def _clip_norm(self, num_ranks: int) -> float:
        """Half of the norm that the first gradients have."""
        seen = self._oracle(Run(self.program, SETTINGS["full"], num_ranks)).record.seen
        grads = [value.abs().double().square().sum() for key, value in seen.items() if key.kind == "gradient"]
        return float(torch.stack(grads).sum().sqrt()) / 2

    def _oracle(self, run: Run, like: Record | None = None) -> Oracle:
        setting, is_whole = run.setting, self.program.step is not None
        micro_batches = like.num_parts if is_whole and like is not None else 1
        known = (run.num_ranks, setting.micro_batches, run.clip, setting.precision, micro_batches)
        if known not in self._plain:
            plain = replace(run, micro_batches=micro_batches)
            (self._plain[known],) = self.pool.run(1, train_alone, plain, _NUM_NUDGES, timeout_s=_TIMEOUT_S)
        records = self._plain[known]
        if is_whole and like is not None:
            records = [by_rank(record, like, run.num_ranks) for record in records]
        eps = torch.finfo(torch.bfloat16).eps if setting.precision else None
        return oracle_of(records[0], records[1:], eps)


_SAME_BATCHES = "they train on the same data: give the sampler its rank."
_OWN_BUFFERS = "ranks have different ones; fully_shard(buffers='broadcast') keeps rank 0's."
_MAX_NAMES = 5


def _problem(setting: str, num_ranks: int, kind: str, names: Sequence[str], words: str) -> Difference:
    """What is wrong by itself."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return Difference(setting, num_ranks, -1, kind, ", ".join(names[:_MAX_NAMES]) + more, "", "", words)


def _raised(setting: str, num_ranks: int, error: RemoteRankError) -> Difference:
    """What a rank raised, in the place of a value."""
    message = str(error).partition("\nTraceback")[0]
    frames = [line.strip() for line in error.remote_traceback.splitlines() if line.startswith("  File")]
    own = [frame for frame in frames if "/dshard/" not in frame and "/torch/" not in frame]
    where = own[-1] if own else "the run"
    return Difference(setting, num_ranks, error.rank, "an exception at", where, "", "", message[:2000])
